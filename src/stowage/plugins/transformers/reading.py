"""From the store to a cache: the longest prefix that all groups of all rows can serve, waited for no longer than it is
worth.

Owns the choice of the boundary and the wait. A chunk that does not arrive (damaged, late, gone) is left out and the
choice is made again without it, so every try is shorter than the one before; all tries together wait no longer than
computing would have taken.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from stowage.cache.cost_model import CostModel
from stowage.cache.prefix_planner import Choice
from stowage.cache.store import Fetch, TieredStore
from stowage.core.copy_plan import CopyPlan
from stowage.core.geometry import Kind
from stowage.core.groups import GroupStrategy
from stowage.core.key import SequenceKeys
from stowage.models.layout import BlockLayout
from stowage.plugins.transformers.caches import SwappedBlocks, fresh, put_attention, put_states
from stowage.plugins.transformers.inputs import Rows
from stowage.plugins.transformers.layout import CacheLayout
from stowage.plugins.transformers.transfer import CacheTransfer

_POLL_S = 0.1


@dataclass(slots=True)
class Budget:
    """How long to wait: ``limit_s`` from the caller, or from the first time that there is something to wait for."""

    began_s: float
    limit_s: float | None

    def until_s(self, otherwise_s: float) -> float:
        if self.limit_s is None:
            self.limit_s = otherwise_s
        return self.began_s + self.limit_s


class Reader:
    """Reads caches of one model from ``store``. ``timeout_s``: the longest wait for shared stores to say what they
    have.
    """

    def __init__(
        self,
        store: TieredStore,
        transfer: CacheTransfer,
        layout: CacheLayout,
        strategies: Sequence[GroupStrategy],
        cost_model: CostModel,
        timeout_s: float,
    ) -> None:
        self._store = store
        self._transfer = transfer
        self._layout = layout
        self._strategies = strategies
        self._cost_model = cost_model
        self._choice = Choice(store, strategies, cost_model)
        self._timeout_s = timeout_s

    def read(self, config: Any, rows: Rows, keys: Sequence[SequenceKeys], timeout_s: float | None) -> DynamicCache:
        """A cache for ``config`` with the longest prefix; ``keys`` per row. The caller holds the store's turn."""
        self._ask(rows, keys, timeout_s)
        budget = Budget(time.monotonic(), timeout_s)
        refused: set[bytes] = set()
        while True:
            near, far, _ = self._choice.boundaries(keys, _usable(rows), refused)
            boundary = self._choose(rows, keys, near, far, budget)
            if not boundary:
                return fresh(config)
            wants = self._choice.wants(keys, boundary)
            fetch = self._store.fetch(
                [(want.group, want.keys) for want in wants],
                budget.until_s(self._cost_model.load_limit_s(rows.count * (boundary - near))),
            )
            try:
                began_s = time.monotonic()
                self._wait(fetch)
                elapsed_s = time.monotonic() - began_s
                plans = self._choice.plans(fetch, wants, boundary, refused)
                if plans is not None:
                    self._choice.measure(fetch, wants, elapsed_s)
                    return self._fill(fresh(config), plans, boundary, rows.count)
            finally:
                self._store.release(fetch)

    # choosing the boundary

    def _ask(self, rows: Rows, keys: Sequence[SequenceKeys], timeout_s: float | None) -> None:
        """Ask shared stores about the prompt, and wait a little for what they say."""
        if not self._store.probes:
            return
        usable = _usable(rows)
        sizes = [strategy.group.chunk_tokens for strategy in self._strategies]
        wanted = [(group, of_row.of(group)[: usable // size]) for of_row in keys for group, size in enumerate(sizes)]
        limit_s = self._cost_model.lookup_limit_s(rows.count * usable, self._timeout_s)
        if timeout_s is not None:
            limit_s = min(self._timeout_s, timeout_s)
        until_s = time.monotonic() + limit_s
        probes = [probe for probe in self._store.probe(wanted) if probe.expected_s <= limit_s]
        while not all(probe.done for probe in probes) and (left_s := until_s - time.monotonic()) > 0:
            self._store.wait(min(left_s, _POLL_S))
            self._store.poll()

    def _choose(self, rows: Rows, keys: Sequence[SequenceKeys], near: int, far: int, budget: Budget) -> int:
        """The farther boundary, where its loads are worth it and there is time left."""
        if far == near or (budget.limit_s is not None and time.monotonic() >= budget.until_s(0.0)):
            return near
        if budget.limit_s is None and not self._choice.worth_loading(keys, near, far):
            return near
        return far

    # waiting and copying

    def _wait(self, fetch: Fetch) -> None:
        while not fetch.done:
            self._store.wait(_POLL_S)
            self._store.poll()

    def _fill(
        self, cache: DynamicCache, plans: Sequence[tuple[int, CopyPlan]], boundary: int, rows: int
    ) -> DynamicCache:
        """Copy what came into the layers of an empty cache. The tensors are ordinary ones in inference mode too, since
        recurrent layers write into theirs later.
        """
        with torch.inference_mode(False), torch.no_grad():
            for block in self._layout.blocks:
                held = self._empty(block, boundary, rows)
                for row, plan in plans:
                    if plan.group == block.group.index:
                        self._transfer.load(plan, held, row)
                for layer in block.layers:
                    device = self._layout.devices[layer.index]
                    tensors = [tensor.to(device) for tensor in held[layer.index].tensors]
                    if layer.kind is Kind.RECURRENT:
                        put_states(cache.layers[layer.index], layer.states, tensors)
                    else:
                        put_attention(cache.layers[layer.index], tensors[0], tensors[1], boundary)
        return cache

    def _empty(self, block: BlockLayout, boundary: int, rows: int) -> dict[int, SwappedBlocks]:
        """Tensors in ordinary memory for the blocks that a resume needs, by layer."""
        needed = self._strategies[block.group.index].needed_blocks(boundary)
        first = needed.start * block.group.block_tokens
        found = {}
        for layer in block.layers:
            if block.group.kind is Kind.RECURRENT:
                shapes = [(rows, *tensor.shape) for tensor in layer.tensors]
            else:
                shapes = [(rows, t.shape[0], boundary - first, t.shape[1]) for t in layer.tensors]
            dtypes = [tensor.dtype for tensor in layer.tensors]
            found[layer.index] = SwappedBlocks(
                first, tuple(torch.empty(s, dtype=d) for s, d in zip(shapes, dtypes, strict=True))
            )
        return found


def _usable(rows: Rows) -> int:
    """Tokens that may come from a store: all but the last, and none that might count as padding."""
    return min(rows.length - 1, rows.plain)
