"""Inference: cached decoding, sampling, text generation, and captured activations."""
