"""Parameters in files of other projects: safetensors, and the folders of Hugging Face's `transformers`."""
