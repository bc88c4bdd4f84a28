"""What is stored and when: pure arithmetic and state machines. No torch, no I/O, no clock, no threads."""

from stowage.core.copy_plan import CopyPlan, Incomplete, LoadPlan, load_plan, store_plan
from stowage.core.geometry import NULL_BLOCK, Geometry, Group, Kind, SlabClass, split_arena
from stowage.core.groups import GroupStrategy, strategy
from stowage.core.key import Chain, group_keys, namespace, private_key
from stowage.core.reuse import longest_boundary

__all__ = [
    "NULL_BLOCK",
    "Chain",
    "CopyPlan",
    "Geometry",
    "Group",
    "GroupStrategy",
    "Incomplete",
    "Kind",
    "LoadPlan",
    "SlabClass",
    "group_keys",
    "load_plan",
    "longest_boundary",
    "namespace",
    "private_key",
    "split_arena",
    "store_plan",
    "strategy",
]
