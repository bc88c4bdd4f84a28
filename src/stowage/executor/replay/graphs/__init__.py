"""A device's decode steps as graphs."""
