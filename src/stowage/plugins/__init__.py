"""Faces for programs that bring their own engine: the same keys, groups, store and tiers, under their caches."""
