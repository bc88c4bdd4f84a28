"""What an engine does with the store, without a model: requests that fetch, copy, check, compute and store.

Each request is a generator; the engine's task advances them in turn, polls the store, and sleeps as the real one does.
A request checks every byte that it gets before it uses it, and must end in bounded time whatever the tiers do.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from stowage.cache.flow_types import Fetch
from stowage.cache.store import TieredStore
from stowage.core.copy_plan import Incomplete, load_plan, store_plan
from stowage.core.geometry import NULL_BLOCK, Geometry, IntArray, Kind
from stowage.core.groups import GroupStrategy, strategy
from stowage.core.key import Chain, group_keys
from stowage.core.reuse import longest_boundary
from stowage.errors import TransferError
from stowage.testing.sim.content import Device, Violation, block_bytes
from stowage.testing.sim.loop import Loop

POLL_S_MAX: Final = 0.02
"""The engine looks at its requests at least this often."""
LATE_S: Final = 0.25
"""How much later than its deadline a fetch may end: the engine must have polled by then."""
ATTEMPTS_MAX: Final = 20


class Prompts:
    """Conversations that share beginnings, so that requests meet."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._known: list[list[int]] = [[chance.randrange(50_000) for _ in range(96)]]

    def draw(self) -> list[int]:
        """A known beginning of some length, and something new in half of the cases."""
        base = self._chance.choice(self._known)
        tokens = base[: self._chance.randrange(17, len(base) + 1)]
        if self._chance.random() < 0.5:
            tokens = tokens + [self._chance.randrange(50_000) for _ in range(self._chance.randrange(1, 48))]
            if len(tokens) < 160:
                self._known.append(tokens)
        return tokens


@dataclass(slots=True)
class Sequence:
    """One request: its keys per group, and the device row of each block (NULL_BLOCK: none)."""

    number: int
    tokens: list[int]
    keys: list[list[bytes]]
    tables: list[IntArray]
    refused: set[bytes] = field(default_factory=set)
    computed: int = 0
    stored: list[int] = field(default_factory=list)


class Client:
    """The requests of one process."""

    def __init__(
        self, loop: Loop, store: TieredStore, device: Device, geometry: Geometry, namespace: bytes, prompts: Prompts
    ) -> None:
        self._loop = loop
        self._chance = loop.chance
        self._store = store
        self._device = device
        self._geometry = geometry
        self._namespace = namespace
        self._prompts = prompts
        self._strategies: list[GroupStrategy] = [strategy(group) for group in geometry.groups]
        self._running: list[Generator[None, None, None]] = []
        self.started = self.ended = self.tokens_reused = self.tokens_computed = 0
        self.awaiting: dict[int, float] = {}
        """Request -> until when its fetch must have ended."""

    def run(self, requests: int, at_once: int) -> None:
        """Serve that many requests. The engine's loop."""
        while self.started < requests or self._running:
            while self.started < requests and len(self._running) < at_once:
                self.started += 1
                self._running.append(self._request(self.started))
            for request in list(self._running):
                try:
                    next(request)
                except StopIteration:
                    self._running.remove(request)
                    self.ended += 1
            self._store.poll()
            if self._chance.random() < 0.5:
                self._store.wait(self._chance.random() * POLL_S_MAX)
            else:
                self._loop.sleep(self._chance.random() * POLL_S_MAX)

    def abandon(self) -> None:
        """The process is dead: end its requests here and now, instead of when the garbage is collected."""
        for request in self._running:
            with contextlib.suppress(Exception):  # the store may be broken, which is why we are here
                request.close()
        self._running.clear()

    # One request

    def _request(self, number: int) -> Generator[None, None, None]:
        if self._chance.random() < 0.3:
            self._store.drop_host()  # so that the lower tier is read
        tokens = self._prompts.draw()
        chains = [Chain(self._namespace, group.chunk_tokens).extend(tokens) for group in self._geometry.groups]
        keys = [group_keys(digests, index) for index, digests in enumerate(chains)]
        blocks = [-(-len(tokens) // group.block_tokens) for group in self._geometry.groups]
        tables = [np.full(count, NULL_BLOCK, np.int64) for count in blocks]
        sequence = Sequence(number, tokens, keys, tables, stored=[0] * len(keys))
        for attempt in range(ATTEMPTS_MAX + 1):
            if attempt == ATTEMPTS_MAX:
                raise Violation(f"request {number} did not get its prefix in {attempt} attempts")
            arrived = yield from self._arrive(sequence)
            if arrived:
                break
        self.tokens_reused += sequence.computed
        if self._chance.random() < 0.1:
            yield from self._preempted(sequence)
        yield from self._compute(sequence)
        self._drop(sequence)

    def _arrive(self, sequence: Sequence) -> Generator[None, None, bool]:
        """Fetch the longest prefix and copy it in. False: something of it failed, and is refused from now on."""
        masks = [self._store.locate(keys)[0] for keys in sequence.keys]
        for some, keys in zip(masks, sequence.keys, strict=True):
            some[[key in sequence.refused for key in keys]] = 0
        boundary = longest_boundary(self._strategies, masks, len(sequence.tokens), self._geometry.boundary_tokens)
        if not boundary:
            return True
        chunks = [plan.needed(boundary) for plan in self._strategies]
        wanted = [(group, sequence.keys[group][needed.start : needed.stop]) for group, needed in enumerate(chunks)]
        patience_s = self._chance.choice((0.0, 0.005, 0.1, 1.0, 5.0))
        fetch = self._store.fetch(wanted, self._loop.now_s + patience_s)
        self.awaiting[sequence.number] = fetch.deadline_s + LATE_S
        try:
            while not fetch.done:
                if self._chance.random() < 0.002:  # the caller gives up: released while it waits
                    return False
                yield
            for _ in range(self._chance.choice((0, 0, 1, 5))):
                yield  # the copies of others go first; what is pinned stays
            del self.awaiting[sequence.number]
            return self._copy_in(sequence, boundary, fetch)
        finally:
            self.awaiting.pop(sequence.number, None)
            self._store.release(fetch)

    def _copy_in(self, sequence: Sequence, boundary: int, fetch: Fetch) -> bool:
        for group, plan in enumerate(self._strategies):
            needed = plan.needed_blocks(boundary)
            table = sequence.tables[group]
            rows = self._device.take(group, len(needed))
            table[needed.start : needed.stop] = rows
            first = plan.needed(boundary).start
            slots = dict(enumerate(fetch.slots[group].tolist(), first))
            masks = np.zeros(first + len(slots), np.uint64)
            masks[first:] = fetch.masks[group]
            load = load_plan(plan, boundary, slots, masks, table, np.zeros(0, np.bool_))
            if isinstance(load, Incomplete):
                sequence.refused.update(sequence.keys[group][chunk] for chunk in load.chunks.tolist())
                return self._forget(sequence)
            try:
                self._device.load(load)
            except TransferError:
                sequence.refused.update(sequence.keys[group][first : first + len(slots)])
                return self._forget(sequence)
            per_chunk = self._geometry.groups[group].blocks_per_chunk
            for block in needed:
                chunk, offset = divmod(block, per_chunk)
                self._device.verify(group, int(table[block]), sequence.keys[group][chunk], offset)
            sequence.stored[group] = boundary // self._geometry.groups[group].chunk_tokens
        sequence.computed = boundary
        return True

    def _forget(self, sequence: Sequence) -> bool:
        self._drop(sequence)
        sequence.stored = [0] * len(sequence.keys)
        return False

    def _drop(self, sequence: Sequence) -> None:
        for group, table in enumerate(sequence.tables):
            self._device.give(group, table[table != NULL_BLOCK].tolist())
            table[:] = NULL_BLOCK

    # Compute and store

    def _compute(self, sequence: Sequence) -> Generator[None, None, None]:
        while sequence.computed < len(sequence.tokens):
            step = self._chance.choice((1, 5, 16, 16, 48))
            end = min(len(sequence.tokens), sequence.computed + step)
            if any(group.kind is Kind.RECURRENT for group in self._geometry.groups):
                end = min(end, (sequence.computed // 16 + 1) * 16)  # a snapshot exists only where a step ended
            self.tokens_computed += end - sequence.computed
            for group in range(len(sequence.tables)):
                self._fill(sequence, group, sequence.computed, end)
            sequence.computed = end
            yield
            for group in range(len(sequence.tables)):
                yield from self._keep(sequence, group)

    def _fill(self, sequence: Sequence, group: int, begin: int, end: int) -> None:
        shape = self._geometry.groups[group]
        table, keys = sequence.tables[group], sequence.keys[group]
        first, last = begin // shape.block_tokens, -(-end // shape.block_tokens)
        for block in range(first, last):
            if table[block] == NULL_BLOCK:
                table[block] = self._device.take(group, 1)[0]
            chunk, offset = divmod(block, shape.blocks_per_chunk)
            if end >= (block + 1) * shape.block_tokens and chunk < len(keys):
                self._device.compute(group, int(table[block]), keys[chunk], offset)

    def _keep(self, sequence: Sequence, group: int) -> Generator[None, None, None]:
        """Store what became complete; now and then the copy is under way for a while, fails, or frees blocks first."""
        shape, plan = self._geometry.groups[group], self._strategies[group]
        table = sequence.tables[group]
        if shape.kind is Kind.RECURRENT and self._chance.random() < 0.5:
            return  # snapshots are sparse
        late = self._chance.random() < 0.3
        if late:
            self._free_unseen(sequence, group, plan)  # so that chunks with holes are stored (case D)
        chunks, masks = plan.storable(sequence.computed, sequence.stored[group], table)
        sequence.stored[group] = sequence.computed // shape.chunk_tokens
        if len(chunks):
            keys = [sequence.keys[group][chunk] for chunk in chunks.tolist()]
            first = int(chunks[0])
            slots = self._store.reserve(group, keys, masks, sequence.keys[group][first - 1] if first else None)
            for _ in range(self._chance.choice((0, 0, 0, 1, 3))):
                yield
            try:
                self._device.store(store_plan(shape, chunks, masks, slots, table))
            except TransferError:
                self._store.abort(slots)
            else:
                self._store.commit(slots)
        if not late:
            self._free_unseen(sequence, group, plan)

    def _free_unseen(self, sequence: Sequence, group: int, plan: GroupStrategy) -> None:
        table = sequence.tables[group]
        first = plan.first_live_block(sequence.computed)
        gone = table[:first][table[:first] != NULL_BLOCK]
        self._device.give(group, gone.tolist())
        table[:first] = NULL_BLOCK

    # Preemption

    def _preempted(self, sequence: Sequence) -> Generator[None, None, None]:
        """State of its own goes to private slots, and comes back as it was."""
        group = self._chance.randrange(len(self._geometry.groups))
        name = b"private %d" % self._chance.randrange(1 << 60)
        key = name.ljust(32, b".")
        slots = self._store.reserve_private(group, [key])
        if slots[0] < 0:
            return
        view = self._store.payload(int(slots[0]), group)
        view[:] = block_bytes(key, 0, view.nbytes)
        self._store.commit_private(slots)
        for _ in range(self._chance.randrange(8)):
            yield
        if bytes(view) != block_bytes(key, 0, view.nbytes):
            raise Violation("a private slot was written to by somebody else")
        self._store.drop_private(slots)
