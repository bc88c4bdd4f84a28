"""A CPU's decode steps as lists of calls."""
