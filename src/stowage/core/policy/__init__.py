"""Eviction policies: which chunk leaves the host arena when a slot is needed. One file per policy."""

from stowage.core.policy.base import Policy
from stowage.core.policy.lru import LRU

__all__ = ["LRU", "Policy"]
