"""Copies blocks of sequences into host memory, where they are not evicted (see ``host_blocks``).

Owns the keys of private slots.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from stowage.cache.flow_types import Fetch
from stowage.cache.store import TieredStore
from stowage.core.copy_plan import CopyPlan
from stowage.core.geometry import Kind
from stowage.core.key import private_key
from stowage.engine.kv_manager import KVManager
from stowage.engine.sequence import Sequence
from stowage.engine.swap.host_blocks import SwappedBlocks, addresses_of
from stowage.executor.block_pool import BlockPool


class SwapSpace:
    """Copies blocks of sequences to host memory. ``namespace`` and ``nonce`` make private slots' keys unique."""

    def __init__(self, kv_manager: KVManager, namespace: bytes, nonce: bytes, clock: Callable[[], float]) -> None:
        self._kv_manager = kv_manager
        self._namespace = namespace
        self._nonce = nonce
        self._clock = clock
        self._count = 0

    def put(self, sequence: Sequence, pool: BlockPool, blocks: NDArray[np.int64]) -> SwappedBlocks | None:
        """Copy ``blocks`` of ``sequence`` from the device; ``None`` when host memory is full or a copy failed."""
        store, group = self._kv_manager.store, pool.group
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
        if not self._kv_manager.copy_out(pool, plan, private, private=True):
            self._give_back(store, private[:0], pinned)  # the private ones are given back already
            return None
        addresses = addresses_of(store, group, slots, offsets)
        return SwappedBlocks(group.index, blocks, slots, offsets, addresses, private, pinned)

    def _give_back(self, store: TieredStore, private: NDArray[np.int64], pinned: Fetch | None) -> None:
        store.drop_private(private)
        if pinned is not None:
            store.release(pinned)

    def pin(self, group: int, keys: list[bytes]) -> Fetch:
        """Pin the chunks that are in host memory now."""
        assert self._kv_manager.store is not None
        return self._kv_manager.store.fetch([(group, keys)], self._clock())

    def _pin_known(
        self,
        store: TieredStore,
        sequence: Sequence,
        pool: BlockPool,
        chunks: NDArray[np.int64],
        blocks: NDArray[np.int64],
    ) -> tuple[dict[int, int], Fetch | None]:
        """Pin those complete chunks that host memory has with all needed blocks; returns their slots by chunk."""
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
        held, sources = store.locate(names)
        here = (sources == 0) & ((held & np.array(list(needed.values()), np.uint64)) == list(needed.values()))
        known = [c for c, present in zip(complete, here.tolist(), strict=True) if present]
        if not known:
            return {}, None
        fetch = self.pin(group.index, [keys[c] for c in known])
        slots, masks = fetch.slots[0].tolist(), fetch.masks[0].tolist()
        found = {c: s for c, s, m in zip(known, slots, masks, strict=True) if s >= 0 and m & needed[c] == needed[c]}
        return found, fetch

    def _key(self, sequence: Sequence, group: int, chunk: int) -> bytes:
        return private_key(self._namespace, sequence.id, group, chunk, self._nonce + self._count.to_bytes(8, "little"))
