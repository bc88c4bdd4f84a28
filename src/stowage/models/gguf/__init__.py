"""Models in GGUF files: config, tokenizer and names of tensors, from what a file says of itself."""
