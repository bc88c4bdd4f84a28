"""The KV manager: allocates blocks to sequences, caches and stores complete chunks, frees blocks outside windows.

Owns what moves between sequences, device pools and the tiered store after a step. ``admission`` gives a sequence its
first blocks; ``swap`` moves it out and in under memory pressure. Never computes, never waits.

    cache_blocks(sequence) chunks complete?  -> named in the pool (device prefix cache)
                                             -> copied to an arena slot, committed (host; the store spills it further)
                           blocks unseen?    -> released (they stay findable until someone needs the room)
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from stowage.cache.flow_types import Fetch
from stowage.cache.overlapped_load import GroupChunks
from stowage.cache.store import TieredStore
from stowage.core.copy_plan import CopyPlan, store_plan
from stowage.core.geometry import NULL_BLOCK, Kind
from stowage.core.groups import GroupStrategy
from stowage.engine.sequence import Phase, Sequence, snapshot_positions
from stowage.engine.swap.host_blocks import release_swapped
from stowage.errors import TransferError
from stowage.executor.block_pool import BlockPool
from stowage.executor.sequence_state import SequenceState
from stowage.models.layout import ModelLayout
from stowage.transfer.async_copies import AsyncCopies
from stowage.transfer.protocol import BlockTransfer


@dataclass(slots=True)
class Counters:
    """Totals since the engine began. ``blocks_moved_out``: blocks of running sequences that were offloaded to host
    memory. ``recompute_saved_s``: predicted time to compute the reused tokens. ``tiers_waited_s``: time that sequences
    waited for tiers, including failed loads.
    """

    copies_failed: int = 0
    preemptions: int = 0
    preemptions_recomputed: int = 0
    blocks_moved_out: int = 0
    loads_refused: int = 0
    overlapped_loads: int = 0
    tokens_reused: int = 0
    tokens_computed: int = 0
    prompt_tokens_computed: int = 0
    recompute_saved_s: float = 0.0
    tiers_waited_s: float = 0.0


class KVManager:
    """Device pools and the store behind them, seen from sequences."""

    def __init__(
        self,
        layout: ModelLayout,
        pools: Items[BlockPool],
        strategies: Items[GroupStrategy],
        store: TieredStore | None,
        transfer: BlockTransfer | None,
        snapshot_tokens: int,
    ) -> None:
        self.layout = layout
        self.pools = pools
        self.strategies = strategies
        self.store = store
        self.transfer = transfer
        self.snapshot_tokens = snapshot_tokens
        self.counters = Counters()
        self.async_copies = AsyncCopies()

    def missing_blocks(self, sequence: Sequence, end: int) -> list[int]:
        """How many more blocks of each group ``sequence`` needs for its tokens up to ``end``."""
        return [
            max(0, pool.group.blocks_of(end) - len(table))
            for pool, table in zip(self.pools, sequence.tables, strict=True)
        ]

    def extend(self, sequence: Sequence, end: int) -> bool:
        """Allocate blocks to ``sequence`` for its tokens up to ``end``; all of them or none."""
        missing = self.missing_blocks(sequence, end)
        if not any(missing):
            return True
        if any(count > pool.available for pool, count in zip(self.pools, missing, strict=True)):
            return False
        for pool, count in zip(self.pools, missing, strict=True):
            if count:
                sequence.tables[pool.group.index].append(pool.allocate(count) or [])
        return True

    def cache_blocks(self, sequence: Sequence) -> None:
        """Cache chunks that became complete, and free blocks that no later query sees. Call after each step."""
        sequence.extend_keys()
        for pool, strategy in zip(self.pools, self.strategies, strict=True):
            group = pool.group
            if group.kind is Kind.RECURRENT:
                self._snapshot(sequence, pool)
                continue
            if sequence.shared_tokens // group.chunk_tokens > sequence.stored[group.index]:
                self._cache_chunks(sequence, pool, strategy)
            self._free_out_of_window(sequence, pool, strategy)

    def _cache_chunks(self, sequence: Sequence, pool: BlockPool, strategy: GroupStrategy) -> None:
        group = pool.group
        table = sequence.table(group.index)
        chunks, masks = strategy.storable(sequence.shared_tokens, sequence.stored[group.index], table)
        sequence.stored[group.index] = sequence.shared_tokens // group.chunk_tokens
        every_key = sequence.keys.of(group.index)
        keys = [every_key[chunk] for chunk in chunks.tolist()]
        for key, chunk in zip(keys, chunks.tolist(), strict=True):
            pool.name(key, table[chunk * group.blocks_per_chunk : (chunk + 1) * group.blocks_per_chunk].tolist())
        if self.store is None or not keys:
            return
        first = int(chunks[0])
        slots = self.store.reserve(group.index, keys, masks, every_key[first - 1] if first else None)
        self.copy_out(pool, store_plan(group, chunks, masks, slots, table), slots)

    def copy_out(self, pool: BlockPool, plan: CopyPlan, slots: np.ndarray, *, private: bool = False) -> bool:
        """Copy device blocks into reserved ``slots`` (-1: none) and commit these when the bytes have arrived, or abort
        them when a copy fails (case F2). Copies into ``private`` slots are complete on return.
        """
        assert self.store is not None and self.transfer is not None
        held = slots[slots >= 0]
        if not len(held):
            return True
        try:
            ticket = self.transfer.store(plan, pool.storage)
            if private and ticket is not None:
                ticket.wait()
        except TransferError:
            self._stored(held, private, came=False)
            return False
        if private:
            self._stored(held, private, came=True)
        else:
            self.async_copies.when_stored(ticket, partial(self._stored, held, False))
        return True

    def _stored(self, slots: np.ndarray, private: bool, came: bool) -> None:
        """Commit or abort reserved ``slots`` after their copies."""
        assert self.store is not None
        if not came:
            self.counters.copies_failed += 1
            (self.store.drop_private if private else self.store.abort)(slots)
        elif private:
            self.store.commit_private(slots)
        else:
            self.store.commit(slots)

    def copy_in(self, pool: BlockPool, plan: CopyPlan) -> bool:
        """Copy slots into device blocks; False when a copy failed: the blocks' content is invalid then (case F2)."""
        assert self.transfer is not None
        try:
            self.async_copies.add_load(self.transfer.load(plan, pool.storage))
        except TransferError:
            self.counters.copies_failed += 1
            return False
        return True

    def release(self, fetch: Fetch) -> None:
        """Unpin the slots of ``fetch``, as soon as the copies from them are done."""
        assert self.store is not None
        self.async_copies.when_loaded(partial(self.store.release, fetch))

    def loaded_table(self, sequence: Sequence, stay: Items[int], part: GroupChunks) -> NDArray[np.int64]:
        """The block table that a load fills. Groups that ``stay`` in host memory have the identity table."""
        table = sequence.table(part.group)
        if part.group in stay:
            return np.arange(len(table))
        is_state = self.pools[part.group].group.kind is Kind.RECURRENT
        return np.full(part.first_block + 1, table[0]) if is_state else table

    def load(self, sequence: Sequence, part: GroupChunks, copies: CopyPlan) -> bool:
        """Copy fetched chunks to the device and cache them there; False, with the chunks refused, when a copy fails."""
        pool = self.pools[part.group]
        if copies.copies and not self.copy_in(pool, copies):
            sequence.prefix.refused.update(part.keys)
            return False
        if pool.group.kind is Kind.RECURRENT:
            self.cache_state(pool, part.keys[0], int(copies.blocks[0]))
            return True
        table, per_chunk = sequence.table(part.group), pool.group.blocks_per_chunk
        for chunk, key in zip(part.chunks, part.keys, strict=True):
            blocks = table[chunk * per_chunk : (chunk + 1) * per_chunk].tolist()
            pool.name(key, blocks + [NULL_BLOCK] * (per_chunk - len(blocks)))
        return True

    def _free_out_of_window(self, sequence: Sequence, pool: BlockPool, strategy: GroupStrategy) -> None:
        index = pool.group.index
        first = strategy.first_live_block(sequence.computed)
        if first > sequence.freed[index]:
            pool.release(sequence.tables[index].take(sequence.freed[index], first))
            sequence.freed[index] = first

    def _snapshot(self, sequence: Sequence, pool: BlockPool) -> None:
        """Cache and store a snapshot of the recurrent state at ``computed``, if one is due there."""
        group = pool.group
        chunk, rest = divmod(sequence.computed, group.block_tokens)
        own = sequence.computed > sequence.shared_tokens
        if own or rest or not chunk or not self._wants_snapshot(sequence, group.block_tokens):
            return
        key = sequence.keys.of(group.index)[chunk - 1]
        live = int(sequence.table(group.index)[0])
        if not pool.lookup([key])[0]:
            self.cache_state(pool, key, live)
        if self.store is not None:
            slots = self.store.reserve(group.index, [key], np.ones(1, dtype=np.uint64))
            self.copy_out(pool, state_plan(pool, live, slots), slots)

    def _wants_snapshot(self, sequence: Sequence, grid: int) -> bool:
        return sequence.computed % self.snapshot_tokens == 0 or sequence.computed in snapshot_positions(sequence, grid)

    def cache_state(self, pool: BlockPool, key: bytes, live: int) -> None:
        """Copy the state in block ``live`` to a new block, cached as ``key``, if the pool has one."""
        spare = pool.allocate(1)
        if spare is None:
            return
        pool.storage[spare[0]].copy_(pool.storage[live])
        pool.name(key, spare)
        pool.release(spare)

    def free_device_blocks(self, sequence: SequenceState) -> None:
        """Free all device blocks of ``sequence``; cached chunks stay cached. Its host memory stays, too."""
        for pool, table in zip(self.pools, sequence.tables, strict=True):
            pool.release(table.clear())

    def drop(self, sequence: Sequence) -> None:
        """Free everything that ``sequence`` holds: device blocks and host memory."""
        self.free_device_blocks(sequence)
        release_swapped(self.store, sequence.held)
        sequence.held = []

    def check(self, sequences: Items[Sequence]) -> None:
        """Assert that exactly the blocks in the tables of ``sequences`` are in use, that offloaded blocks have host
        memory, and the pools' own invariants.
        """
        for sequence in sequences:
            self._check_offloaded(sequence)
        for pool in self.pools:
            pool.check()
            held = [int(b) for s in sequences for b in s.table(pool.group.index) if b != NULL_BLOCK]
            assert len(set(held)) == pool.blocks - pool.available, (
                f"group {pool.group.index}: blocks in use that no sequence has"
            )

    def _check_offloaded(self, sequence: Sequence) -> None:
        for pool, table in zip(self.pools, sequence.tables, strict=True):
            group = pool.group
            held = [one for one in sequence.held if one.group == group.index]
            assert group.kind is Kind.FULL or not held, "only blocks of full groups may be offloaded"
            assert ((table.blocks == NULL_BLOCK) | (table.offloaded == NULL_BLOCK)).all(), (
                "a block is both on the device and offloaded"
            )
            assert table.has_offloaded == bool((table.offloaded != NULL_BLOCK).any())
            if sequence.phase is not Phase.RUNNING or group.kind is not Kind.FULL:
                continue
            computed = -(-sequence.computed // group.block_tokens)
            assert (table.addresses[:computed] != NULL_BLOCK).all(), "a block that is read is nowhere"
            addresses = dict(
                pair for one in held for pair in zip(one.blocks.tolist(), one.addresses.tolist(), strict=True)
            )
            assert sum(len(one.blocks) for one in held) == len(addresses), "a block is held twice"
            offloaded = np.flatnonzero(table.offloaded != NULL_BLOCK).tolist()
            assert addresses == dict(zip(offloaded, table.offloaded[offloaded].tolist(), strict=True)), (
                "what is offloaded is not held"
            )


def state_plan(pool: BlockPool, block: int, slots: np.ndarray) -> CopyPlan:
    """The copy between one block of recurrent state and its slot; empty when the slot is -1."""
    held = slots[slots >= 0]
    count = len(held)
    return CopyPlan(pool.group.index, np.full(count, block, dtype=np.int64), held, np.zeros(count, dtype=np.int64))
