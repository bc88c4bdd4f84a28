"""Questions to the paged attention kernel, with answers from attention in float64 that has nothing clever about it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from stowage.core.geometry import Kind
from stowage.cuda.paged_attention import launch
from stowage.executor.attention_scores import Scores
from stowage.executor.block_pool import PADDING_BLOCK

BOUND = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""By how much an answer may differ, of values drawn from a normal distribution."""
ROUNDINGS = {torch.float32: 0.0, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""Of large numbers: weights are rounded once before they are multiplied with values, and sums once more."""


@dataclass(frozen=True)
class Case:
    """What single tokens ask of a pool, and what is to come out."""

    query: Tensor
    keys: Tensor
    values: Tensor
    blocks: Tensor
    bases: Tensor
    positions: Tensor
    kind: Kind
    window: int
    scores: Scores
    expected: Tensor

    def found(self) -> Tensor:
        return launch.attend(
            *(self.query, self.keys, self.values, self.blocks, self.bases, self.positions),
            *(self.kind, self.window, self.scores),
        )

    def on(self, device: str) -> Case:
        """The same, on a device; what is to come out stays."""
        pool = torch.empty(0, dtype=self.keys.dtype).set_(self.keys.untyped_storage()).to(device)
        sinks = self.scores.sinks
        return replace(
            self,
            query=self.query.to(device),
            keys=pool.as_strided(self.keys.shape, self.keys.stride(), self.keys.storage_offset()),
            values=pool.as_strided(self.values.shape, self.values.stride(), self.values.storage_offset()),
            blocks=self.blocks.to(device),
            bases=self.bases.to(device),
            positions=self.positions.to(device),
            scores=replace(self.scores, sinks=None if sinks is None else sinks.to(device)),
        )

    def check(self, bound: float | None = None) -> None:
        """Ask, and assert that it came out, within ``bound``; ``None``: the type's own."""
        found = self.found().cpu()
        assert found.dtype is self.query.dtype and found.shape == self.expected.shape
        roundings = ROUNDINGS[found.dtype] if bound is None else 0.0
        torch.testing.assert_close(found.double(), self.expected, rtol=roundings, atol=bound or BOUND[found.dtype])


def sees(kind: Kind, window: int, query: int, key: int) -> bool:
    if kind is Kind.SLIDING:
        return query - window < key <= query
    if kind is Kind.CHUNKED:
        return query // window == key // window and key <= query
    return key <= query


def make(
    positions: list[int],
    *,
    kind: Kind = Kind.FULL,
    window: int = 0,
    block_tokens: int = 16,
    kv_heads: int = 2,
    share: int = 2,
    width: int = 16,
    value_width: int = 16,
    latent: bool = False,
    softcap: float | None = None,
    sunk: bool = False,
    dtype: torch.dtype = torch.float32,
    spare: int = 0,
    seed: int = 0,
) -> Case:
    """Random keys in random rows of a pool that is NaN everywhere else, between two layers' worth of other bytes.
    ``latent``: values are the first columns of keys. ``spare``: columns of the table that nobody needs.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    firsts = [min(p for p in range(at + 1) if sees(kind, window, at, p)) // block_tokens for at in positions]
    counts = [at // block_tokens - first + 1 for at, first in zip(positions, firsts, strict=True)]
    rows = (torch.randperm(sum(counts) + 2, generator=generator) + 1).tolist()
    storage = torch.full((len(rows) + 1, 3, block_tokens * kv_heads * (width + value_width) + 32), math.nan).to(dtype)
    heads, inner = kv_heads * share, block_tokens * kv_heads
    mine = storage[:, 1]
    keys = mine[:, : inner * width].view(-1, block_tokens, kv_heads, width)
    values = mine[:, inner * width : inner * (width + value_width)].view(-1, block_tokens, kv_heads, value_width)
    values = keys[..., :value_width] if latent else values
    blocks = torch.full((len(positions), max(counts) + spare), PADDING_BLOCK)
    query = draw(len(positions), heads, width) * 2
    sinks = draw(heads) if sunk else None
    scale = width**-0.5
    expected = torch.zeros(len(positions), heads, value_width, dtype=torch.float64)
    for i, (at, first, count) in enumerate(zip(positions, firsts, counts, strict=True)):
        taken = [rows.pop() for _ in range(count)]
        blocks[i, :count] = torch.tensor(taken)
        seen = [p for p in range(at + 1) if sees(kind, window, at, p)]
        for p in seen:
            keys[taken[p // block_tokens - first], p % block_tokens] = draw(kv_heads, width)
            if not latent:
                values[taken[p // block_tokens - first], p % block_tokens] = draw(kv_heads, value_width)
        there = torch.tensor([taken[p // block_tokens - first] for p in seen]), torch.tensor(seen) % block_tokens
        for head in range(heads):
            found = keys[there][:, head // share].double() @ query[i, head].double() * scale
            if softcap is not None:
                found = torch.tanh(found / softcap) * softcap
            if sinks is not None:
                found = torch.cat((found, sinks[head : head + 1].double()))
            weights = found.softmax(0)[: len(seen)]
            expected[i, head] = weights @ values[there][:, head // share].double()
    bases = torch.tensor(firsts) * block_tokens
    asked = Scores(scale, softcap, sinks)
    return Case(query, keys, values, blocks, bases, torch.tensor(positions), kind, window, asked, expected)


EDGES: dict[str, dict[str, Any]] = {
    "a head's first piece begins with its sink": {"positions": [40], "sunk": True, "block_tokens": 7},
    "as many query heads as two programs take": {"positions": [20, 0], "kv_heads": 1, "share": 32},
    "the widest latent": {
        "positions": [33],
        "kv_heads": 1,
        "share": 16,
        "width": 576,
        "value_width": 512,
        "latent": True,
    },
    "a window of one": {"positions": [0, 15, 16, 47], "kind": Kind.SLIDING, "window": 1},
    "a chunk's first query": {"positions": [0, 31, 32, 63], "kind": Kind.CHUNKED, "window": 32},
    "a window over many blocks": {"positions": [65, 130], "kind": Kind.SLIDING, "window": 64, "block_tokens": 5},
}
"""Geometries, and what is at their edges."""
