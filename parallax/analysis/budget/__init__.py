"""Emulates how XLA uses buffers."""
