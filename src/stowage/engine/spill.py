"""Preempted sequences: everything they need to go on is put into host memory, and taken back, not computed again.

Owns what preempted sequences hold in the arena. Complete chunks that the host has already are pinned where they are;
the rest (the unfinished last chunk, the live recurrent state, chunks that were evicted) gets private slots, which
nobody else can find or evict. When the host has no room the sequence is computed again, which is slower and just as
right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stowage.core.geometry import NULL_BLOCK, Kind
from stowage.core.key import private_key
from stowage.core.plan import CopyPlan
from stowage.engine.pool import BlockPool
from stowage.engine.residency import Residency
from stowage.engine.sequence import Phase, Sequence
from stowage.store import Fetch, TieredStore


@dataclass(slots=True)
class GroupSpill:
    """One group's blocks of a spilled sequence: block ``first + i`` lies in ``slots[i]`` at ``offsets[i]``; ``held``
    are the real ones.
    """

    first: int
    slots: NDArray[np.int64]
    offsets: NDArray[np.int64]
    private: NDArray[np.int64]
    pinned: Fetch | None


class Spill:
    """Puts sequences into host memory and takes them back."""

    def __init__(self, residency: Residency, namespace: bytes, nonce: bytes, clock: Callable[[], float]) -> None:
        self._residency = residency
        self._namespace = namespace
        self._nonce = nonce
        self._clock = clock
        self._spilled: dict[int, list[GroupSpill]] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._spilled)

    def out(self, sequence: Sequence) -> None:
        """Take the device from ``sequence``: PREEMPTED afterwards, or WAITING to be computed again when the host has no
        room.
        """
        counters = self._residency.counters
        counters.preemptions += 1
        sequence.preemptions += 1
        self._count += 1
        groups: list[GroupSpill] = []
        if self._residency.store is not None and sequence.computed:
            for pool in self._residency.pools:
                spilled = self._spill_group(self._residency.store, sequence, pool)
                if spilled is None:
                    break
                groups.append(spilled)
        self._residency.drop(sequence)
        if len(groups) == len(self._residency.pools):
            self._spilled[sequence.id] = groups
            sequence.phase = Phase.PREEMPTED
            return
        self._free(groups)
        counters.preemptions_recomputed += 1
        sequence.restart()
        sequence.phase = Phase.WAITING

    def back(self, sequence: Sequence, headroom_blocks: int) -> bool:
        """Give ``sequence`` its blocks again: RUNNING afterwards. False while blocks are lacking; ``headroom_blocks``
        are left free per group.

        When a copy fails the sequence is WAITING, to be computed again.
        """
        groups = self._spilled[sequence.id]
        pools = self._residency.pools
        if any(len(g.slots) + headroom_blocks > p.available for g, p in zip(groups, pools, strict=True)):
            return False
        del self._spilled[sequence.id]
        sequence.phase = Phase.RUNNING
        if not all(self._restore_group(sequence, g, p) for g, p in zip(groups, pools, strict=True)):
            self._residency.drop(sequence)
            sequence.restart()
            sequence.phase = Phase.WAITING
        self._free(groups)
        return True

    def forget(self, sequence: Sequence) -> None:
        """Free what ``sequence`` holds in host memory."""
        self._free(self._spilled.pop(sequence.id))

    def _spill_group(self, store: TieredStore, sequence: Sequence, pool: BlockPool) -> GroupSpill | None:
        """Put one group's live blocks into slots; ``None`` when there is no room or a copy failed."""
        group = pool.group
        table = sequence.table(group.index)
        if group.kind is Kind.RECURRENT:
            blocks = np.zeros(1, dtype=np.int64)
        else:
            first = self._residency.strategies[group.index].first_live_block(sequence.computed)
            blocks = np.arange(first, -(-sequence.computed // group.block_tokens))
        chunks, offsets = np.divmod(blocks, group.blocks_per_chunk)
        slot_of, pinned = self._pin_known(store, sequence, pool, np.unique(chunks), blocks)
        rest = [chunk for chunk in np.unique(chunks).tolist() if chunk not in slot_of]
        private = store.reserve_private(group.index, [self._key(sequence, group.index, chunk) for chunk in rest])
        spilled = GroupSpill(
            int(blocks[0]) if len(blocks) else 0, np.zeros(0, np.int64), offsets, private[private >= 0], pinned
        )
        if (private < 0).any():
            store.drop_private(spilled.private)
            spilled.private = spilled.private[:0]
            self._free([spilled])
            return None
        slot_of.update(zip(rest, private.tolist(), strict=True))
        spilled.slots = np.array([slot_of[chunk] for chunk in chunks.tolist()], dtype=np.int64)
        copied = np.isin(chunks, rest)
        plan = CopyPlan(group.index, table[blocks[copied]], spilled.slots[copied], offsets[copied])
        if not self._residency.copy_out(pool, plan, private, private=True):
            spilled.private = spilled.private[:0]
            self._free([spilled])
            return None
        return spilled

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
        complete = [c for c in chunks.tolist() if (c + 1) * group.chunk_tokens <= sequence.computed and c < len(keys)]
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
        fetch = store.fetch([(group.index, [keys[c] for c in known])], self._clock())
        slots, masks = fetch.slots[0].tolist(), fetch.masks[0].tolist()
        found = {c: s for c, s, m in zip(known, slots, masks, strict=True) if s >= 0 and m & needed[c] == needed[c]}
        return found, fetch

    def _key(self, sequence: Sequence, group: int, chunk: int) -> bytes:
        return private_key(self._namespace, sequence.id, group, chunk, self._nonce + self._count.to_bytes(8, "little"))

    def _restore_group(self, sequence: Sequence, spilled: GroupSpill, pool: BlockPool) -> bool:
        fresh = pool.allocate(len(spilled.slots))
        assert fresh is not None, "room was checked"
        sequence.tables[pool.group.index].append([NULL_BLOCK] * spilled.first + fresh)
        sequence.freed[pool.group.index] = spilled.first
        plan = CopyPlan(pool.group.index, np.array(fresh, dtype=np.int64), spilled.slots, spilled.offsets)
        return self._residency.copy_in(pool, plan)

    def _free(self, groups: list[GroupSpill]) -> None:
        store = self._residency.store
        for spilled in groups:
            assert store is not None
            if len(spilled.private):
                store.drop_private(spilled.private)
            if spilled.pinned is not None:
                store.release(spilled.pinned)
