"""The training step, which is compiled: state, update and optimizer, and what they are built from."""
