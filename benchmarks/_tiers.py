"""Stowage's side of `benchmarks.tiers`: a `TieredStore` used as the engine uses it, from one thread."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import torch

from stowage.cache.store import TieredStore
from stowage.core.copy_plan import CopyPlan
from stowage.core.geometry import Geometry, Group, IntArray, Kind
from stowage.core.key import DIGEST_BYTES
from stowage.native.memory import pages
from stowage.storage.disk import DiskTier
from stowage.storage.protocol import Tier
from stowage.transfer.cpu import CpuTransfer

BLOCKS_PER_CHUNK = 4
WAIT_S = 120.0


class Stowage:
    """A device pool of `count` chunks, another one to load into, and a store with room for as many in host memory.

    `open` without a directory is the host tier alone: `store` copies from the device, `load` copies to it. With one,
    `store` is from host memory to disk and `load` from disk to host memory, both verified as always. A chunk carries
    its number in its first bytes; what was loaded is compared outside of the time that is counted. `content`: bytes
    that fill the pool, again and again; noise without. `processor_s`: what all threads took in the time that was
    counted last.
    """

    def __init__(self, chunk_bytes: int, count: int, content: torch.Tensor | None = None) -> None:
        self.chunk_bytes, self.count = chunk_bytes, count
        group = Group(0, Kind.FULL, 16, BLOCKS_PER_CHUNK, chunk_bytes // BLOCKS_PER_CHUNK)
        self.geometry = Geometry((group,))
        self.device, self.target = memory(count, chunk_bytes), memory(count, chunk_bytes)
        noise = torch.Generator().manual_seed(0)
        self.device[:] = torch.randint(0, 255, (chunk_bytes,), dtype=torch.uint8, generator=noise)
        if content is not None:
            self.device.view(-1)[:] = content.repeat(-(-self.device.numel() // content.numel()))[: self.device.numel()]
        self.device[:, :8] = torch.arange(count).view(-1, 1).view(torch.uint8)
        self.target[:] = 0
        self.masks = np.full(count, group.full_mask, np.uint64)
        self.round = 0
        self.processor_s = 0.0
        self.store_of: TieredStore | None = None
        self.directory: Path | None = None

    def open(self, directory: Path | None, compression: str = "auto") -> None:
        """An empty store. Host memory has been touched once, as that of an engine that has run for a while."""
        self.close()
        self.directory = directory
        tiers: list[Tier] = []
        total = self.chunk_bytes * self.count
        if directory is not None:
            limit = 2 * total + (1 << 30)
            tiers.append(
                DiskTier(directory, limit, bytes(32), chunk_bytes_max=self.chunk_bytes, compression=compression)
            )
        self.store_of = TieredStore(self.geometry, total, tiers)
        self.transfer = CpuTransfer(self.store_of.arena.numpy(), self.store_of.slabs)
        self.store_of.arena.numpy()[:] = 0

    def keys(self, numbers: list[int]) -> list[bytes]:
        return [(self.round << 32 | number).to_bytes(DIGEST_BYTES, "little") for number in numbers]

    def store(self, parts: list[list[int]]) -> float:
        """Seconds."""
        store = self.store_of
        assert store is not None
        self.round += 1
        store.drop_host()
        keys = list(map(self.keys, parts))
        began_s = time.perf_counter()
        taken = []
        for part, some in zip(parts, keys, strict=True):
            slots = store.reserve(0, some, self.masks[: len(some)])
            self.transfer.store(plan(np.array(part), slots), self.blocks(self.device))
            taken.append(slots)
        if self.directory is not None:
            began_s = time.perf_counter()
        before_s = time.process_time()
        for slots in taken:
            store.commit(slots)
        if self.directory is not None:
            assert store.flush(WAIT_S)
        elapsed_s = time.perf_counter() - began_s
        self.processor_s = time.process_time() - before_s
        stats = store.stats()
        assert all((slots >= 0).all() for slots in taken) and not stats.get("spill_failures"), stats
        return elapsed_s

    def load(self, parts: list[list[int]]) -> float:
        """Seconds."""
        store = self.store_of
        assert store is not None
        keys = list(map(self.keys, parts))
        self.target[:] = 0
        if self.directory is not None:
            assert store.drop_host() == self.count
        before_s = time.process_time()
        began_s = time.perf_counter()
        fetches = [store.fetch([(0, some)], time.monotonic() + WAIT_S) for some in keys]
        while not all(fetch.done for fetch in fetches):
            store.wait(WAIT_S)
            store.poll()
        if self.directory is not None:
            elapsed_s = time.perf_counter() - began_s
        self.processor_s = time.process_time() - before_s
        for part, fetch in zip(parts, fetches, strict=True):
            assert (fetch.slots[0] >= 0).all(), "a chunk that was stored is absent"
            self.transfer.load(plan(np.array(part), fetch.slots[0]), self.blocks(self.target))
            store.release(fetch)
        if self.directory is None:
            elapsed_s = time.perf_counter() - began_s
        assert torch.equal(self.target, self.device), "other bytes than were stored"
        return elapsed_s

    def blocks(self, pool: torch.Tensor) -> torch.Tensor:
        return pool.view(self.count * BLOCKS_PER_CHUNK, -1)

    def close(self) -> None:
        """The files stay."""
        if self.store_of is not None:
            self.transfer.close()
            self.store_of.close(WAIT_S)
            self.store_of = None


def memory(rows: int, row_bytes: int) -> torch.Tensor:
    """Bytes that begin on a page, in huge pages as the arena is: `Limits` reads a disk straight into them."""
    return torch.from_numpy(np.frombuffer(pages(rows * row_bytes), np.uint8)).view(rows, row_bytes)


def plan(numbers: IntArray, slots: IntArray) -> CopyPlan:
    """Chunk `numbers[i]` of the device and slot `slots[i]`, all blocks."""
    offsets = np.arange(BLOCKS_PER_CHUNK)
    blocks = (numbers[:, None] * BLOCKS_PER_CHUNK + offsets).ravel()
    return CopyPlan(0, blocks, np.repeat(slots, BLOCKS_PER_CHUNK), np.tile(offsets, len(slots)))
