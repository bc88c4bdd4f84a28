"""A flow without bytes or a clock, for tests of its decisions: time is a number, a tier is a dictionary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from stowage.cache.flow import Flow
from stowage.cache.flow_types import Action, Discard, Fetch, StartLoad, StartStore
from stowage.core.geometry import Geometry, Group, Kind, SlabClass

FULL = 0b1111
PAYLOAD = 4096
Started = TypeVar("Started", bound=Action)


class Setup:
    """A flow over `slots` slots and tiers that hold what `held` says."""

    def __init__(
        self, slots: int = 8, tiers: int = 1, spill_chunks: float = 64, payload: int = PAYLOAD, blocks: int = 4
    ) -> None:
        geometry = Geometry((Group(0, Kind.FULL, 16, blocks, payload // blocks),))
        self.held: list[dict[bytes, int]] = [{} for _ in range(tiers)]
        indexes = [self._index(tier) for tier in range(tiers)]
        slab = SlabClass(payload, (0,), slots, 0, 0)
        self.flow = Flow(geometry, [slab], indexes, int(spill_chunks * payload) * tiers)

    def _index(self, tier: int) -> Callable[[list[bytes]], NDArray[np.uint64]]:
        return lambda keys: np.array([self.held[tier].get(key, 0) for key in keys], np.uint64)

    def store(self, *names: int, now_s: float = 0.0, mask: int = FULL) -> NDArray[np.int64]:
        slots = self.flow.reserve(0, keys(*names), masks([mask] * len(names)))
        self.flow.commit(slots, now_s)
        return slots

    def actions(self) -> list[Action]:
        self.flow.check()
        return self.flow.take_actions()

    def only(self, kind: type[Started]) -> Started:
        """The one action that there is."""
        (action,) = self.actions()
        assert isinstance(action, kind)
        return action

    def loading(self, *names: int) -> tuple[Fetch, StartLoad]:
        """The first tier holds these chunks, and they are fetched."""
        self.held[0] = dict.fromkeys(keys(*names), FULL)
        return self.flow.fetch([(0, keys(*names))], 10.0, 0.0), self.only(StartLoad)

    def answer(self, action: Action, ok: Sequence[bool], now_s: float = 0.0, mask: int = FULL) -> None:
        assert not isinstance(action, Discard)
        if isinstance(action, StartStore):
            self.held[action.tier] |= {
                key: int(mask) for key, mask, good in zip(action.keys, action.masks, ok, strict=True) if good
            }
        self.flow.outcome(action.id, np.array(ok), masks([mask if good else 0 for good in ok]), now_s)
        self.flow.check()


def keys(*names: int) -> list[bytes]:
    return [name.to_bytes(32, "little") for name in names]


def masks(values: Sequence[int]) -> NDArray[np.uint64]:
    return np.array(values, np.uint64)
