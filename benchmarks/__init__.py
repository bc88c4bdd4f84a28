"""Measurements behind what the documentation claims. `results/` has them, with the machine they were taken on."""
