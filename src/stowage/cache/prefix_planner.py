"""Which prefix of a prompt comes from the store: the longest that all groups can serve, where loading is worth it.

Owns no time and no bytes: whoever asks waits and copies. A chunk that does not arrive (damaged, late, gone) is refused
and the choice is made again without it, so every try is shorter than the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import NamedTuple

import numpy as np

from stowage.cache.cost_model import CostModel, bytes_of_tiers
from stowage.cache.store import Fetch, TieredStore
from stowage.core.copy_plan import CopyPlan, Incomplete, load_plan
from stowage.core.geometry import NULL_BLOCK, IntArray, Kind, MaskArray
from stowage.core.groups import GroupStrategy
from stowage.core.key import SequenceKeys
from stowage.core.reuse import longest_boundary

__all__ = ["HOST", "Choice", "ReachableBoundary", "Want"]

HOST = 0


class ReachableBoundary(NamedTuple):
    """Boundaries: the longest that host memory serves alone, the longest that all tiers serve, and how far the prompt
    is known, though windows or states that were not kept may forbid to resume there.
    """

    near: int
    far: int
    shared: int


@dataclass(slots=True)
class Want:
    """The chunks that one group of one row needs, and their keys."""

    row: int
    group: int
    chunks: range
    keys: list[bytes]


class Choice:
    """Over the chunks of ``store``. A row is one prompt, given by its keys; all rows resume at one boundary.

    ``held``: tokens from the prompt's start on that the device has already, a multiple of every block.
    """

    def __init__(self, store: TieredStore, strategies: Sequence[GroupStrategy], cost_model: CostModel) -> None:
        self._store = store
        self._strategies = strategies
        self._cost_model = cost_model
        kinds = [strategy.group.kind for strategy in strategies]
        paged = [kind is not Kind.RECURRENT for kind in kinds]
        self._whole = [kind is Kind.FULL for kind in kinds] if Kind.FULL in kinds else paged

    def boundaries(
        self, rows: Sequence[SequenceKeys], usable: int, refused: set[bytes], held: int = 0
    ) -> ReachableBoundary:
        """Those up to ``usable`` tokens."""
        near: list[MaskArray] = []
        far: list[MaskArray] = []
        for keys in rows:
            for group, strategy in enumerate(self._strategies):
                names = keys.of(group)
                masks = self._store.lookup(group, names)
                if refused:
                    masks = np.where([name in refused for name in names], np.uint64(0), masks)
                in_host = np.where(self._store.sources(group, names) == HOST, masks, np.uint64(0))
                near.append(_with_held(strategy, in_host, held))
                far.append(_with_held(strategy, masks, held))
        strategies = [*self._strategies] * len(rows)
        step = self._store.geometry.boundary_tokens
        nearest = longest_boundary(strategies, near, usable + 1, step)
        farthest = longest_boundary(strategies, far, usable + 1, step)
        if all(self._whole) or not any(self._whole):
            return ReachableBoundary(nearest, farthest, farthest)
        chosen = [*compress(zip(strategies, far, strict=True), self._whole * len(rows))]
        shared = longest_boundary([one for one, _ in chosen], [masks for _, masks in chosen], usable + 1, step)
        return ReachableBoundary(nearest, farthest, shared)

    def worth_loading(self, rows: Sequence[SequenceKeys], near: int, far: int, held: int = 0) -> bool:
        """Whether the chunks of the farther boundary are predicted to come before they would be computed."""
        return self._cost_model.worth_loading(
            len(rows) * (far - max(near, held)),
            bytes_of_tiers(
                (self._store.sources(want.group, want.keys), self._chunk_bytes(want))
                for want in self.wants(rows, far, held)
            ),
        )

    def wants(self, rows: Sequence[SequenceKeys], boundary: int, held: int = 0) -> list[Want]:
        """What a resume at ``boundary`` needs of the store."""
        wants = []
        for row, keys in enumerate(rows):
            for group, strategy in enumerate(self._strategies):
                needed = strategy.needed(boundary)
                chunks = range(min(max(needed.start, held // strategy.group.chunk_tokens), needed.stop), needed.stop)
                wants.append(Want(row, group, chunks, keys.of(group)[chunks.start : chunks.stop]))
        return wants

    def measure(self, fetch: Fetch, wants: Iterable[Want], elapsed_s: float) -> None:
        """Teach the pace what the tiers delivered."""
        parts = ((sources, self._chunk_bytes(want)) for want, sources in zip(wants, fetch.sources, strict=True))
        self._cost_model.delivered(bytes_of_tiers(parts), elapsed_s)

    def has_places(self, tables: Sequence[IntArray], boundary: int, held: int) -> bool:
        """Whether there is a device block for all that a resume at ``boundary`` needs beyond ``held``. ``tables``: by
        group.
        """
        for strategy, table in zip(self._strategies, tables, strict=True):
            needed = strategy.needed_blocks(boundary)
            places = table[max(needed.start, held // strategy.group.block_tokens) : needed.stop]
            if len(table) < needed.stop or (places == NULL_BLOCK).any():
                return False
        return True

    def plans(
        self,
        fetch: Fetch,
        wants: Sequence[Want],
        boundary: int,
        refused: set[bytes],
        table: Callable[[int], IntArray] | None = None,
        held: int = 0,
    ) -> list[tuple[int, CopyPlan]] | None:
        """Row and copies of each want; ``None`` when chunks did not come, which are then refused. ``table``: the device
        blocks of a group; by default block b of the sequence is block b.
        """
        plans: list[tuple[int, CopyPlan]] = []
        lacking = False
        for want, slots, masks in zip(wants, fetch.slots, fetch.masks, strict=True):
            strategy = self._strategies[want.group]
            blocks = boundary // strategy.group.block_tokens
            valid = np.zeros(want.chunks.stop, dtype=np.uint64)
            valid[want.chunks.start :] = masks
            of_chunk = dict(zip(want.chunks, slots.tolist(), strict=True))
            already = np.arange(blocks) < held // strategy.group.block_tokens
            numbers = np.arange(blocks, dtype=np.int64) if table is None else table(want.group)
            plan = load_plan(strategy, boundary, of_chunk, valid, numbers, already)
            if isinstance(plan, Incomplete):
                refused.update(want.keys[chunk - want.chunks.start] for chunk in plan.chunks.tolist())
                lacking = True
            else:
                plans.append((want.row, plan.copies))
        return None if lacking else plans

    def _chunk_bytes(self, want: Want) -> int:
        return self._strategies[want.group].group.bytes_per_chunk


def _with_held(strategy: GroupStrategy, masks: MaskArray, held: int) -> MaskArray:
    """The masks, with the chunks valid that the device holds whole. (A state before ``held`` is no use to anybody.)"""
    count = held // strategy.group.chunk_tokens
    if not count or strategy.group.kind is Kind.RECURRENT:
        return masks
    known = np.zeros(max(len(masks), count), dtype=np.uint64)
    known[: len(masks)] = masks
    known[:count] = strategy.group.full_mask
    return known
