"""Read from traced programs: what is sent, computed and held. Nothing is compiled, and no device is needed."""
