"""Preempted sequences: everything they need to go on is put into host memory, and taken back, not computed again.

Owns what they hold there besides what was offloaded already (``long_context``): complete chunks, the unfinished
last chunk, the live recurrent state (``swap_space``). When the host has no room the sequence is computed again, which
is slower and just as right.
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
from stowage.engine.swap.host_blocks import SwappedBlocks, let_go
from stowage.engine.swap.long_context import LongContextSwap
from stowage.engine.swap.swap_space import SwapSpace
from stowage.executor.block_pool import BlockPool


@dataclass(slots=True)
class SwappedGroup:
    """One group of a spilled sequence: ``held`` was on the device, ``offloaded`` are the addresses of what was not; no
    block before ``first`` is needed.
    """

    first: int
    held: SwappedBlocks
    offloaded: NDArray[np.int64]


class PreemptionSwap:
    """Puts sequences into host memory and takes them back."""

    def __init__(self, kv_manager: KVManager, swap_space: SwapSpace, long_context: LongContextSwap) -> None:
        self._kv_manager = kv_manager
        self._swap_space = swap_space
        self._long_context = long_context
        self._spilled: dict[int, tuple[Sequence, list[SwappedGroup]]] = {}

    def __len__(self) -> int:
        return len(self._spilled)

    def out(self, sequence: Sequence) -> None:
        """Take the device from ``sequence``: PREEMPTED afterwards, or WAITING to be computed again when the host has no
        room.
        """
        counters = self._kv_manager.counters
        counters.preemptions += 1
        sequence.preemptions += 1
        groups: list[SwappedGroup] = []
        if self._kv_manager.store is not None and sequence.computed:
            if self._long_context.is_long(sequence):
                self._long_context.move_all(sequence)  # so that it can come back to a few blocks
            for pool in self._kv_manager.pools:
                spilled = self._spill_group(sequence, pool)
                if spilled is None:
                    break
                groups.append(spilled)
        if len(groups) == len(self._kv_manager.pools):
            self._kv_manager.vacate(sequence)
            self._spilled[sequence.id] = (sequence, groups)
            sequence.phase = Phase.PREEMPTED
            return
        self._free(groups)
        self.again(sequence)

    def again(self, sequence: Sequence) -> None:
        """Take everything from ``sequence``, which has blocks: WAITING, to be computed again."""
        self._kv_manager.counters.preemptions_recomputed += 1
        self._kv_manager.drop(sequence)
        sequence.restart()
        sequence.phase = Phase.WAITING

    def back(self, sequence: Sequence, headroom_blocks: int, running: Items[Sequence]) -> bool:
        """Give ``sequence`` its blocks again: RUNNING afterwards. False while blocks are lacking; ``headroom_blocks``
        are left free per group. Those of ``running`` that are long make room.

        When a copy fails the sequence is WAITING, to be computed again.
        """
        _, groups = self._spilled[sequence.id]
        pools = self._kv_manager.pools
        needed = [len(g.held.blocks) for g in groups]
        if not self._long_context.make_room([count + headroom_blocks for count in needed], running):
            return False
        del self._spilled[sequence.id]
        sequence.phase = Phase.RUNNING
        if not all(self._restore_group(sequence, g, p) for g, p in zip(groups, pools, strict=True)):
            self._kv_manager.drop(sequence)
            sequence.restart()
            sequence.phase = Phase.WAITING
        self._free(groups)
        return True

    def forget(self, sequence: Sequence) -> None:
        """Free what ``sequence`` holds in host memory."""
        _, groups = self._spilled.pop(sequence.id)
        self._free(groups)
        self._kv_manager.drop(sequence)

    def give_up(self) -> bool:
        """Free what the sequence that was preempted last holds in host memory: it is WAITING, to be computed again.
        False when there is none.
        """
        if not self._spilled:
            return False
        sequence, groups = self._spilled.popitem()[1]
        self._free(groups)
        self.again(sequence)
        return True

    def _spill_group(self, sequence: Sequence, pool: BlockPool) -> SwappedGroup | None:
        """Put one group's live blocks into slots; ``None`` when there is no room or a copy failed."""
        group = pool.group
        table = sequence.tables[group.index]
        first = 0
        blocks = np.zeros(1, dtype=np.int64)
        if group.kind is not Kind.RECURRENT:
            first = self._kv_manager.strategies[group.index].first_live_block(sequence.computed)
            blocks = np.arange(first, -(-sequence.computed // group.block_tokens))
            blocks = blocks[table.blocks[blocks] != NULL_BLOCK]
        held = self._swap_space.put(sequence, pool, blocks)
        return None if held is None else SwappedGroup(first, held, table.offloaded.copy())

    def _restore_group(self, sequence: Sequence, spilled: SwappedGroup, pool: BlockPool) -> bool:
        held, group = spilled.held, pool.group
        fresh = pool.allocate(len(held.blocks))
        assert fresh is not None, "room was checked"
        length = 1 if group.kind is Kind.RECURRENT else -(-sequence.computed // group.block_tokens)
        blocks = np.full(length, NULL_BLOCK, dtype=np.int64)
        blocks[held.blocks] = fresh
        table = sequence.tables[group.index]
        table.append(blocks.tolist())
        offloaded = np.flatnonzero(spilled.offloaded != NULL_BLOCK)
        table.offload(offloaded, spilled.offloaded[offloaded])
        sequence.freed[group.index] = spilled.first
        plan = CopyPlan(group.index, np.array(fresh, dtype=np.int64), held.slots, held.offsets)
        return self._kv_manager.copy_in(pool, plan)

    def _free(self, groups: list[SwappedGroup]) -> None:
        self._kv_manager.async_copies.read()
        let_go(self._kv_manager.store, [spilled.held for spilled in groups])
