"""Layers of a model in one call each, where a trial shows that the call computes the same."""
