"""Where the KV of running sequences lies: block tables are filled, finished chunks are kept, unseen blocks are freed.

Owns the movement between sequences, device pools and the tiered store after tokens were computed. How a sequence gets
its first blocks is ``admission``'s business, how it leaves and comes back under pressure ``swap``'s. Never computes,
never waits.

    settle(sequence)       chunks complete?  -> named in the pool (device prefix cache)
                                             -> copied to an arena slot, committed (host; the store spills it further)
                           blocks unseen?    -> released (they stay findable until someone needs the room)
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from stowage.cache.overlapped_load import GroupChunks
from stowage.cache.store import Fetch, TieredStore
from stowage.core.copy_plan import CopyPlan, store_plan
from stowage.core.geometry import NULL_BLOCK, Kind
from stowage.core.groups import GroupStrategy
from stowage.engine.sequence import Phase, Sequence, snapshot_positions
from stowage.engine.swap.host_blocks import let_go
from stowage.errors import TransferError
from stowage.executor.block_pool import BlockPool
from stowage.executor.sequence_state import SequenceState
from stowage.models.layout import ModelLayout
from stowage.transfer.async_copies import AsyncCopies
from stowage.transfer.protocol import BlockTransfer


@dataclass(slots=True)
class Counters:
    """What happened since the engine began. ``blocks_moved_out``: blocks of running sequences that were read from host
    memory from then on. ``recompute_saved_s``: what computing the reused tokens would have taken,
    as predicted when they were reused; ``tiers_waited_s``: what sequences waited for tiers, in vain too.
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

    def lacking(self, sequence: Sequence, end: int) -> list[int]:
        """Blocks of each group that ``sequence`` has to be given for its tokens up to ``end``."""
        lacking = []
        for pool in self.pools:
            if pool.group.kind is Kind.RECURRENT:
                lacking.append(0)
                continue
            lacking.append(max(0, -(-end // pool.group.block_tokens) - len(sequence.tables[pool.group.index])))
        return lacking

    def extend(self, sequence: Sequence, end: int) -> bool:
        """Give ``sequence`` blocks for its tokens up to ``end``; all of them or none."""
        lacking = self.lacking(sequence, end)
        if any(count > pool.available for pool, count in zip(self.pools, lacking, strict=True)):
            return False
        for pool, count in zip(self.pools, lacking, strict=True):
            if count:
                sequence.tables[pool.group.index].append(pool.allocate(count) or [])
        return True

    def settle(self, sequence: Sequence) -> None:
        """Keep what became complete, and free what no later query sees. Call after ``sequence.computed`` has grown."""
        sequence.extend_keys()
        for pool, strategy in zip(self.pools, self.strategies, strict=True):
            group = pool.group
            if group.kind is Kind.RECURRENT:
                self._snapshot(sequence, pool)
                continue
            if sequence.shared_tokens // group.chunk_tokens > sequence.stored[group.index]:
                self._keep(sequence, pool, strategy)
            self._free_unseen(sequence, pool, strategy)

    def _keep(self, sequence: Sequence, pool: BlockPool, strategy: GroupStrategy) -> None:
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
        """Carry out a store plan into reserved ``slots`` (-1: none) and commit them when the bytes are there, or give
        them back when a copy fails (case F2). ``private`` slots are there on return: they are read in place, too.
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
            self.async_copies.stored(ticket, partial(self._stored, held, False))
        return True

    def _stored(self, slots: np.ndarray, private: bool, came: bool) -> None:
        """The copies into reserved ``slots`` are over."""
        assert self.store is not None
        if not came:
            self.counters.copies_failed += 1
            (self.store.drop_private if private else self.store.abort)(slots)
        elif private:
            self.store.commit_private(slots)
        else:
            self.store.commit(slots)

    def copy_in(self, pool: BlockPool, plan: CopyPlan) -> bool:
        """Carry out a load plan; False when a copy failed, and its blocks hold nothing that may be used (case F2)."""
        assert self.transfer is not None
        try:
            self.async_copies.loaded(self.transfer.load(plan, pool.storage))
        except TransferError:
            self.counters.copies_failed += 1
            return False
        return True

    def release(self, fetch: Fetch) -> None:
        """Give back what ``fetch`` pins, as soon as the copies from it are made."""
        assert self.store is not None
        self.async_copies.when_read(partial(self.store.release, fetch))

    def loaded_table(self, sequence: Sequence, stay: Items[int], part: GroupChunks) -> NDArray[np.int64]:
        """Where each block of the sequence is loaded to: of groups that ``stay`` in host memory its own number."""
        table = sequence.table(part.group)
        if part.group in stay:
            return np.arange(len(table))
        is_state = self.pools[part.group].group.kind is Kind.RECURRENT
        return np.full(part.first_block + 1, table[0]) if is_state else table

    def load(self, sequence: Sequence, part: GroupChunks, copies: CopyPlan) -> bool:
        """Copy chunks that were fetched to the device, where they are found from now on; False where that failed, and
        they are refused.
        """
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

    def _free_unseen(self, sequence: Sequence, pool: BlockPool, strategy: GroupStrategy) -> None:
        index = pool.group.index
        first = strategy.first_live_block(sequence.computed)
        if first > sequence.freed[index]:
            pool.release(sequence.tables[index].take(sequence.freed[index], first))
            sequence.freed[index] = first

    def _snapshot(self, sequence: Sequence, pool: BlockPool) -> None:
        """Keep the state after exactly ``computed`` tokens, if one is wanted there and it is not known
        yet.
        """
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
        """Copy the state in block ``live`` to a block of its own, findable as ``key``, if the pool has room to
        spare.
        """
        spare = pool.allocate(1)
        if spare is None:
            return
        pool.storage[spare[0]].copy_(pool.storage[live])
        pool.name(key, spare)
        pool.release(spare)

    def vacate(self, sequence: SequenceState) -> None:
        """Take all device blocks from ``sequence``; what is named stays findable. It keeps what it holds in host
        memory.
        """
        for pool, table in zip(self.pools, sequence.tables, strict=True):
            pool.release(table.clear())

    def drop(self, sequence: Sequence) -> None:
        """Take everything from ``sequence``: device blocks, and what it holds in host memory."""
        self.vacate(sequence)
        let_go(self.store, sequence.held)
        sequence.held = []

    def check(self, sequences: Items[Sequence]) -> None:
        """Assert that exactly the blocks in the tables of ``sequences`` are in use, and that what is offloaded is held,
        besides the pools' own invariants.
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
