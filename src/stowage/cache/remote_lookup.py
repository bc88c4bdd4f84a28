"""Asynchronous look-ups of a prompt in shared tiers, and how long its admission waits for them.

An admission waits at most for a small share of the prompt's compute time, and not at all for a tier that lately took
longer than that. Later answers serve the next prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from stowage.cache.cost_model import CostModel
from stowage.cache.overlapped_load import RowKeys
from stowage.cache.prefix_planner import PrefixRequest
from stowage.core.geometry import Geometry
from stowage.core.prefix_search import Anchors
from stowage.storage.protocol import Probe


class SharedStore(Protocol):
    """What is asked of a ``TieredStore``."""

    geometry: Geometry

    @property
    def probes(self) -> bool:
        """Whether there are tiers that must be asked what others put there."""

    def probe(self, wanted: Sequence[tuple[int, list[bytes]]], certain: Mapping[int, Anchors] = ...) -> list[Probe]:
        """Ask those tiers how far they have a prompt."""


class RemoteLookup:
    """Look-ups of prompts in a store's shared tiers. ``timeout_s``: the longest wait, however long the prompt."""

    def __init__(self, store: SharedStore | None, cost_model: CostModel, timeout_s: float) -> None:
        self._store = store if store is not None and store.probes else None
        self._cost_model = cost_model
        self._timeout_s = timeout_s

    @property
    def asks(self) -> bool:
        """Whether there are shared tiers."""
        return self._store is not None

    def ask(
        self,
        request: PrefixRequest,
        rows: Sequence[RowKeys],
        usable: int,
        now_s: float,
        certain: Mapping[int, Anchors] = MappingProxyType({}),
    ) -> None:
        """Ask about up to ``usable`` tokens of each row. ``certain``: of groups stored in part, the stored chunks."""
        if self._store is None:
            return
        sizes = [group.chunk_tokens for group in self._store.geometry.groups]
        wanted = [(group, row.of(group)[: usable // size]) for row in rows for group, size in enumerate(sizes)]
        limit_s = self._cost_model.lookup_limit_s(len(rows) * usable, self._timeout_s)
        if request.limit_s is not None:
            limit_s = min(self._timeout_s, request.limit_s)
        request.answers_until_s = now_s + limit_s
        request.probes = [one for one in self._store.probe(wanted, certain) if one.expected_s <= limit_s]

    def pending(self, request: PrefixRequest, now_s: float) -> bool:
        """Whether an admission should still wait for answers."""
        if request.probes and (now_s >= request.answers_until_s or all(probe.done for probe in request.probes)):
            request.probes = []
        return bool(request.probes)
