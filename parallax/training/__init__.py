"""Training: state, step and optimizer, which are compiled, and the training loop on the host."""
