"""Preempted sequences: everything they need to go on is put into host memory, and taken back, not computed again.

Owns what preempted sequences hold there besides what was away already (``overflow``): complete chunks, the unfinished
last chunk, the live recurrent state (``holding``). When the host has no room the sequence is computed again, which is
slower and just as right.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stowage.core.geometry import NULL_BLOCK, Kind
from stowage.core.plan import CopyPlan
from stowage.engine.holding import Held, Holding, let_go
from stowage.engine.overflow import Overflow
from stowage.engine.pool import BlockPool
from stowage.engine.residency import Residency
from stowage.engine.sequence import Phase, Sequence


@dataclass(slots=True)
class GroupSpill:
    """One group of a spilled sequence: ``held`` was on the device, ``away`` are the places of what was not; no block
    before ``first`` is needed.
    """

    first: int
    held: Held
    away: NDArray[np.int64]


class Spill:
    """Puts sequences into host memory and takes them back."""

    def __init__(self, residency: Residency, holding: Holding, overflow: Overflow) -> None:
        self._residency = residency
        self._holding = holding
        self._overflow = overflow
        self._spilled: dict[int, tuple[Sequence, list[GroupSpill]]] = {}

    def __len__(self) -> int:
        return len(self._spilled)

    def out(self, sequence: Sequence) -> None:
        """Take the device from ``sequence``: PREEMPTED afterwards, or WAITING to be computed again when the host has no
        room.
        """
        counters = self._residency.counters
        counters.preemptions += 1
        sequence.preemptions += 1
        groups: list[GroupSpill] = []
        if self._residency.store is not None and sequence.computed:
            if self._overflow.is_long(sequence):
                self._overflow.move_all(sequence)  # so that it can come back to a few blocks
            for pool in self._residency.pools:
                spilled = self._spill_group(sequence, pool)
                if spilled is None:
                    break
                groups.append(spilled)
        if len(groups) == len(self._residency.pools):
            self._residency.vacate(sequence)
            self._spilled[sequence.id] = (sequence, groups)
            sequence.phase = Phase.PREEMPTED
            return
        self._free(groups)
        self.again(sequence)

    def again(self, sequence: Sequence) -> None:
        """Take everything from ``sequence``, which has blocks: WAITING, to be computed again."""
        self._residency.counters.preemptions_recomputed += 1
        self._residency.drop(sequence)
        sequence.restart()
        sequence.phase = Phase.WAITING

    def back(self, sequence: Sequence, headroom_blocks: int, running: Items[Sequence]) -> bool:
        """Give ``sequence`` its blocks again: RUNNING afterwards. False while blocks are lacking; ``headroom_blocks``
        are left free per group. Those of ``running`` that are long make room.

        When a copy fails the sequence is WAITING, to be computed again.
        """
        _, groups = self._spilled[sequence.id]
        pools = self._residency.pools
        needed = [len(g.held.blocks) for g in groups]
        if not self._overflow.make_room([count + headroom_blocks for count in needed], running):
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
        _, groups = self._spilled.pop(sequence.id)
        self._free(groups)
        self._residency.drop(sequence)

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

    def _spill_group(self, sequence: Sequence, pool: BlockPool) -> GroupSpill | None:
        """Put one group's live blocks into slots; ``None`` when there is no room or a copy failed."""
        group = pool.group
        table = sequence.tables[group.index]
        first = 0
        blocks = np.zeros(1, dtype=np.int64)
        if group.kind is not Kind.RECURRENT:
            first = self._residency.strategies[group.index].first_live_block(sequence.computed)
            blocks = np.arange(first, -(-sequence.computed // group.block_tokens))
            blocks = blocks[table.blocks[blocks] != NULL_BLOCK]
        held = self._holding.put(sequence, pool, blocks)
        return None if held is None else GroupSpill(first, held, table.away.copy())

    def _restore_group(self, sequence: Sequence, spilled: GroupSpill, pool: BlockPool) -> bool:
        held, group = spilled.held, pool.group
        fresh = pool.allocate(len(held.blocks))
        assert fresh is not None, "room was checked"
        length = 1 if group.kind is Kind.RECURRENT else -(-sequence.computed // group.block_tokens)
        blocks = np.full(length, NULL_BLOCK, dtype=np.int64)
        blocks[held.blocks] = fresh
        table = sequence.tables[group.index]
        table.append(blocks.tolist())
        away = np.flatnonzero(spilled.away != NULL_BLOCK)
        table.send_away(away, spilled.away[away])
        sequence.freed[group.index] = spilled.first
        plan = CopyPlan(group.index, np.array(fresh, dtype=np.int64), held.slots, held.offsets)
        return self._residency.copy_in(pool, plan)

    def _free(self, groups: list[GroupSpill]) -> None:
        self._residency.under_way.read()
        let_go(self._residency.store, [spilled.held for spilled in groups])
