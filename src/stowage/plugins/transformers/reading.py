"""From the store to a cache: the longest prefix that all groups of all rows can serve, as the planner chooses it.

Owns the wait, in the thread of the caller.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache

from stowage.cache.cost_model import CostModel
from stowage.cache.prefix_planner import PrefixPlanner, PrefixRequest
from stowage.cache.remote_lookup import RemoteLookup
from stowage.cache.store import TieredStore
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


class Reader:
    """Reads caches of one model from ``store``. ``timeout_s``: the longest wait for shared stores' answers."""

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
        self._planner = PrefixPlanner(store, strategies, cost_model)
        self._remote_lookup = RemoteLookup(store, cost_model, timeout_s)

    def read(self, config: Any, rows: Rows, keys: Sequence[SequenceKeys], timeout_s: float | None) -> DynamicCache:
        """A cache for ``config`` with the longest prefix; ``keys`` per row. The caller holds the store's turn.
        ``timeout_s``: for the loads; without one they may take as long as computing would.
        """
        usable = min(rows.length - 1, rows.plain)  # none that might count as padding
        request = PrefixRequest(limit_s=timeout_s)
        self._remote_lookup.ask(request, keys, usable, time.monotonic())
        while self._remote_lookup.pending(request, now_s := time.monotonic()):
            self._wait(request.answers_until_s - now_s)
        while True:
            plan = self._planner.plan(request, keys, usable)
            if not plan.boundary:
                return fresh(config)
            fetch = self._planner.fetch(request, plan, time.monotonic())
            try:
                while not fetch.done:
                    self._wait(_POLL_S)
                now_s = time.monotonic()
                self._planner.learn(plan, now_s)
                copies = self._planner.copies(request, plan.boundary, plan.fetched())
                if copies is not None:
                    rows_copies = [(part.row, copy) for part, copy in copies]
                    return self._fill(fresh(config), rows_copies, plan.boundary, rows.count)
                request.waited_s += now_s - plan.began_s
            finally:
                self._store.release(fetch)

    def _wait(self, limit_s: float) -> None:
        self._store.wait(min(limit_s, _POLL_S))
        self._store.poll()

    def _fill(
        self, cache: DynamicCache, plans: Sequence[tuple[int, CopyPlan]], boundary: int, rows: int
    ) -> DynamicCache:
        """Copy what came into the layers of an empty cache. The tensors are ordinary ones in inference mode too, since
        recurrent layers write into theirs later. Recurrent states come first, as in a forward: from Transformers 5.24
        on, a layer that has both kinds takes its dtype from them, and only when nothing is in it yet.
        """
        recurrent_first = sorted(self._layout.blocks, key=lambda block: block.group.kind is not Kind.RECURRENT)
        with torch.inference_mode(False), torch.no_grad():
            for block in recurrent_first:
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
