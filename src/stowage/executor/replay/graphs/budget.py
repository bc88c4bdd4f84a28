"""How much of a device's KV budget recorded graphs may take."""

from __future__ import annotations

SHARE, SHARE_LEAST_BYTES, SHARE_MOST_BYTES = 16, 8 << 20, 512 << 20
"""Recordings may take 1/``SHARE`` of the KV budget, within these limits. Below the least nothing is recorded: torch
allocates memory for them in blocks of 2 and 20 MiB.
"""


def share(kv_cache_memory_bytes: int) -> int:
    """Bytes of a device's KV budget that recordings may take; 0: it is too small for them."""
    part = min(kv_cache_memory_bytes // SHARE, SHARE_MOST_BYTES)
    return part if part >= SHARE_LEAST_BYTES else 0


def with_share(pool_bytes: int) -> int:
    """The KV budget that leaves ``pool_bytes`` for the pools beside the share of recordings."""
    return pool_bytes + min(-(-pool_bytes // (SHARE - 1)), SHARE_MOST_BYTES)
