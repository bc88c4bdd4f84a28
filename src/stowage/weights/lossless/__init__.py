"""Checkpoints whose tensors lie packed, to the bit: written, shown to Transformers, and streamed."""
