"""Softmax attention over dense keys, with what some families add to its scores: soft-capping and sinks.

Owns that arithmetic, and knows nothing of blocks or sequences. The plain case is one fused kernel. A sink is one more
key for each query head, whose score is given and whose value is 0: it takes its share of the softmax and adds nothing
(Xiao et al., arXiv:2309.17453; as GPT-OSS has it). To keep the fused kernel it is put there as a key that is 0 but for
one further column, in which real keys are 0 and the query holds the score. Soft-capping (Gemma 2, arXiv:2408.00118)
bends every score before the softmax, which no fused kernel of the CPU does: scores are made a few queries at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

SCORES_BYTES_MAX = 64 << 20
"""Of float32 scores that exist at once where no fused kernel is used."""
_COLUMNS = 8
"""Columns that a sink adds, of which one is used: widths that are multiples of it take the kernel's fast path."""


@dataclass(frozen=True, slots=True)
class Scores:
    """How scores become weights: ``softmax(cap(scale * query . key))``; ``sinks``: one score per query head."""

    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None


def attend(
    query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, scores: Scores, *, causal: bool = False
) -> Tensor:
    """Attention ``[batch, heads, queries, value_dim]``.

    ``query`` is ``[batch, heads, queries, dim]``, ``keys`` and ``values`` ``[batch, kv_heads, keys, dim]``; query heads
    are a multiple of kv heads. Where they are equal in number, the rows of a head may be several query heads of one
    token (decoding). ``bias`` is added to the scores and broadcasts to ``[batch, heads, queries, keys]``; ``causal``:
    query i sees keys up to i.
    """
    if scores.softcap is not None:
        return _capped(query, keys, values, _causal_bias(query, keys) if causal else bias, scores)
    if scores.sinks is not None:
        return _sunk(query, keys, values, _causal_bias(query, keys) if causal else bias, scores)
    return scaled_dot_product_attention(
        query,
        keys,
        values,
        attn_mask=bias,
        is_causal=causal,
        scale=scores.scale,
        enable_gqa=query.shape[1] != keys.shape[1],
    )


def _causal_bias(query: Tensor, keys: Tensor) -> Tensor:
    bias = query.new_zeros((query.shape[2], keys.shape[2]))
    return bias.masked_fill_(torch.ones_like(bias, dtype=torch.bool).triu_(1), float("-inf"))


def _rows(sinks: Tensor, query: Tensor) -> Tensor:
    """One sink for each row of ``query``: ``[batch, heads, queries, 1]``; rows are tokens, or folded query heads."""
    shape = (1, query.shape[1], -1, 1)  # as many sinks as heads: one each; more: the rows of a head have their own
    return sinks.to(query.dtype).view(shape).expand(*query.shape[:3], 1)


def _sunk(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, scores: Scores) -> Tensor:
    assert scores.sinks is not None
    width, value_width = query.shape[-1], values.shape[-1]
    more = max(width, value_width) + _COLUMNS
    sink = _rows(scores.sinks, query) / scores.scale
    wide = torch.cat((query, sink, query.new_zeros((*query.shape[:3], more - width - 1))), dim=-1)
    keys = pad(keys, (0, more - width, 0, 1))
    keys[:, :, -1, width] = 1.0
    values = pad(values, (0, more - value_width, 0, 1))
    bias = pad(bias, (0, 1)) if bias is not None else None
    gqa = query.shape[1] != keys.shape[1]
    out = scaled_dot_product_attention(wide, keys, values, attn_mask=bias, scale=scores.scale, enable_gqa=gqa)
    return out[..., :value_width]


def _capped(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, scores: Scores) -> Tensor:
    assert scores.softcap is not None
    batch, heads, queries, _ = query.shape
    kv_heads, length = keys.shape[1:3]
    out = query.new_empty((batch, heads, queries, values.shape[-1]))
    step = max(1, SCORES_BYTES_MAX // (4 * batch * heads * length))
    for begin in range(0, queries, step):
        part = query[:, :, begin : begin + step]
        folded = part.reshape(batch, kv_heads, -1, part.shape[-1])
        found = (folded @ keys.transpose(2, 3)).mul_(scores.scale).view(batch, heads, part.shape[2], length).float()
        found = torch.tanh(found / scores.softcap) * scores.softcap
        if bias is not None:
            found = found + (bias if bias.shape[-2] == 1 else bias[..., begin : begin + step, :])
        if scores.sinks is not None:
            found = torch.cat((found, _rows(scores.sinks, part).float()), dim=-1)
        weights = found.softmax(-1)[..., :length].to(query.dtype).view(batch, kv_heads, -1, length)
        out[:, :, begin : begin + step] = (weights @ values).view(batch, heads, part.shape[2], -1)
    return out
