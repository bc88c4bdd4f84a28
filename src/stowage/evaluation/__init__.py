"""Runs with and without offloading, compared: parity, scored tasks, and the proof of a packed checkpoint."""
