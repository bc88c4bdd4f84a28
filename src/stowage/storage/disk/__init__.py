"""The disk tier: append-only segments in a private directory, within a hard byte limit (docs/format.md)."""

from stowage.storage.disk.tier import DiskTier, least_limit_bytes

__all__ = ["DiskTier", "least_limit_bytes"]
