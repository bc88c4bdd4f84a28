"""Messages between the scheduler's side and the workers' sides. Plain values: they cross processes.

    worker    -> scheduler   Part          once, when the KV cache is allocated: how many bytes a block has here
    scheduler -> worker      Step          with each step: what to copy
    worker    -> scheduler   Report        after each step: which stores are done; Part, where there is no handshake

Loads are reported through vLLM's own transfer results.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from stowage.core.copy_plan import CopyPlan
from stowage.plugins.vllm.division import Piece, Rank
from stowage.plugins.vllm.memory import SharedArena


@dataclass(frozen=True)
class Part(KVConnectorHandshakeMetadata):
    """What one rank holds of every block: ``pieces`` by group. ``machine``: the same for those that share memory."""

    machine: str
    num_blocks: int
    pieces: tuple[tuple[Piece, ...], ...]


@dataclass(frozen=True)
class Load:
    """Arena to device, for a request that waits. ``plans`` is ``None`` when it cannot be done: the worker reports it
    failed, which is how vLLM learns that the request must be computed.
    """

    request: str
    plans: list[CopyPlan] | None


class WholeChunks(NamedTuple):
    """Chunks of one group, of which all blocks are copied: the device's blocks of one after the other, and its slot."""

    group: int
    blocks: list[int]
    slots: list[int]

    def plan(self) -> CopyPlan:
        """The copies."""
        blocks, slots = np.array(self.blocks, dtype=np.int64), np.array(self.slots, dtype=np.int64)
        per_chunk = len(blocks) // len(slots)
        return CopyPlan(self.group, blocks, slots.repeat(per_chunk), np.arange(len(blocks)) % per_chunk)


@dataclass(frozen=True)
class Store:
    """Device to arena, after this step's forward."""

    number: int
    plans: list[CopyPlan]
    whole: list[WholeChunks] = field(default_factory=list)

    def copies(self) -> list[CopyPlan]:
        """All of it as plans."""
        return self.plans + [chunks.plan() for chunks in self.whole]


@dataclass
class Step(KVConnectorMetadata):
    """The scheduler side's message about one step. ``number``: of the step, from 1. ``busy``: whether it computes
    anything. ``fresh``: nothing was computed since all that was stored was forgotten, see ``weight_updates``.
    """

    number: int = 0
    arena: SharedArena | None = None
    loads: list[Load] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    busy: bool = True
    fresh: bool = False


@dataclass
class Report(KVConnectorWorkerMetadata):
    """After which step; how many ranks have ended each store, and which stores failed on any of them. ``digests``: by
    store, group and number of the ranks that hold the same, of what each of them holds: one, unless they differ.
    ``parts``: in the first one, where the handshake is another connector's. ``changed``: weights were
    (``weight_updates``).
    """

    step: int = 0
    ended: dict[int, int] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    loaded_bytes: int = 0
    stored_bytes: int = 0
    digests: dict[tuple[int, int, int], set[bytes]] = field(default_factory=dict)
    parts: dict[Rank, Part] = field(default_factory=dict)
    changed: bool = False

    @property
    def says_something(self) -> bool:
        """Whether it tells of any copy."""
        return bool(self.ended or self.failed or self.loaded_bytes or self.stored_bytes)

    def aggregate(self, other: Any) -> Report:
        self.step = max(self.step, other.step)
        for number, count in other.ended.items():
            self.ended[number] = self.ended.get(number, 0) + count
        self.failed |= other.failed
        self.loaded_bytes += other.loaded_bytes
        self.stored_bytes += other.stored_bytes
        for part, digests in other.digests.items():
            self.digests[part] = self.digests.get(part, set()) | digests
        self.parts |= other.parts
        self.changed |= other.changed
        return self
