"""Bytes at rest: the envelope around one chunk, and the layout of a segment file. Pure functions on bytes, no I/O.

`docs/format.md` is the contract; this package is its only implementation.
"""
