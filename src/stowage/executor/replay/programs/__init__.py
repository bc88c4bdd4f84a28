"""Runs of a list's calls as one call of the kernels each."""
