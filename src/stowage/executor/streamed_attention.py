"""Attention over keys of which some are offloaded: they are copied in pieces, one piece at a time.

Owns that arithmetic for torch, where there are no kernels (those read host memory in place, in their usual order).
Every query keeps the largest score so far, the sum of its weights and the weighted sum of values, and shrinks them when
a larger score comes (Milakov and Gimelshein, arXiv:1805.02867); a sink is a score whose value is 0, there from the
beginning. Only full groups have offloaded blocks, so every query sees a key of the first piece.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stowage.executor.attention_scores import SCORES_BYTES_MAX, Scores
from stowage.executor.batch import StreamStep
from stowage.executor.block_table import OFFLOADED
from stowage.executor.latent_weights import absorbed, expanded

PIECE_KEYS_MAX = 4096
"""Of one layer, that are brought at once: longer pieces are no quicker."""
Views = tuple[Tensor, ...]
Read = Callable[[int, int], tuple[Tensor, Tensor]]
"""Keys ``[kv_heads, keys, dim]`` and values ``[kv_heads, keys, value_dim]`` of some blocks, from one up to another."""


def attend(module: Any, query: Tensor, views: Views, offloaded: Views, step: StreamStep, scores: Scores) -> Tensor:
    """Attention ``[tokens, heads, value_dim]`` of ``query`` ``[tokens, heads, dim]``. ``views``, ``offloaded``: the
    layer's keys and values in the pool and in host memory.
    """

    def read(first: int, end: int) -> tuple[Tensor, Tensor]:
        keys, values = (
            _gather(v, a, step.addresses[first:end]).transpose(0, 1) for v, a in zip(views, offloaded, strict=True)
        )
        return keys, values

    return _attend(query, read, step, views[0].shape[1], views[0].shape[2], views[1].shape[3], scores)


def attend_latent(
    module: Any, query: Tensor, views: Views, offloaded: Views, step: StreamStep, scores: Scores
) -> Tensor:
    """The same over latents: absorbed for a single token, expanded piece by piece for a run (see ``attention``)."""
    rank, width = module.kv_lora_rank, module.v_head_dim
    heads, block_tokens = query.shape[1], views[0].shape[1]

    def rows(first: int, end: int) -> Tensor:
        return _gather(views[0], offloaded[0], step.addresses[first:end]).transpose(0, 1)

    def expand(first: int, end: int) -> tuple[Tensor, Tensor]:
        keys, values = expanded(module, rows(first, end)[None])
        return keys[0], values[0]

    if len(query) > 1:
        return _attend(query, expand, step, block_tokens, heads, width, scores)

    def absorb(first: int, end: int) -> tuple[Tensor, Tensor]:
        latents = rows(first, end)
        return latents, latents[..., :rank]

    wide, weight = absorbed(module, query)
    mixed = _attend(wide, absorb, step, block_tokens, 1, rank, scores)
    return torch.einsum("bhr,hvr->bhv", mixed, weight)


def _gather(view: Tensor, offloaded: Tensor, addresses: Tensor) -> Tensor:
    """``[keys, heads, dim]`` of the blocks at ``addresses``, on the device of ``view``."""
    picked = view[addresses.clamp(min=0).to(view.device)]
    gone = addresses <= OFFLOADED
    if gone.any():
        brought = offloaded[OFFLOADED - addresses[gone]].to(view.device)
        picked[gone.nonzero()[:, 0].to(view.device)] = brought
    return picked.flatten(0, 1)


def _attend(
    query: Tensor, read: Read, step: StreamStep, block_tokens: int, kv_heads: int, value_dim: int, scores: Scores
) -> Tensor:
    tokens, heads, width = query.shape
    folded = query.transpose(0, 1).reshape(kv_heads, -1, width)  # rows: the query heads of a key head, each token
    device = query.device
    positions = (step.start + torch.arange(tokens, device=device)).repeat(heads // kv_heads)[None, :, None]
    peak = torch.full((heads, tokens), -math.inf, device=device)
    if scores.sinks is not None:
        peak = peak.copy_(scores.sinks.float()[:, None])
    peak = peak.view(kv_heads, -1, 1)
    total = torch.full_like(peak, 0.0 if scores.sinks is None else 1.0)
    out = torch.zeros((kv_heads, folded.shape[1], value_dim), device=device)
    blocks = max(1, min(PIECE_KEYS_MAX, SCORES_BYTES_MAX // (4 * heads * tokens)) // block_tokens)
    last = -(-(step.start + tokens) // block_tokens)
    for first in range(0, last, blocks):
        begin = first * block_tokens
        keys, values = read(first, min(first + blocks, last))
        found = torch.bmm(folded, keys.transpose(1, 2)).float().mul_(scores.scale)
        if scores.softcap is not None:
            found = found.div_(scores.softcap).tanh_().mul_(scores.softcap)
        if begin + keys.shape[1] - 1 > step.start:
            found.masked_fill_(torch.arange(begin, begin + keys.shape[1], device=device) > positions, -math.inf)
        higher = torch.maximum(peak, found.amax(-1, keepdim=True))
        shrink = (peak - higher).exp_()
        weights = found.sub_(higher).exp_()
        total = total.mul_(shrink).add_(weights.sum(-1, keepdim=True))
        out = out.mul_(shrink).add_(torch.bmm(weights.to(values.dtype), values))
        peak = higher
    return out.div_(total).to(query.dtype).view(heads, tokens, value_dim).transpose(0, 1)
