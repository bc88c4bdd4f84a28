"""Running sequences whose KV is larger than the device: the oldest blocks of their full groups move to host memory.

Owns which sequences are *long* (even alone they do not fit), whether host memory can take another, and the moves.
What has moved stays there for as long as the sequence runs, and attention reads it there: by the kernels in place, by
torch in pieces (``streaming``). So moves go one way and end; nothing is passed back and forth.

    lacking a block        a long sequence offloads its own oldest chunks first, then those of other long ones;
                           only then somebody is preempted (``scheduler``)
    a prefix from below    stays in host memory and is read from there (``admission``), if the sequence is long
    several at once        long sequences begin together only while host memory could take all that they have

Never moves a chunk that is not complete, nor windows and states, which are bounded.
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
"""Of a pool, one such part is moved at a time where less is lacking: every move costs a little besides its bytes."""


class LongContextSwap:
    """Offloads blocks of running sequences to host memory."""

    def __init__(self, kv_manager: KVManager, swap_space: SwapSpace, capacity: Capacity) -> None:
        self._kv_manager = kv_manager
        self._swap_space = swap_space
        self._capacity = capacity
        self._full = [pool for pool in kv_manager.pools if pool.group.kind is Kind.FULL]

    def is_long(self, sequence: Sequence) -> bool:
        """Whether ``sequence`` is larger than the device by now: what it may come to is often left open by who asks."""
        step = self._capacity.max_num_batched_tokens
        return bool(self._capacity.slabs) and any(
            blocks_needed(pool.layout, len(sequence.tokens), step) > pool.blocks for pool in self._full
        )

    def admits(self, sequence: Sequence, others: Items[Sequence]) -> bool:
        """Whether ``sequence``, which is long, can begin beside ``others``: host memory has room for all that the long
        ones have, and for another step of each. What they grow beyond that, the youngest may have to make room for.
        """
        beside = [other for other in others if self.is_long(other)]
        return not beside or self._capacity.has_slots([self._chunks(s) for s in (sequence, *beside)])

    def _chunks(self, sequence: Sequence) -> Counts:
        tokens = min(sequence.length_max, len(sequence.tokens) + self._capacity.max_num_batched_tokens)
        return {pool.group.index: -(-tokens // pool.group.chunk_tokens) for pool in self._full}

    def headroom(self, pool: BlockPool, newcomer: Sequence, running: Items[Sequence]) -> tuple[int, int]:
        """Blocks that ``newcomer``, if it is long, is well served with at first; and blocks that it leaves to those of
        ``running`` that are long, so that they go on in whole steps. Each of them counts for an even share at most.
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
        """Tokens that a long ``sequence`` can be given room for by moving chunks of its own alone."""
        rooms = [
            (pool.available + len(self._movable(sequence, pool)) + len(sequence.tables[pool.group.index]))
            * pool.group.block_tokens
            - sequence.computed
            for pool in self._full
        ]
        return min(rooms, default=0)  # without full groups nothing can be moved

    def make_room(self, lacking: Items[int], sequences: Items[Sequence]) -> bool:
        """Move chunks of those of ``sequences`` that are long, of the first ones first, until each pool has ``lacking``
        blocks available. Whether it has.
        """
        short = [(p, need) for p, need in zip(self._kv_manager.pools, lacking, strict=True) if need > p.available]
        if any(pool.group.kind is not Kind.FULL or need > pool.blocks for pool, need in short):
            return False
        for pool, need in short:
            for sequence in filter(self.is_long, sequences):
                while need > pool.available and self._move(sequence, pool, need - pool.available):
                    pass
        return all(need <= pool.available for pool, need in short)

    def move_all(self, sequence: Sequence) -> None:
        """Move every complete chunk of ``sequence``, as far as host memory has room."""
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
        """Offload the oldest chunks of ``sequence``: ``need`` blocks or some more, or fewer where it has no more.
        Whether any was moved.
        """
        per_chunk = pool.group.blocks_per_chunk
        blocks = self._movable(sequence, pool)
        if not len(blocks):
            return False
        for count in (max(need, pool.blocks // MOVED_PARTS), need, 1):
            last = blocks[min(count, len(blocks)) - 1] // per_chunk  # whole chunks are moved
            held = self._swap_space.put(sequence, pool, blocks[: np.searchsorted(blocks, (last + 1) * per_chunk)])
            if held is not None:
                self._send(sequence, pool, held)
                return True
        return False

    def _send(self, sequence: Sequence, pool: BlockPool, held: SwappedBlocks) -> None:
        pool.release(sequence.tables[held.group].offload(held.blocks, held.addresses))
        sequence.held.append(held)
        self._kv_manager.counters.blocks_moved_out += len(held.blocks)

    def adopt(self, sequence: Sequence, pool: BlockPool, plan: CopyPlan, keys: list[bytes]) -> None:
        """Let ``sequence`` read blocks where they lie in host memory: block ``plan.blocks[i]`` of the sequence, in slot
        ``plan.slots[i]`` at ``plan.offsets[i]``. They are the chunks of ``keys``, which are pinned, and stay so.
        """
        store = self._kv_manager.store
        assert store is not None
        addresses = addresses_of(store, pool.group, plan.slots, plan.offsets)
        pinned = self._swap_space.pin(pool.group.index, keys)
        assert (pinned.slots[0] >= 0).all(), "a chunk that is pinned has left"
        held = SwappedBlocks(pool.group.index, plan.blocks, plan.slots, plan.offsets, addresses, pinned=pinned)
        self._send(sequence, pool, held)

    def check(self, sequences: Items[Sequence]) -> None:
        """Assert that nobody holds host memory for blocks but long sequences."""
        assert all(not sequence.held or self.is_long(sequence) for sequence in sequences)
