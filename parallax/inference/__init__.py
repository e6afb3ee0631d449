"""What is done with trained weights: cached decoding, sampling, text, evaluation, and a look at activations."""
