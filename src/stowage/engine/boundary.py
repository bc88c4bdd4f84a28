"""Where a sequence resumes: the longest boundary that device, host and lower tiers can serve together, and is worth it.

Owns the choice, and what each group needs for it. Takes nothing, starts nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from stowage.cache.cost_model import CostModel, bytes_of_tiers
from stowage.core.geometry import NULL_BLOCK, Kind, MaskArray
from stowage.core.reuse import longest_boundary
from stowage.engine.kv_manager import KVManager
from stowage.engine.sequence import Sequence
from stowage.executor.block_pool import BlockPool


@dataclass(slots=True)
class Need:
    """What one group needs on the device to resume at the boundary."""

    pool: BlockPool
    first: int
    held: NDArray[np.int64]
    chunks: list[int] = field(default_factory=list)
    place: int = -1
    """Which of the fetch's answers is this need's; none for a need without chunks."""
    stays: bool = False
    """What is fetched is read in host memory and gets no blocks."""

    @property
    def lacking(self) -> int:
        """Blocks to allocate. A recurrent group always needs one: the live state, beside the snapshot that it begins
        from.
        """
        if self.stays:
            return 0
        return 1 if self.pool.group.kind is Kind.RECURRENT else int((self.held == NULL_BLOCK).sum())

    @property
    def retained(self) -> list[int]:
        found: list[int] = self.held[self.held != NULL_BLOCK].tolist()
        return found


@dataclass(frozen=True, slots=True)
class Choice:
    """``near``: the boundary that the device serves alone. ``boundary``: the one to resume at, with what each group
    needs for it, and the bytes of that from each tier below the host. ``far``: the one that is reached by loading while
    the tokens before it are computed (``overlapped_load``); ``boundary`` where there is nothing to be won by that.
    """

    near: int
    boundary: int
    needs: list[Need]
    below: dict[int, int]
    far: int


class Boundaries:
    """Chooses. ``step``: ``Geometry.boundary_tokens``."""

    def __init__(self, kv_manager: KVManager, cost_model: CostModel, step: int) -> None:
        self._kv_manager = kv_manager
        self._cost_model = cost_model
        self._step = step

    def choose(self, sequence: Sequence, *, whole: bool) -> Choice:
        """``whole``: what is loaded is there before anything is computed. A refusal is counted."""
        kv_manager = self._kv_manager
        keys = [sequence.keys.of(pool.group.index) for pool in kv_manager.pools]
        device = [pool.lookup(k) for pool, k in zip(kv_manager.pools, keys, strict=True)]
        near = self._longest(sequence, device)
        if kv_manager.store is None:
            return self._resume(sequence, near, near)
        below = [kv_manager.store.lookup(i, k) for i, k in enumerate(keys)]
        if sequence.refused:
            for masks, group in zip(below, keys, strict=True):
                masks[[k in sequence.refused for k in group]] = 0
        far = self._longest(sequence, _either(device, below))
        if far <= near:
            return self._resume(sequence, near, near)
        needs = self.needs(sequence, far)
        bytes_below = self.bytes_below((need.pool, self.keys(sequence, need)) for need in needs)
        if not bytes_below:
            return Choice(near, far, needs, bytes_below, far)
        host = [m.copy() for m in below]
        for index, (masks, group) in enumerate(zip(host, keys, strict=True)):
            masks[kv_manager.store.sources(index, group) != 0] = 0
        at_hand = self._longest(sequence, _either(device, host))
        if not whole and self._cost_model.worth_overlapping(far - at_hand, bytes_below):
            for masks, (pool, held) in zip(below, zip(kv_manager.pools, device, strict=True), strict=True):
                chunks = min(len(masks), at_hand // pool.group.chunk_tokens)
                masks[:chunks] |= held[:chunks]  # beyond it only tiers bring anything
            met = self._longest(sequence, below)
            if met > at_hand:
                return self._resume(sequence, near, at_hand, met)
        if self._cost_model.worth_loading(far - near, bytes_below):
            return Choice(near, far, needs, bytes_below, far)
        kv_manager.counters.loads_refused += 1
        return self._resume(sequence, near, at_hand)  # what is in host already costs no load

    def _resume(self, sequence: Sequence, near: int, boundary: int, far: int = 0) -> Choice:
        return Choice(near, boundary, self.needs(sequence, boundary), {}, max(far, boundary))

    def _longest(self, sequence: Sequence, masks: Items[MaskArray]) -> int:
        return longest_boundary(self._kv_manager.strategies, masks, sequence.reusable_tokens, self._step)

    def needs(self, sequence: Sequence, boundary: int) -> list[Need]:
        """What each group lacks of a resume at ``boundary``, and what of it the device holds."""
        needs = []
        for pool, strategy in zip(self._kv_manager.pools, self._kv_manager.strategies, strict=True):
            per_chunk = pool.group.blocks_per_chunk
            wanted = strategy.needed_blocks(boundary)
            keys = sequence.keys.of(pool.group.index)
            chunks = strategy.needed(boundary)
            found = np.array([pool.find(keys[c]) for c in chunks], dtype=np.int64).reshape(-1)
            offset = chunks.start * per_chunk
            held = found[wanted.start - offset : wanted.stop - offset]
            need = Need(pool, wanted.start, held)
            lacking = np.flatnonzero(held == NULL_BLOCK) + wanted.start
            need.chunks = np.unique(lacking // per_chunk).tolist()
            needs.append(need)
        return needs

    def bytes_below(self, wanted: Iterable[tuple[BlockPool, list[bytes]]]) -> dict[int, int]:
        """Bytes of these chunks that come from each tier below the host."""
        store = self._kv_manager.store
        assert store is not None
        return bytes_of_tiers(
            (store.sources(pool.group.index, keys), pool.group.bytes_per_chunk) for pool, keys in wanted
        )

    def keys(self, sequence: Sequence, need: Need) -> list[bytes]:
        """Of the chunks that are to be fetched."""
        keys = sequence.keys.of(need.pool.group.index)
        return [keys[chunk] for chunk in need.chunks]


def _either(a: Items[MaskArray], b: Items[MaskArray]) -> list[MaskArray]:
    return [one | other for one, other in zip(a, b, strict=True)]
