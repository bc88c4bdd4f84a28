"""Paged attention for GPUs, which Triton compiles while the engine opens."""
