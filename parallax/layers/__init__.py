"""Flax Linen layers in local view: each declares its parameters and activations in the notation."""
