"""Blocks of one sequence in host memory that nobody evicts: how they get there, and how they are let go.

Owns no sequence: ``spill`` holds what preempted sequences go on with, ``overflow`` what running ones have no room for
on the device. Complete chunks that the host has already are pinned where they are, without a copy; all others get
private slots, which nobody else can find.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from stowage.core.geometry import Group, Kind
from stowage.core.key import private_key
from stowage.core.plan import CopyPlan
from stowage.engine.layers import TENSOR_ALIGNMENT_BYTES
from stowage.engine.pool import BlockPool
from stowage.store import Fetch, TieredStore

if TYPE_CHECKING:
    from stowage.engine.residency import Residency
    from stowage.engine.sequence import Sequence


@dataclass(slots=True, eq=False)
class Held:
    """Blocks of one group: the sequence's ``blocks[i]`` lies in ``slots[i]`` at ``offsets[i]``, which is ``places[i]``
    of ``BlockTable.away``. ``private``: slots that are nobody else's; the others are ``pinned``.
    """

    group: int
    blocks: NDArray[np.int64]
    slots: NDArray[np.int64]
    offsets: NDArray[np.int64]
    places: NDArray[np.int64]
    private: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    pinned: Fetch | None = None


def places_of(
    store: TieredStore, group: Group, slots: NDArray[np.int64], offsets: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Where blocks lie in the arena, in units of ``TENSOR_ALIGNMENT_BYTES``."""
    slab = next(slab for slab in store.slabs if group.index in slab.groups)
    begins = slab.offset_bytes + (slots - slab.first_slot) * slab.slot_bytes + offsets * group.bytes_per_block
    places, rest = np.divmod(begins, TENSOR_ALIGNMENT_BYTES)
    assert not rest.any(), "a block does not begin where tensors do"
    return places


def let_go(store: TieredStore | None, held: Iterable[Held]) -> None:
    """Unpin and free what ``held`` holds."""
    for one in held:
        assert store is not None
        if len(one.private):
            store.drop_private(one.private)
        if one.pinned is not None:
            store.release(one.pinned)


class Holding:
    """Puts blocks of sequences into host memory. ``namespace`` and ``nonce`` keep the names of private slots apart."""

    def __init__(self, residency: Residency, namespace: bytes, nonce: bytes, clock: Callable[[], float]) -> None:
        self._residency = residency
        self._namespace = namespace
        self._nonce = nonce
        self._clock = clock
        self._count = 0

    def put(self, sequence: Sequence, pool: BlockPool, blocks: NDArray[np.int64]) -> Held | None:
        """Hold ``blocks`` of ``sequence``, which are on the device and stay there; ``None`` when the host has no room
        or a copy failed.
        """
        store, group = self._residency.store, pool.group
        assert store is not None
        self._count += 1
        chunks, offsets = np.divmod(blocks, group.blocks_per_chunk)
        every = np.unique(chunks)
        slot_of, pinned = self._pin_known(store, sequence, pool, every, blocks)
        rest = [chunk for chunk in every.tolist() if chunk not in slot_of]
        private = store.reserve_private(group.index, [self._key(sequence, group.index, chunk) for chunk in rest])
        if (private < 0).any():
            self._give_back(store, private, pinned)
            return None
        slot_of.update(zip(rest, private.tolist(), strict=True))
        slots = np.array([slot_of[chunk] for chunk in chunks.tolist()], dtype=np.int64)
        copied = np.isin(chunks, rest)
        table = sequence.table(group.index)
        plan = CopyPlan(group.index, table[blocks[copied]], slots[copied], offsets[copied])
        if not self._residency.copy_out(pool, plan, private, private=True):
            self._give_back(store, private[:0], pinned)  # the private ones are given back already
            return None
        places = places_of(store, group, slots, offsets)
        return Held(group.index, blocks, slots, offsets, places, private, pinned)

    def _give_back(self, store: TieredStore, private: NDArray[np.int64], pinned: Fetch | None) -> None:
        store.drop_private(private)
        if pinned is not None:
            store.release(pinned)

    def pin(self, group: int, keys: list[bytes]) -> Fetch:
        """Pin the chunks that are in host memory now."""
        assert self._residency.store is not None
        return self._residency.store.fetch([(group, keys)], self._clock())

    def _pin_known(
        self,
        store: TieredStore,
        sequence: Sequence,
        pool: BlockPool,
        chunks: NDArray[np.int64],
        blocks: NDArray[np.int64],
    ) -> tuple[dict[int, int], Fetch | None]:
        """Pin the complete chunks that host memory holds with all the blocks that are needed; their slots by chunk."""
        group = pool.group
        keys = sequence.keys.of(group.index)
        end = min(len(keys), sequence.shared_tokens // group.chunk_tokens)
        complete = [c for c in chunks.tolist() if c < end]
        if group.kind is Kind.RECURRENT or not complete:
            return {}, None
        needed = dict.fromkeys(complete, 0)
        for block in blocks.tolist():
            chunk, offset = divmod(block, group.blocks_per_chunk)
            if chunk in needed:
                needed[chunk] |= 1 << offset
        names = [keys[c] for c in complete]
        here = store.sources(group.index, names) == 0
        here &= (store.lookup(group.index, names) & np.array(list(needed.values()), np.uint64)) == list(needed.values())
        known = [c for c, present in zip(complete, here.tolist(), strict=True) if present]
        if not known:
            return {}, None
        fetch = self.pin(group.index, [keys[c] for c in known])
        slots, masks = fetch.slots[0].tolist(), fetch.masks[0].tolist()
        found = {c: s for c, s, m in zip(known, slots, masks, strict=True) if s >= 0 and m & needed[c] == needed[c]}
        return found, fetch

    def _key(self, sequence: Sequence, group: int, chunk: int) -> bytes:
        return private_key(self._namespace, sequence.id, group, chunk, self._nonce + self._count.to_bytes(8, "little"))
