"""Exact sliding and full causal attention for training, without a dense mask.

Owns the attention function the training script registers with Transformers under
``NAME``. Invariants: inputs are unpadded, start at position 0 and use no cache; the
result equals Transformers' own masked attention to rounding. It exists for speed:
on a CPU the dense mask makes a 4,096-token sliding layer cost 16 times its window.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

NAME = "demo_local"


def _window_blocks(states: torch.Tensor, window: int) -> torch.Tensor:
    """(batch, heads, tokens, dim) to (batch * blocks, heads, window, dim)."""
    batch, heads, tokens, dim = states.shape
    blocks = states.view(batch, heads, tokens // window, window, dim).transpose(1, 2)
    return blocks.reshape(-1, heads, window, dim)


def _with_previous(blocks: torch.Tensor, batch: int) -> torch.Tensor:
    """Each key block preceded by its left neighbour (zeros before a row's first)."""
    rows = blocks.view(batch, -1, *blocks.shape[1:])
    previous = pad(rows[:, :-1], (0, 0, 0, 0, 0, 0, 1, 0))
    return torch.cat([previous, rows], dim=-2).flatten(0, 1)


def sliding_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int, scaling: float
) -> torch.Tensor:
    """Causal attention of each token to itself and the ``window - 1`` before it.

    All of shape (batch, heads, tokens, dim) with equal head counts.
    """
    batch, heads, tokens, dim = query.shape
    extra = -tokens % window
    query, key, value = (pad(states, (0, 0, 0, extra)) for states in (query, key, value))
    queries = _window_blocks(query, window)
    keys = _with_previous(_window_blocks(key, window), batch)
    values = _with_previous(_window_blocks(value, window), batch)
    row = torch.arange(window)[:, None]
    column = torch.arange(2 * window)[None, :]
    allowed = (column > row) & (column <= row + window)
    first = allowed & (column >= window)  # a row's first block has no left neighbour
    masks = torch.stack([first] + [allowed] * (queries.shape[0] // batch - 1))
    masks = masks.repeat(batch, 1, 1)[:, None]
    out = scaled_dot_product_attention(queries, keys, values, attn_mask=masks, scale=scaling)
    out = out.view(batch, -1, heads, window, dim).transpose(1, 2)
    return out.reshape(batch, heads, -1, dim)[:, :, :tokens]


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float = 1.0,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Transformers' attention signature; dispatches on the layer's ``sliding_window``."""
    groups = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(groups, dim=1) for states in (key, value))
    window = getattr(module, "sliding_window", None)
    if window is None or query.shape[2] <= window:
        out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    else:
        out = sliding_attention(query, key, value, window, scaling)
    return out.transpose(1, 2).contiguous(), None


def register() -> None:
    """Make ``attn_implementation=NAME`` available to Transformers in this process."""
    AttentionInterface.register(NAME, attention)
