"""Trained weights in use: cached decoding, sampling, text generation, and captured activations."""
