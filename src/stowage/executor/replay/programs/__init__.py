"""Programs: consecutive calls of a list as one call of the kernels."""
