"""Replay on a device: decode steps as graphs."""
