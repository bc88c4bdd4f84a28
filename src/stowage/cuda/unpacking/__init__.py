"""Matrices in published formats as numbers, in one kernel for each piece of a matrix."""
