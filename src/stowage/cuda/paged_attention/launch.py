"""Paged attention for single tokens: reads a pool's blocks in place, where torch would gather all keys first.

Owns when it is used, and the shapes in which ``kernels`` are launched: how many query heads and keys a program takes at
a time, and into how many pieces the keys of a sequence are cut. All of this follows from shapes alone, so a CUDA graph
that was captured with some lengths can be replayed with others.

Never decides that the kernels are right: ``executor.paged_trial`` does, when an engine opens.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from stowage.core.geometry import Kind
from stowage.cuda.compiling import is_wanted
from stowage.native.switches import is_on

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SWITCH = "STOWAGE_TORCH_ATTENTION"
ROWS = 16
"""Query heads of a key head that one program takes: as many as a tensor core multiplies at once, used or not."""
PIECES_MOST = 64
PIECE_KEYS_LEAST = 256
"""Fewer keys are no work for a program of their own."""
_KINDS = {Kind.FULL: 0, Kind.SLIDING: 1, Kind.CHUNKED: 2}
_TILE_BYTES = 16 << 10
"""Of keys, and as much of values, that a program reads at a time; twice that lies in shared memory, of which GPUs have
100 KiB or more."""
_BUSY = 8
"""Where steps are filled up to one number of sequences, one in so many is taken to be long, or there at all."""
_INTERPRETED_PROCESSORS = 4


class ScoreOptions(Protocol):
    """How scores become weights; see ``executor.attention_scores``."""

    @property
    def scale(self) -> float: ...
    @property
    def softcap(self) -> float | None: ...
    @property
    def sinks(self) -> Tensor | None: ...


def wanted(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels are to compute such a model: on CUDA with Triton, unless torch's way was asked for."""
    return device.type == "cuda" and dtype in DTYPES and not is_on(SWITCH) and is_wanted()


def of_length(tokens: int) -> Callable[..., Tensor]:
    """``attend`` for sequences of up to ``tokens`` tokens: into how many pieces a sequence's keys are cut follows from
    the number of sequences, not from how long they are.
    """
    return functools.partial(attend, longest=tokens)


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    blocks: Tensor,
    bases: Tensor,
    positions: Tensor,
    kind: Kind,
    window: int,
    scores: ScoreOptions,
    *,
    longest: int = 0,
) -> Tensor:
    """Attention ``[sequences, heads, value_dim]`` of ``query`` ``[sequences, heads, dim]`` over ``keys`` and ``values``
    ``[rows, block_tokens, kv_heads, dim]`` of a pool, which hold the tokens themselves already.

    ``blocks`` ``[sequences, blocks]``: each sequence's rows, of which the first key is at position ``bases``
    ``[sequences]``; what lies beyond ``positions`` ``[sequences]``, those of the queries, is not read. Integers, on the
    device. ``values`` may be the first columns of ``keys``. ``longest``: tokens of the longest sequence that there may
    be; 0: those that the tables have room for.
    """
    sequences, heads, width = query.shape
    block_tokens, kv_heads = keys.shape[1], keys.shape[2]
    value_width = values.shape[3]
    assert keys.stride(3) == 1 and values.stride(3) == 1, "a head's numbers lie side by side"
    assert keys.dtype is values.dtype is query.dtype, "all in one type"
    query = query if query.stride(2) == 1 else query.contiguous()
    head, rest = _columns(width)
    shared = values.data_ptr() == keys.data_ptr() and values.stride() == keys.stride() and value_width == head
    share = heads // kv_heads
    tiles = kv_heads * -(-share // ROWS)
    busy = -(-sequences // _BUSY) if longest else sequences
    longest = longest or blocks.shape[1] * block_tokens
    pieces = _pieces(busy * tiles, longest if kind is Kind.FULL else min(longest, window), query.device)
    out = query.new_empty((sequences, heads, value_width))
    if not sequences:
        return out
    parts, sums = out, out
    if pieces > 1:
        parts = query.new_empty((sequences, heads, pieces, value_width), dtype=torch.float32)
        sums = query.new_empty((sequences, heads, pieces), dtype=torch.float32)
    kernels = _kernels()
    half = query.dtype.itemsize < 4
    with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]  # Triton launches on the one in use
        kernels.split[(sequences, tiles, pieces)](
            query,
            keys,
            values,
            blocks,
            bases,
            positions,
            query if scores.sinks is None else scores.sinks,
            parts,
            sums,
            *query.stride()[:2],
            *keys.stride()[:3],
            *values.stride()[:3],
            blocks.stride(0),
            blocks.shape[1],
            scores.scale,
            float(scores.softcap or 1.0),
            KIND=_KINDS[kind],
            WINDOW=window,
            BLOCK_TOKENS=block_tokens,
            SHARE=share,
            ROWS=ROWS,
            KEYS=_keys_at_once(head * query.dtype.itemsize, shared),
            DIM=width,
            HEAD=head,
            REST=rest,
            VALUE_DIM=value_width,
            VALUES=max(16, _power_of_2(value_width)),
            SHARED=shared,
            CAPPED=scores.softcap is not None,
            SUNK=scores.sinks is not None,
            WHOLE=pieces == 1,
            WIDEN=_interpreted() and query.dtype is torch.bfloat16,  # which the interpreter cannot multiply
            num_warps=4,
            num_stages=3 if half else 1,  # the next keys, and where those after them lie, are on their way
        )
        if pieces > 1:
            kernels.combine[(sequences * heads,)](
                parts,
                sums,
                out,
                pieces,
                PIECES=PIECES_MOST,
                VALUE_DIM=value_width,
                VALUES=max(16, _power_of_2(value_width)),
                num_warps=4,
            )
    return out


def _columns(width: int) -> tuple[int, int]:
    """Powers of two for the first columns of keys and for the others: 128 and 64 for 192, not 256. No others: 0."""
    head = 1 << (width.bit_length() - 1)
    if head < 16:
        return 16, 0
    rest = width - head
    return head, max(16, _power_of_2(rest)) if rest else 0


def _power_of_2(value: int) -> int:
    """The least one that is not below ``value``."""
    return 1 << (value - 1).bit_length()


def _keys_at_once(key_bytes: int, shared: bool) -> int:
    """Keys that a program reads at a time; values that are ``shared`` with them take no room of their own."""
    room = _TILE_BYTES * 2 if shared else _TILE_BYTES
    return min(128, max(16, room // key_bytes))


def _pieces(programs: int, keys: int, device: torch.device) -> int:
    """Into how many pieces up to ``keys`` keys are cut, so that every processor has two programs."""
    beside = -(-2 * _processors(device) // max(1, programs))
    return max(1, min(beside, keys // PIECE_KEYS_LEAST, PIECES_MOST))


@functools.cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def _interpreted() -> bool:
    """Whether Triton interprets its kernels, on a CPU, instead of compiling them."""
    return os.environ.get("TRITON_INTERPRET", "") == "1"


@functools.cache
def _kernels():  # type: ignore[no-untyped-def]
    from stowage.cuda.paged_attention import kernels

    return kernels
