"""What forwards read of a sequence: its tokens, how far they are computed, and its block tables.

Owns the truth from which every batch is built. Never allocates or frees blocks, never decides what runs next.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stowage.core.geometry import Group
from stowage.executor.block_pool import BlockPool
from stowage.executor.block_table import BlockTable
from stowage.models.adapters import Adapter


@dataclass(slots=True, eq=False, kw_only=True)
class SequenceState:
    """The part of a sequence that forwards read. ``computed`` tokens have their keys, values or state in the block
    tables, of which there is one per group. The first ``prompt_tokens`` were asked, the others generated. ``adapter``:
    what is added to the model's layers for it.
    """

    id: int
    tokens: list[int]
    tables: list[BlockTable]
    prompt_tokens: int
    computed: int = 0
    adapter: Adapter | None = None

    def table(self, group: int) -> NDArray[np.int64]:
        return self.tables[group].blocks


def probe_sequence(id: int, tokens: list[int], groups: Items[Group]) -> SequenceState:
    """A sequence of a trial, without blocks and without a request."""
    return SequenceState(id=id, tokens=tokens, tables=[BlockTable() for _ in groups], prompt_tokens=len(tokens))


def take_blocks(sequence: SequenceState, pools: Items[BlockPool], end: int) -> None:
    """Give ``sequence`` every block of its tokens up to ``end`` that it has not yet. There must be room."""
    for pool, table in zip(pools, sequence.tables, strict=True):
        taken = pool.allocate(max(0, pool.group.blocks_of(end) - len(table)))
        assert taken is not None, "a trial counted its room wrong"
        table.append(taken)
