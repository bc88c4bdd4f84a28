"""The start-up trial of the paged attention kernel: does it compile here, and is it right for this model's geometry?

Owns the trial. The engine's own pools, which are still empty, get random keys. The kernel reads them, and so does torch
in float64 (``attention_scores.attend``): with the model's heads, window, soft-capping and sinks, at lengths around
every edge, and with a block of NaN where a table is padded. If one answer is off, or the kernel raises an error, torch
decodes instead: exact or absent.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stowage.core.geometry import Kind
from stowage.errors import reason
from stowage.executor.attention_scores import Scores, attend
from stowage.executor.block_pool import BlockPool
from stowage.executor.decode_attention import PagedKernel
from stowage.models.layout import visible
from stowage.models.probing import Query, look

logger = logging.getLogger("stowage.engine")
BOUND = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""By how much an answer may differ, of values drawn from a normal distribution."""
_ROWS_MOST = 6
"""Blocks of the pool that keys are drawn into; tables name them again and again."""
_LONG = 1000
"""Tokens of the longest sequence; keys of several pieces."""
_WINDOW_MOST = 4096
"""Up to this window its far edge is tried too."""
_SPREAD = 2.0
"""Of scores: some keys weigh much, and none everything."""


@torch.inference_mode()
def trusted(kernel: PagedKernel | None, model: Any, pools: Sequence[BlockPool]) -> PagedKernel | None:
    """``kernel``, if it is right for all of ``model``'s; else ``None``, and the log says why.
    ``pools`` must be empty, and are again afterwards.
    """
    if kernel is None:
        return None
    try:
        for pool, layer, query in _geometries(model, pools):
            _try(kernel, pool, layer, query, model.dtype)
    except kernel.errors as error:
        logger.warning(
            "the paged attention kernel cannot be used here, so torch gathers the keys of every decode step, which is "
            "slower: %s: %s",
            type(error).__name__,
            reason(error),
            extra={"stowage_event": "paged_attention"},
        )
        return None
    finally:
        for pool in pools:
            pool.storage[1 : 1 + _ROWS_MOST].zero_()
    return kernel


def _geometries(model: Any, pools: Sequence[BlockPool]) -> Iterator[tuple[BlockPool, int, Query]]:
    """A layer of each sort, and what it is asked with."""
    reads = look(model).reads
    for pool in pools:
        if pool.group.kind is Kind.RECURRENT:
            continue
        known = set()
        for layer in pool.layout.layers:
            for query in {read.query for read in reads if read.source == layer.index and read.query is not None}:
                if (sort := (query, layer.tensors)) not in known:
                    known.add(sort)
                    yield pool, layer.index, query


def _try(kernel: PagedKernel, pool: BlockPool, layer: int, query: Query, dtype: torch.dtype) -> None:
    """Raise ``ValueError`` where the kernel's answers are not torch's."""
    generator = torch.Generator().manual_seed(11)
    views = pool.views[layer]
    keys, device = views[0], pool.storage.device
    values = keys[..., : query.rank] if query.rank else views[1]
    if keys.dtype is not dtype:
        raise ValueError(f"keys are kept in {keys.dtype}, and the model computes in {dtype}")
    rows = min(pool.blocks, _ROWS_MOST)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    for view in views:
        view[1 : 1 + rows] = draw(rows, *view.shape[1:])
    whole, unread = max(1, rows - 1), rows  # the last one is no number at all
    if whole < rows:
        pool.storage.view(torch.uint8)[unread].fill_(0xFF)
    width = keys.shape[3]
    strength = _SPREAD / (query.scale * math.sqrt(width))
    scores = Scores(query.scale, query.softcap, draw(query.heads) if query.sunk else None)
    for positions in _positions(pool, kernel.piece_keys):
        asked = draw(len(positions), query.heads, width) * strength
        blocks, bases = _tables(pool, positions, whole, unread, generator)
        found = kernel.attend(
            *(asked, keys, values, blocks.to(device), bases.to(device), torch.tensor(positions, device=device)),
            *(pool.group.kind, pool.group.window, scores),
        )
        expected = [
            _expected(pool, asked[i], keys, values, blocks[i], int(bases[i]), position, scores)
            for i, position in enumerate(positions)
        ]
        off = float((found.double() - torch.stack(expected)).abs().max())
        if not off <= BOUND[dtype]:  # NaN is not
            raise ValueError(f"answers of a trial were off by {off:.1e}")


def _positions(pool: BlockPool, piece_keys: int) -> list[list[int]]:
    """Of queries that are asked together: short ones, whose keys are one piece; with them long ones; and the longest
    alone, whose keys are several pieces where that is done at all.
    """
    size, window = pool.group.block_tokens, pool.group.window
    short = [0, size - 1, size, 3 * size + 1]
    edges = [window - 1, window, window + 1, 2 * window + 2] if 0 < window <= _WINDOW_MOST else []
    return [[p for p in (*short, *edges) if p < piece_keys] or [0], [*short, *edges, _LONG], [_LONG]]


def _tables(
    pool: BlockPool, positions: list[int], whole: int, unread: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """``blocks`` and ``bases`` of queries at ``positions``: of the first ``whole`` blocks, ``unread`` where none is."""
    group = pool.group
    firsts, counts = [], []
    for position in positions:
        seen = visible(group.kind, group.window, np.array([position]), np.arange(position + 1))
        firsts.append(int(seen.argmax()) // group.block_tokens)
        counts.append(position // group.block_tokens - firsts[-1] + 1)
    blocks = torch.full((len(positions), max(counts) + 1), unread, dtype=torch.int64)
    for row, count in zip(blocks, counts, strict=True):
        row[:count] = torch.randint(1, whole + 1, (count,), generator=generator)
    return blocks, torch.tensor(firsts) * group.block_tokens


def _expected(
    pool: BlockPool,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    blocks: Tensor,
    base: int,
    position: int,
    scores: Scores,
) -> Tensor:
    """What torch makes of one query ``[heads, dim]``, in float64: ``[heads, value_dim]``."""
    group = pool.group
    at = np.arange(base, position + 1)
    at = at[visible(group.kind, group.window, np.array([position]), at)]
    rows = blocks[torch.from_numpy(at - base) // group.block_tokens].to(keys.device)
    offsets = torch.from_numpy(at % group.block_tokens).to(keys.device)
    there, mixed = (view[rows, offsets].double().transpose(0, 1)[None] for view in (keys, values))
    sinks = None if scores.sinks is None else scores.sinks.double()
    out = attend(query.double()[None, :, None], there, mixed, None, Scores(scores.scale, scores.softcap, sinks))
    return out[0, :, 0]
