"""From a cache to the store: what is complete, held and not stored yet is copied to host memory.

Owns the decision of what to copy. Only whole chunks are stored; of recurrent layers the state as it stands, if it
stands at a position where prompts can resume. Never waits: writing to lower tiers is the store's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stowage.cache.store import TieredStore
from stowage.core.copy_plan import store_plan
from stowage.core.geometry import NULL_BLOCK, IntArray, Kind
from stowage.core.groups import GroupStrategy
from stowage.core.key import SequenceKeys
from stowage.core.reuse import longest_boundary
from stowage.models.layout import BlockLayout
from stowage.plugins.transformers.caches import RecordingWindow, SwappedBlocks, held
from stowage.plugins.transformers.layout import CacheLayout
from stowage.plugins.transformers.transfer import CacheTransfer


@dataclass(slots=True)
class Written:
    """New tokens (of the group that keeps the most) and bytes, and how far a later prompt can resume now."""

    tokens: int = 0
    nbytes: int = 0
    resumable: int = 0


class Writer:
    """Stores caches of one model in ``store``."""

    def __init__(
        self, store: TieredStore, transfer: CacheTransfer, layout: CacheLayout, strategies: Sequence[GroupStrategy]
    ) -> None:
        self._store = store
        self._transfer = transfer
        self._layout = layout
        self._strategies = strategies

    def write(self, cache: Any, keys: Sequence[SequenceKeys], length: int, plain: int, *, states: bool) -> Written:
        """Store what ``cache`` holds after ``length`` tokens of the first ``plain`` ones; one of ``keys`` per row.
        ``states``: of recurrent layers too.
        """
        done = Written()
        for block in self._layout.blocks:
            if block.group.kind is Kind.RECURRENT and not states:
                continue
            layers = self._held(cache, block, len(keys))
            if layers is None:
                continue
            table = self._table(block, layers, length, plain)
            tokens = sum(
                self._write_row(block, layers, table, row, of_row, plain, done) for row, of_row in enumerate(keys)
            )
            done.tokens = max(done.tokens, tokens)
            self._let_go(cache, block, length)
        done.resumable = self._resumable(keys, plain)
        return done

    def _held(self, cache: Any, block: BlockLayout, rows: int) -> Mapping[int, SwappedBlocks] | None:
        """What each layer of a group holds; ``None`` when one of them holds nothing that can be stored."""
        found = {}
        for layer in block.layers:
            here = held(cache.layers[layer.index], layer, rows)
            if here is None:
                return None
            found[layer.index] = here
        return found

    def _table(self, block: BlockLayout, layers: Mapping[int, SwappedBlocks], length: int, plain: int) -> IntArray:
        """The block table that strategies ask for: a block's own number where the cache holds all of it."""
        group = block.group
        table = np.arange(plain // group.block_tokens, dtype=np.int64)
        if group.kind is Kind.RECURRENT:
            here = plain == length and length % group.block_tokens == 0
            table[: len(table) - here] = NULL_BLOCK
            return table
        first = max(here.first for here in layers.values())
        table[: -(-first // group.block_tokens)] = NULL_BLOCK
        return table

    def _write_row(
        self,
        block: BlockLayout,
        layers: Mapping[int, SwappedBlocks],
        table: IntArray,
        row: int,
        keys: SequenceKeys,
        plain: int,
        done: Written,
    ) -> int:
        """Copy one row's new chunks and commit them; how many tokens they have."""
        group = block.group
        chunks, masks = self._strategies[group.index].storable(plain, 0, table)
        every = keys.of(group.index)
        names = [every[chunk] for chunk in chunks.tolist()]
        new = (self._store.sources(names) < 0) & (masks == group.full_mask)
        if not new.any():
            return 0
        chunks, masks = chunks[new], masks[new]
        first = int(chunks[0])
        names = [every[chunk] for chunk in chunks.tolist()]
        slots = self._store.reserve(group.index, names, masks, every[first - 1] if first else None)
        try:
            done.nbytes += self._transfer.store(store_plan(group, chunks, masks, slots, table), layers, row)
        except BaseException:
            self._store.abort(slots)
            raise
        self._store.commit(slots)
        return int((slots >= 0).sum()) * group.chunk_tokens if group.kind is not Kind.RECURRENT else 0

    def _let_go(self, cache: Any, block: BlockLayout, length: int) -> None:
        """What left the window and is in complete chunks has had its chance."""
        for layer in block.layers:
            recording = cache.layers[layer.index]
            if isinstance(recording, RecordingWindow):
                recording.let_go(length // block.group.chunk_tokens * block.group.chunk_tokens)

    def _resumable(self, keys: Sequence[SequenceKeys], plain: int) -> int:
        masks = [
            np.where(self._store.sources(of_row.of(index)) >= 0, np.uint64(strategy.group.full_mask), np.uint64(0))
            for of_row in keys
            for index, strategy in enumerate(self._strategies)
        ]
        return longest_boundary([*self._strategies] * len(keys), masks, plain + 1, self._store.geometry.boundary_tokens)
