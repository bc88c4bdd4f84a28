"""Preemption by swapping: a preempted sequence's blocks are moved to host memory, and back when it is resumed.

Owns what is swapped out, besides blocks that were offloaded before (``long_context``): complete chunks, the incomplete
last chunk, the live recurrent state (``swap_space``). If host memory is full, the sequence is recomputed instead.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stowage.core.copy_plan import CopyPlan
from stowage.core.geometry import NULL_BLOCK, Kind
from stowage.engine.kv_manager import KVManager
from stowage.engine.sequence import Phase, Sequence
from stowage.engine.swap.host_blocks import SwappedBlocks, release_swapped
from stowage.engine.swap.long_context import LongContextSwap
from stowage.engine.swap.swap_space import SwapSpace
from stowage.executor.block_pool import BlockPool


@dataclass(slots=True)
class SwappedGroup:
    """One group of a swapped sequence: ``held`` was on the device, ``offloaded`` are the addresses of what was not; no
    block before ``first`` is needed.
    """

    first: int
    held: SwappedBlocks
    offloaded: NDArray[np.int64]


class PreemptionSwap:
    """Swaps sequences out to host memory and back in."""

    def __init__(self, kv_manager: KVManager, swap_space: SwapSpace, long_context: LongContextSwap) -> None:
        self._kv_manager = kv_manager
        self._swap_space = swap_space
        self._long_context = long_context
        self._swapped: dict[int, tuple[Sequence, list[SwappedGroup]]] = {}

    def __len__(self) -> int:
        return len(self._swapped)

    def swap_out(self, sequence: Sequence) -> None:
        """Swap ``sequence`` out: PREEMPTED afterwards, or WAITING to be recomputed when host memory is full."""
        counters = self._kv_manager.counters
        counters.preemptions += 1
        sequence.preemptions += 1
        groups: list[SwappedGroup] = []
        if self._kv_manager.store is not None and sequence.computed:
            if self._long_context.is_long(sequence):
                self._long_context.move_all(sequence)  # so that it can resume with a few blocks
            for pool in self._kv_manager.pools:
                swapped = self._swap_out_group(sequence, pool)
                if swapped is None:
                    break
                groups.append(swapped)
        if len(groups) == len(self._kv_manager.pools):
            self._kv_manager.free_device_blocks(sequence)
            self._swapped[sequence.id] = (sequence, groups)
            sequence.phase = Phase.PREEMPTED
            return
        self._free(groups)
        self.recompute(sequence)

    def recompute(self, sequence: Sequence) -> None:
        """Free the blocks of ``sequence``: WAITING, to be recomputed."""
        self._kv_manager.counters.preemptions_recomputed += 1
        self._kv_manager.drop(sequence)
        sequence.restart()
        sequence.phase = Phase.WAITING

    def swap_in(self, sequence: Sequence, headroom_blocks: int, running: Items[Sequence]) -> bool:
        """Swap ``sequence`` in: RUNNING afterwards, or WAITING to be recomputed when a copy failed. False while blocks
        are missing, with ``headroom_blocks`` per group to spare; long sequences of ``running`` offload some.
        """
        _, groups = self._swapped[sequence.id]
        pools = self._kv_manager.pools
        needed = [len(g.held.blocks) for g in groups]
        if not self._long_context.make_room([count + headroom_blocks for count in needed], running):
            return False
        del self._swapped[sequence.id]
        sequence.phase = Phase.RUNNING
        if not all(self._swap_in_group(sequence, g, p) for g, p in zip(groups, pools, strict=True)):
            self._kv_manager.drop(sequence)
            sequence.restart()
            sequence.phase = Phase.WAITING
        self._free(groups)
        return True

    def drop(self, sequence: Sequence) -> None:
        """Free what ``sequence`` holds in host memory."""
        _, groups = self._swapped.pop(sequence.id)
        self._free(groups)
        self._kv_manager.drop(sequence)

    def drop_newest(self) -> bool:
        """Free the host memory of the sequence that was preempted last: WAITING, to be recomputed. False: none is."""
        if not self._swapped:
            return False
        sequence, groups = self._swapped.popitem()[1]
        self._free(groups)
        self.recompute(sequence)
        return True

    def _swap_out_group(self, sequence: Sequence, pool: BlockPool) -> SwappedGroup | None:
        """Copy one group's live blocks into slots; ``None`` when there is no room or a copy failed."""
        group = pool.group
        table = sequence.tables[group.index]
        first = 0
        blocks = np.zeros(1, dtype=np.int64)
        if group.kind is not Kind.RECURRENT:
            first = self._kv_manager.strategies[group.index].first_live_block(sequence.computed)
            blocks = np.arange(first, group.blocks_of(sequence.computed))
            blocks = blocks[table.blocks[blocks] != NULL_BLOCK]
        held = self._swap_space.put(sequence, pool, blocks)
        return None if held is None else SwappedGroup(first, held, table.offloaded.copy())

    def _swap_in_group(self, sequence: Sequence, swapped: SwappedGroup, pool: BlockPool) -> bool:
        held, group = swapped.held, pool.group
        fresh = pool.allocate(len(held.blocks))
        assert fresh is not None, "room was checked"
        blocks = np.full(group.blocks_of(sequence.computed), NULL_BLOCK, dtype=np.int64)
        blocks[held.blocks] = fresh
        table = sequence.tables[group.index]
        table.append(blocks.tolist())
        offloaded = np.flatnonzero(swapped.offloaded != NULL_BLOCK)
        table.offload(offloaded, swapped.offloaded[offloaded])
        sequence.freed[group.index] = swapped.first
        plan = CopyPlan(group.index, np.array(fresh, dtype=np.int64), held.slots, held.offsets)
        return self._kv_manager.copy_in(pool, plan)

    def _free(self, groups: list[SwappedGroup]) -> None:
        self._kv_manager.async_copies.wait_for_loads()
        release_swapped(self._kv_manager.store, [swapped.held for swapped in groups])
