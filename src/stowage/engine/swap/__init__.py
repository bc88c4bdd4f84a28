"""Blocks of sequences in host memory: of those that were preempted, and of those larger than the device."""
