"""Communication, FLOPs, memory and time of a step: traced, compiled, profiled and planned."""
