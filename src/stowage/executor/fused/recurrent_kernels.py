"""The kernels of recurrent layers: one token after the other, whether of a prompt or generated.

    delta      gated delta rules    s = decay s, then s += k (beta (v - k s)); q s
    scan       state spaces         s = e^(dt a) s + dt b x; c s + d x
    convolve   short convolutions   each channel over its last few tokens

A state is changed in place: those of a batch one after the other, or wherever they lie in a pool
(``StateRows``). Sums and states are float32. ``native/kernels/recurrence.h`` has the sources.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stowage.native import extension as _kernel

TAPS_MAX = 16


@dataclass(frozen=True, slots=True)
class StateRows:
    """States of a batch where they lie: ``rows`` (int64 ``[batch]``) of ``view`` ``[blocks, ...]``, each in a piece."""

    view: Tensor
    rows: Tensor


def delta(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor | StateRows, *, normed: bool
) -> Tensor:
    """``[batch, tokens, heads, values]`` of ``query`` and ``key`` ``[batch, tokens, heads, keys]``, ``value``,
    ``decay`` ``[batch, tokens, heads]`` or for each key (its logarithm), and ``beta`` ``[batch, tokens, heads]``.
    ``state``: float32 ``[batch, heads, keys, values]``. ``normed``: queries and keys are brought to length 1 first.
    """
    batch, tokens, heads, keys = query.shape
    values = value.shape[3]
    out = torch.empty((batch, tokens, heads, values), dtype=value.dtype)
    query, key, value = (_side_by_side(x) for x in (query, key, value))
    decay, beta = decay.float().contiguous(), beta.float().contiguous()
    states, rows = _where(state)
    at = *(x.data_ptr() for x in (query, key, value, decay, beta, states, out)), rows
    strides = (*query.stride()[:3], *key.stride()[:3], *value.stride()[:3], states.stride(0))
    sizes = (batch, tokens, heads, keys, values)
    half, threads = value.dtype is torch.bfloat16, torch.get_num_threads()
    _kernel.delta(at, sizes, strides, keys**-0.5, decay.dim() == 4, normed, half, threads)
    return out


def scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    bias: Tensor,
    state: Tensor | StateRows,
    *,
    softplus: bool,
    least: float,
    most: float,
) -> Tensor:
    """``[batch, tokens, heads, width]``, float32, of ``x`` of that shape, ``dt`` ``[batch, tokens, heads]``, ``b`` and
    ``c`` ``[batch, tokens, groups, states]``, all of one type; ``a``, ``d`` and ``bias``: float32 ``[heads]``;
    ``state``: float32 ``[batch, heads, width, states]``. A step is as long as ``dt`` and ``bias`` say (in the type of
    ``dt``), through a ``softplus`` if there is to be one, from ``least`` to ``most``.
    """
    batch, tokens, heads, width = x.shape
    groups, size = b.shape[2:]
    out = torch.empty((batch, tokens, heads, width), dtype=torch.float32)
    x, b, c = (_side_by_side(part) for part in (x, b, c))
    bias = bias.to(dt.dtype).float()
    states, rows = _where(state)
    at = *(part.data_ptr() for part in (x, b, c, dt, bias, a, d, states, out)), rows
    sizes = (batch, tokens, heads, groups, width, size)
    strides = (*x.stride()[:3], *b.stride()[:3], *c.stride()[:3], *dt.stride(), states.stride(0))
    half, threads = x.dtype is torch.bfloat16, torch.get_num_threads()
    _kernel.scan(at, sizes, strides, least, most, softplus, half, threads)
    return out


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | StateRows | None, *, silu: bool) -> Tensor:
    """``[batch, channels, tokens]`` of ``x`` of that shape and ``weight`` ``[channels, taps]``; ``state`` ``[batch,
    channels, before]``, with at least all taps but one, is what came before a single token, which is put into it.
    ``silu``: is applied then. All are of one type.
    """
    batch, channels, tokens = x.shape
    taps = weight.shape[1]
    sided = x.transpose(1, 2)
    if sided.stride(2) != 1 and channels > 1:
        sided = sided.contiguous()
    out = torch.empty((batch, tokens, channels), dtype=x.dtype)
    states, rows = (None, 0) if state is None else _where(state)
    at = *(0 if part is None else part.data_ptr() for part in (sided, weight, bias, states, out)), rows
    before, apart = (taps - 1, 0) if states is None else (states.shape[2], states.stride(0))
    sizes, strides = (batch, tokens, channels, taps, before), (sided.stride(0), sided.stride(1), apart)
    _kernel.convolve(at, sizes, strides, silu, x.dtype is torch.bfloat16, torch.get_num_threads())
    return out.transpose(1, 2)


def _side_by_side(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _where(state: Tensor | StateRows) -> tuple[Tensor, int]:
    """Where states are, and the address of which of them are meant; 0: all."""
    return (state.view, state.rows.data_ptr()) if isinstance(state, StateRows) else (state, 0)
