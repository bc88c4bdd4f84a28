"""Eviction policies: which chunk leaves the host arena when a slot is needed. One file per policy."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from stowage.cache.policy.arc import ARC
from stowage.cache.policy.base import Policy
from stowage.cache.policy.cost import CostAware
from stowage.cache.policy.lru import LRU
from stowage.cache.policy.native import cost_aware
from stowage.cache.policy.s3fifo import S3FIFO
from stowage.config.memory import POLICIES as NAMES

__all__ = ["ARC", "LRU", "POLICIES", "POLICY_DEFAULT", "S3FIFO", "CostAware", "MakePolicy", "Policy"]

MakePolicy = Callable[[int, int], Policy]
"""Makes a policy over so many slots, of which it holds at most so many."""

POLICIES: Final[Mapping[str, MakePolicy]] = MappingProxyType(
    {"cost": cost_aware, "lru": LRU, "s3fifo": S3FIFO, "arc": ARC}
)
assert tuple(POLICIES) == NAMES
POLICY_DEFAULT: Final = NAMES[0]
