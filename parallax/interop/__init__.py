"""Parameters in formats of other projects: safetensors, and folders of Hugging Face's `transformers`."""
