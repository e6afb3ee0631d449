"""A training step and what it is built from."""
