"""One strategy per kind of cache group; `strategy` picks it."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Final

from stowage.core.geometry import Group, Kind
from stowage.core.groups.base import GroupStrategy
from stowage.core.groups.chunked import Chunked
from stowage.core.groups.full import Full
from stowage.core.groups.recurrent import Recurrent, snapshot_spacing
from stowage.core.groups.sliding import Sliding

__all__ = ["Chunked", "Full", "GroupStrategy", "Recurrent", "Sliding", "snapshot_spacing", "strategy"]

_STRATEGIES: Final = MappingProxyType[Kind, Callable[[Group], GroupStrategy]](
    {Kind.FULL: Full, Kind.SLIDING: Sliding, Kind.CHUNKED: Chunked, Kind.RECURRENT: Recurrent}
)


def strategy(group: Group) -> GroupStrategy:
    """The strategy of a group's kind."""
    return _STRATEGIES[group.kind](group)
