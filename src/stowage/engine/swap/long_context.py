"""Offloads the oldest blocks of running sequences whose KV is larger than the device.

Owns which sequences are *long* (they do not fit even alone), whether host memory can take another, and the offloading.
Offloaded blocks stay in host memory while the sequence runs, and attention reads them there: the kernels in place,
torch in pieces (``streaming``). So a block moves once, and never back.

    a block is missing     a long sequence offloads its own oldest chunks first, then those of other long ones;
                           only then is a sequence preempted (``scheduler``)
    a loaded prefix        stays in host memory and is read there (``admission``), if the sequence is long
    several at once        long sequences run together only while host memory could hold all of them

Never offloads incomplete chunks, nor windows and recurrent states, which are bounded.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np
from numpy.typing import NDArray

from stowage.core.copy_plan import CopyPlan
from stowage.core.geometry import NULL_BLOCK, Kind
from stowage.engine.capacity import Capacity, Counts, blocks_at_work
from stowage.engine.kv_manager import KVManager
from stowage.engine.sequence import Sequence
from stowage.engine.swap.host_blocks import SwappedBlocks, addresses_of
from stowage.engine.swap.swap_space import SwapSpace
from stowage.executor.block_pool import BlockPool, blocks_needed

MOVED_PARTS = 8
"""A move offloads at least this fraction (1/8) of a pool, because every move has a fixed cost."""


class LongContextSwap:
    """Offloads blocks of running sequences to host memory."""

    def __init__(self, kv_manager: KVManager, swap_space: SwapSpace, capacity: Capacity) -> None:
        self._kv_manager = kv_manager
        self._swap_space = swap_space
        self._capacity = capacity
        self._full = [pool for pool in kv_manager.pools if pool.group.kind is Kind.FULL]

    def is_long(self, sequence: Sequence) -> bool:
        """Whether ``sequence`` is larger than the device now; requests often do not limit its possible length."""
        step = self._capacity.max_num_batched_tokens
        return bool(self._capacity.slabs) and any(
            blocks_needed(pool.group, len(sequence.tokens), step) > pool.blocks for pool in self._full
        )

    def admits(self, sequence: Sequence, others: Items[Sequence]) -> bool:
        """Whether the long ``sequence`` can run beside ``others``: host memory can hold all long ones and another step
        of each. If they grow beyond that, the youngest may be preempted.
        """
        beside = [other for other in others if self.is_long(other)]
        return not beside or self._capacity.has_slots([self._chunks(s) for s in (sequence, *beside)])

    def _chunks(self, sequence: Sequence) -> Counts:
        tokens = min(sequence.length_max, len(sequence.tokens) + self._capacity.max_num_batched_tokens)
        return {pool.group.index: -(-tokens // pool.group.chunk_tokens) for pool in self._full}

    def headroom(self, pool: BlockPool, newcomer: Sequence, running: Items[Sequence]) -> tuple[int, int]:
        """Blocks that a long ``newcomer`` should start with, and blocks that it must leave to long sequences of
        ``running`` for whole steps; at most an even share for each.
        """
        long = [sequence for sequence in running if self.is_long(sequence)]
        if pool.group.kind is not Kind.FULL:
            return 0, 0
        share = pool.blocks // (1 + len(long) + self.is_long(newcomer))
        left = 0
        for sequence in long:
            stays = int((sequence.table(pool.group.index) != NULL_BLOCK).sum()) - len(self._movable(sequence, pool))
            left += max(0, min(self._at_work(sequence, pool), share) - stays)
        return min(self._at_work(newcomer, pool), share), left

    def _at_work(self, sequence: Sequence, pool: BlockPool) -> int:
        left = len(sequence.tokens) - sequence.computed
        return blocks_at_work(pool.group, min(self._capacity.max_num_batched_tokens, left))

    def room(self, sequence: Sequence) -> int:
        """How many tokens a long ``sequence`` can grow by offloading only its own chunks."""
        rooms = [
            (pool.available + len(self._movable(sequence, pool)) + len(sequence.tables[pool.group.index]))
            * pool.group.block_tokens
            - sequence.computed
            for pool in self._full
        ]
        return min(rooms, default=0)  # without full groups nothing can be moved

    def make_room(self, missing: Items[int], sequences: Items[Sequence]) -> bool:
        """Offload chunks of long ``sequences``, in order, until pools have ``missing`` blocks; whether they have."""
        short = [(p, need) for p, need in zip(self._kv_manager.pools, missing, strict=True) if need > p.available]
        if any(pool.group.kind is not Kind.FULL or need > pool.blocks for pool, need in short):
            return False
        for pool, need in short:
            for sequence in filter(self.is_long, sequences):
                while need > pool.available and self._move(sequence, pool, need - pool.available):
                    pass
        return all(need <= pool.available for pool, need in short)

    def move_all(self, sequence: Sequence) -> None:
        """Offload every complete chunk of ``sequence``, as far as host memory has room."""
        for pool in self._full:
            while self._move(sequence, pool, pool.blocks):
                pass

    def _movable(self, sequence: Sequence, pool: BlockPool) -> NDArray[np.int64]:
        """Blocks of complete chunks that are on the device."""
        group = pool.group
        end = sequence.computed // group.chunk_tokens * group.blocks_per_chunk
        found: NDArray[np.int64] = np.flatnonzero(sequence.table(group.index)[:end] != NULL_BLOCK)
        return found

    def _move(self, sequence: Sequence, pool: BlockPool, need: int) -> bool:
        """Offload the oldest chunks of ``sequence``: about ``need`` blocks, or all it has. Whether any was moved."""
        per_chunk = pool.group.blocks_per_chunk
        blocks = self._movable(sequence, pool)
        if not len(blocks):
            return False
        for count in (max(need, pool.blocks // MOVED_PARTS), need, 1):
            last = blocks[min(count, len(blocks)) - 1] // per_chunk  # whole chunks are moved
            held = self._swap_space.put(sequence, pool, blocks[: np.searchsorted(blocks, (last + 1) * per_chunk)])
            if held is not None:
                self._use_host_blocks(sequence, pool, held)
                return True
        return False

    def _use_host_blocks(self, sequence: Sequence, pool: BlockPool, held: SwappedBlocks) -> None:
        pool.release(sequence.tables[held.group].offload(held.blocks, held.addresses))
        sequence.held.append(held)
        self._kv_manager.counters.blocks_moved_out += len(held.blocks)

    def read_in_place(self, sequence: Sequence, pool: BlockPool, plan: CopyPlan, keys: list[bytes]) -> None:
        """Let ``sequence`` read loaded blocks in host memory: its block ``plan.blocks[i]`` in slot ``plan.slots[i]`` at
        ``plan.offsets[i]``. They belong to the chunks ``keys``, which stay pinned.
        """
        store = self._kv_manager.store
        assert store is not None
        addresses = addresses_of(store, pool.group, plan.slots, plan.offsets)
        pinned = self._swap_space.pin(pool.group.index, keys)
        assert (pinned.slots[0] >= 0).all(), "a chunk that is pinned has left"
        held = SwappedBlocks(pool.group.index, plan.blocks, plan.slots, plan.offsets, addresses, pinned=pinned)
        self._use_host_blocks(sequence, pool, held)

    def check(self, sequences: Items[Sequence]) -> None:
        """Assert that only long sequences hold offloaded blocks."""
        assert all(not sequence.held or self.is_long(sequence) for sequence in sequences)
