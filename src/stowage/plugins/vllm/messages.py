"""What the scheduler's side and the workers' sides say to each other. Plain values: they cross processes.

    worker    -> scheduler   Part          once, when the KV cache is allocated: how many bytes a block has here
    scheduler -> worker      Step          with each step: what to copy
    worker    -> scheduler   Report        after each step: which stores are done; Part, where there is no handshake

Loads are reported through vLLM's own transfer results.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from stowage.core.copy_plan import CopyPlan
from stowage.plugins.vllm.memory import Rank, SharedArena

__all__ = ["Load", "Part", "Report", "Step", "Store"]


@dataclass(frozen=True)
class Part(KVConnectorHandshakeMetadata):
    """One rank's share of every block. ``bytes_per_block`` and ``layout`` by group; a layout is text that differs when
    the order or meaning of bytes inside a block does. ``machine``: the same for processes that can share memory.
    """

    machine: str
    num_blocks: int
    bytes_per_block: tuple[int, ...]
    layout: tuple[str, ...]


@dataclass(frozen=True)
class Load:
    """Arena to device, for a request that waits. ``plans`` is ``None`` when it cannot be done: the worker reports it
    failed, which is how vLLM learns that the request must be computed.
    """

    request: str
    plans: list[CopyPlan] | None


@dataclass(frozen=True)
class Store:
    """Device to arena, after this step's forward."""

    number: int
    plans: list[CopyPlan]


@dataclass
class Step(KVConnectorMetadata):
    """``number``: of the step, from 1. ``busy``: whether it computes anything."""

    number: int = 0
    arena: SharedArena | None = None
    loads: list[Load] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    busy: bool = True


@dataclass
class Report(KVConnectorWorkerMetadata):
    """After which step; how many ranks have ended each store, and which stores failed on any of them. ``parts``: in the
    first one, where the handshake is another connector's.
    """

    step: int = 0
    ended: dict[int, int] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    loaded_bytes: int = 0
    stored_bytes: int = 0
    parts: dict[Rank, Part] = field(default_factory=dict)

    def aggregate(self, other: Any) -> Report:
        """See KVConnectorWorkerMetadata."""
        self.step = max(self.step, other.step)
        for number, count in other.ended.items():
            self.ended[number] = self.ended.get(number, 0) + count
        self.failed |= other.failed
        self.loaded_bytes += other.loaded_bytes
        self.stored_bytes += other.stored_bytes
        self.parts |= other.parts
        return self
