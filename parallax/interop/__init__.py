"""Parameters in files of other projects: safetensors, under plain names."""
