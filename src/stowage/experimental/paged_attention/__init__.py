"""What a GPU computes in the engine's own kernels, which Triton compiles while the engine opens."""
