"""Unpacks matrices in published formats, with one kernel for each piece of a matrix."""
