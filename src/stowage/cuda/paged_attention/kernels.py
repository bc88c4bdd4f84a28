"""Triton kernels of paged attention for single tokens: the two that ``launch`` calls.

    split      one sequence, up to ``ROWS`` of the query heads that share a key head, a piece of the keys that are seen
    combine    one sequence, one query head: its pieces become one answer

Keys are read once, where they lie, with a running maximum (FlashAttention, Dao et al., arXiv:2205.14135; the softmax is
that of Milakov and Gimelshein, arXiv:1805.02867). A sequence's keys are cut into pieces that run beside one another, so
that few sequences fill a GPU too ("Flash-Decoding for long-context inference", Dao, Haziza, Massa and Sizov, 2023).

Whatever changes from step to step is read from tensors of the device: lengths are no arguments, and the grid says how
many pieces there are. A key that no query sees is never loaded, so garbage there cannot matter.

Only ``launch`` imports this; it needs Triton, which is not installed everywhere.
"""

from __future__ import annotations

import triton
import triton.language as tl

FULL, SLIDING, CHUNKED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["query_row", "blocks_row", "blocks_most"],
    do_not_specialize_on_alignment=["blocks", "bases", "positions"],
)
def split(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    blocks: tl.tensor,
    bases: tl.tensor,
    positions: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    sums: tl.tensor,
    query_row: tl.tensor,
    query_head: tl.tensor,
    keys_row: tl.tensor,
    keys_token: tl.tensor,
    keys_head: tl.tensor,
    values_row: tl.tensor,
    values_token: tl.tensor,
    values_head: tl.tensor,
    blocks_row: tl.tensor,
    blocks_most: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    KIND: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    SHARE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
    HEAD: tl.constexpr,
    REST: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUES: tl.constexpr,
    SHARED: tl.constexpr,
    CAPPED: tl.constexpr,
    SUNK: tl.constexpr,
    WHOLE: tl.constexpr,
    WIDEN: tl.constexpr,
) -> None:
    """Strides are in elements; a head's numbers lie side by side. The grid is ``[sequences, kv_heads * tiles,
    pieces]``, where ``tiles`` of ``ROWS`` hold the ``SHARE`` query heads of a key head.

    Keys have ``DIM`` columns, read as the first ``HEAD``, a power of two, and the others, fewer than ``REST`` of them;
    values ``VALUE_DIM`` of up to ``VALUES``. ``SHARED``: they are the first ``HEAD`` columns of keys. ``WHOLE``: there
    is one piece, which goes to ``out`` ``[sequences, heads, VALUE_DIM]``; else ``out`` is float32, ``[sequences, heads,
    pieces, VALUE_DIM]``, and ``sums``, ``[sequences, heads, pieces]``, has the logarithm of each piece's weights.
    ``WIDEN``: products are those of float32.
    """
    tiles: tl.constexpr = (SHARE + ROWS - 1) // ROWS
    sequence = tl.program_id(0).to(tl.int64)
    kv_head = (tl.program_id(1) // tiles).to(tl.int64)
    piece = tl.program_id(2)
    pieces = tl.num_programs(2)
    heads_all = tl.num_programs(1) // tiles * SHARE

    members = tl.program_id(1) % tiles * ROWS + tl.arange(0, ROWS)
    is_member = members < SHARE
    heads = kv_head * SHARE + members
    head_dims = tl.arange(0, HEAD)
    rest_dims = HEAD + tl.arange(0, REST if REST else 1)
    value_dims = tl.arange(0, VALUES)
    rows = query + sequence * query_row + heads[:, None] * query_head
    asked = tl.load(rows + head_dims[None, :], mask=is_member[:, None] & (head_dims < DIM)[None, :], other=0.0)
    if WIDEN:
        asked = asked.to(tl.float32)
    asked_rest = asked
    if REST:
        asked_rest = tl.load(rows + rest_dims[None, :], mask=is_member[:, None] & (rest_dims < DIM)[None, :], other=0.0)
        if WIDEN:
            asked_rest = asked_rest.to(tl.float32)

    # [low, high): which keys are seen, counted from the table's first
    position = tl.load(positions + sequence).to(tl.int64)
    base = tl.load(bases + sequence).to(tl.int64)
    high = tl.minimum(position - base + 1, blocks_most * BLOCK_TOKENS).to(tl.int32)
    low = high * 0
    if KIND == SLIDING:
        low = tl.maximum(position - WINDOW + 1 - base, 0).to(tl.int32)
    if KIND == CHUNKED:
        low = tl.maximum(position // WINDOW * WINDOW - base, 0).to(tl.int32)
    span = tl.cdiv(tl.cdiv(high - low, pieces), KEYS) * KEYS
    begin = low + piece * span
    end = tl.minimum(begin + span, high)

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, VALUES], tl.float32)
    if SUNK:  # one more key, of the first piece: its score is given, its value is 0
        sink = tl.load(sinks + heads, mask=is_member, other=0.0).to(tl.float32)
        top = tl.where(piece == 0, sink, top)
        total = total + tl.where(piece == 0, 1.0, 0.0)
    for start in range(begin, end, KEYS):
        index = start + tl.arange(0, KEYS)
        seen = index < end
        block = tl.load(blocks + sequence * blocks_row + index // BLOCK_TOKENS, mask=seen, other=0).to(tl.int64)
        token = index % BLOCK_TOKENS
        found = keys + block * keys_row + token * keys_token + kv_head * keys_head
        key = tl.load(found[:, None] + head_dims[None, :], mask=seen[:, None] & (head_dims < DIM)[None, :], other=0.0)
        if WIDEN:
            key = key.to(tl.float32)
        scores = tl.dot(asked, tl.trans(key), input_precision="ieee")
        if REST:
            more = seen[:, None] & (rest_dims < DIM)[None, :]
            key_rest = tl.load(found[:, None] + rest_dims[None, :], mask=more, other=0.0)
            if WIDEN:
                key_rest = key_rest.to(tl.float32)
            scores = tl.dot(asked_rest, tl.trans(key_rest), acc=scores, input_precision="ieee")
        scores = scores * scale
        if CAPPED:  # softcap * tanh(scores / softcap)
            scores = softcap * (1.0 - 2.0 / (tl.exp(scores * (2.0 / softcap)) + 1.0))
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        fade = tl.exp(top - higher)
        weights = tl.exp(scores - higher[:, None])
        total = total * fade + tl.sum(weights, 1)
        if SHARED:
            value = key
        else:
            there = values + block * values_row + token * values_token + kv_head * values_head
            whole = seen[:, None] & (value_dims < VALUE_DIM)[None, :]
            value = tl.load(there[:, None] + value_dims[None, :], mask=whole, other=0.0)
            if WIDEN:
                value = value.to(tl.float32)
        mixed = tl.dot(weights.to(value.dtype), value, acc=mixed * fade[:, None], input_precision="ieee")
        top = higher

    answer = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    kept = is_member[:, None] & (value_dims < VALUE_DIM)[None, :]
    row = sequence * heads_all + heads
    if WHOLE:
        tl.store(out + row[:, None] * VALUE_DIM + value_dims[None, :], answer.to(out.dtype.element_ty), mask=kept)
    else:
        row = row * pieces + piece
        tl.store(out + row[:, None] * VALUE_DIM + value_dims[None, :], answer, mask=kept)
        # of a piece without keys: a weight of 0
        logarithm = tl.where(total == 0.0, float("-inf"), top + tl.log(tl.where(total == 0.0, 1.0, total)))
        tl.store(sums + row, logarithm, mask=is_member)


@triton.jit(do_not_specialize=["pieces"])  # type: ignore[untyped-decorator]
def combine(
    parts: tl.tensor,
    sums: tl.tensor,
    out: tl.tensor,
    pieces: tl.tensor,
    PIECES: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUES: tl.constexpr,
) -> None:
    """``out`` ``[rows, VALUE_DIM]`` from ``split``'s ``parts`` ``[rows, pieces, VALUE_DIM]`` and ``sums`` ``[rows,
    pieces]``, at most ``PIECES``; the grid is ``[rows]``: sequences times heads.
    """
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, VALUES)
    each = tl.arange(0, PIECES)
    weights = tl.load(sums + row * pieces + each, mask=each < pieces, other=float("-inf"))
    top = tl.max(weights, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp(weights - top), 0)
    mixed = tl.zeros([VALUES], tl.float32)
    for piece in range(pieces):
        weight = tl.exp(tl.load(sums + row * pieces + piece) - top)
        part = tl.load(parts + (row * pieces + piece) * VALUE_DIM + dims, mask=dims < VALUE_DIM, other=0.0)
        mixed += weight * part
    mixed = mixed / tl.where(total == 0.0, 1.0, total)
    tl.store(out + row * VALUE_DIM + dims, mixed.to(out.dtype.element_ty), mask=dims < VALUE_DIM)
