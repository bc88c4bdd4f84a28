"""Fused layers: one kernel call for a layer's many torch calls, where a trial shows that it computes the same."""
