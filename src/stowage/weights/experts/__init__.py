"""Mixture-of-experts weights: those that a router chooses, in a bounded cache."""
