"""What a step sends, computes, holds and takes: traced, compiled, profiled and planned."""
