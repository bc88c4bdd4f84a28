"""Tiers: memories below the device. `protocol` says what a lower tier is, `host` is the arena that all of them fill."""
