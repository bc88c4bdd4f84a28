"""Matrices in int8 and 4 bits: bytes, packing, products, files."""
