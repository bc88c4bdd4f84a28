"""Replay on a CPU: decode steps and prompts as lists of calls."""
