"""Training: state, step and optimizer, which are compiled, and the loop around them on the host."""
