"""What each kind of group needs, stores, resumes and frees, on examples that can be checked by hand."""

from __future__ import annotations

import numpy as np
import pytest

from stowage.core.geometry import NULL_BLOCK, Group, Kind
from stowage.core.groups import Chunked, Full, Recurrent, Sliding, snapshot_spacing, strategy
from stowage.core.groups.base import expand_masks, pack_masks


def paged(kind: Kind, window: int = 0, block_tokens: int = 4, blocks_per_chunk: int = 2) -> Group:
    return Group(0, kind, block_tokens, blocks_per_chunk, 1, window)


FULL = strategy(paged(Kind.FULL))
RECURRENT = strategy(paged(Kind.RECURRENT, block_tokens=4, blocks_per_chunk=1))


def masks(*values: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
    return np.array(values, dtype=np.uint64)


def test_each_kind_has_its_strategy() -> None:
    kinds = {Kind.FULL: Full, Kind.SLIDING: Sliding, Kind.CHUNKED: Chunked}
    for kind, cls in kinds.items():
        assert isinstance(strategy(paged(kind, 0 if kind is Kind.FULL else 8)), cls)
    assert isinstance(RECURRENT, Recurrent)


@pytest.mark.parametrize(
    ("window", "boundary", "blocks", "chunks"),
    [
        (1, 16, range(4, 4), range(2, 2)),  # the query sees only itself
        (2, 16, range(3, 4), range(1, 2)),  # token 15
        (5, 16, range(3, 4), range(1, 2)),  # tokens 12..15: one block exactly
        (6, 16, range(2, 4), range(1, 2)),  # token 11 too
        (9, 16, range(2, 4), range(1, 2)),
        (10, 16, range(1, 4), range(2)),
        (1000, 16, range(4), range(2)),
        (6, 12, range(1, 3), range(2)),  # a boundary inside chunk 1
        (6, 4, range(1), range(1)),
        (6, 0, range(0), range(0)),
    ],
)
def test_sliding_needs_the_last_window_less_one_token(window: int, boundary: int, blocks: range, chunks: range) -> None:
    sliding = strategy(paged(Kind.SLIDING, window))
    assert sliding.needed_blocks(boundary) == blocks
    assert sliding.needed(boundary) == chunks


@pytest.mark.parametrize(
    ("window", "boundary", "blocks", "chunks"),
    [
        (8, 0, range(0), range(0)),
        (8, 4, range(1), range(1)),
        (8, 8, range(2, 2), range(1, 1)),  # a fresh attention chunk needs nothing
        (8, 12, range(2, 3), range(1, 2)),
        (16, 24, range(4, 6), range(2, 3)),
        (6, 16, range(3, 4), range(1, 2)),  # attention chunks off the blocks: tokens 12..15
        (6, 20, range(4, 5), range(2, 3)),  # tokens 18, 19
        (5, 24, range(5, 6), range(2, 3)),
        (1000, 24, range(6), range(3)),
    ],
)
def test_chunked_needs_the_current_attention_chunk(window: int, boundary: int, blocks: range, chunks: range) -> None:
    chunked = strategy(paged(Kind.CHUNKED, window))
    assert list(chunked.needed_blocks(boundary)) == list(blocks)
    assert list(chunked.needed(boundary)) == list(chunks)


def test_full_needs_everything_and_recurrent_one_snapshot() -> None:
    assert [FULL.needed_blocks(b) for b in (0, 4, 12)] == [range(0), range(1), range(3)]
    assert [FULL.needed(b) for b in (0, 4, 12)] == [range(0), range(1), range(2)]
    assert [RECURRENT.needed(b) for b in (0, 4, 12)] == [range(0), range(1), range(2, 3)]
    assert RECURRENT.needed_blocks(12) == range(2, 3)


def test_a_boundary_inside_a_block_is_a_bug() -> None:
    for kind in (FULL, RECURRENT):
        with pytest.raises(AssertionError):
            kind.needed(6)
        with pytest.raises(AssertionError):
            kind.resume_points(masks(1), 8, 6)


def test_first_live_block() -> None:
    sliding, chunked = strategy(paged(Kind.SLIDING, 6)), strategy(paged(Kind.CHUNKED, 8))
    assert [sliding.first_live_block(p) for p in (0, 5, 8, 9, 12, 13)] == [0, 0, 0, 1, 1, 2]
    assert [chunked.first_live_block(p) for p in (0, 7, 8, 15, 16)] == [0, 0, 2, 2, 4]
    assert [FULL.first_live_block(p) for p in (0, 1000)] == [0, 0]
    assert [RECURRENT.first_live_block(p) for p in (0, 1000)] == [0, 0]


def test_storable_chunks_carry_the_blocks_still_held() -> None:
    table = np.array([NULL_BLOCK, 7, NULL_BLOCK, NULL_BLOCK, 5, 6, 8, NULL_BLOCK], dtype=np.int64)
    chunks, valid = FULL.storable(24, 0, table)
    assert (chunks.tolist(), valid.tolist()) == ([0, 2], [0b10, 0b11])
    assert (chunks.dtype.name, valid.dtype.name) == ("int64", "uint64")
    assert FULL.storable(23, 0, table)[0].tolist() == [0]
    assert FULL.storable(32, 3, table)[1].tolist() == [0b01]
    assert FULL.storable(32, 4, table)[0].tolist() == []
    assert FULL.storable(0, 0, table)[0].tolist() == []
    assert FULL.storable(48, 2, table[:5])[1].tolist() == [0b01]
    snapshots, valid = RECURRENT.storable(19, 1, table)
    assert (snapshots.tolist(), valid.tolist()) == ([1], [1])


def test_a_boundary_inside_a_chunk_is_served_by_its_leading_blocks() -> None:
    assert FULL.resume_points(masks(0b11, 0b01), 16, 4).tolist() == [True, True, True, True, False]
    assert FULL.resume_points(masks(0b11, 0b10), 16, 4).tolist() == [True, True, True, False, False]
    sliding = strategy(paged(Kind.SLIDING, 5))
    assert sliding.resume_points(masks(0, 0b10), 16, 4).tolist() == [True, False, False, False, True]
    assert sliding.resume_points(masks(0, 0b01), 19, 4).tolist() == [True, False, False, True, False]


def test_windows_that_need_nothing_resume_anywhere() -> None:
    assert strategy(paged(Kind.SLIDING, 1)).resume_points(masks(), 13, 4).tolist() == [True] * 4
    assert strategy(paged(Kind.CHUNKED, 8)).resume_points(masks(), 17, 4).tolist() == [True, False, True, False, True]
    assert strategy(paged(Kind.CHUNKED, 3)).resume_points(masks(), 12, 4).tolist() == [True, False, False, True]


def test_recurrent_resumes_exactly_at_its_snapshots() -> None:
    present = masks(0, 1, 0, 0, 1)
    assert RECURRENT.resume_points(present, 20, 4).tolist() == [True, False, True, False, False, True]
    assert RECURRENT.resume_points(present, 20, 8).tolist() == [True, True, False]
    assert RECURRENT.resume_points(present, 40, 4).tolist()[6:] == [False] * 5
    assert RECURRENT.resume_points(masks(), 3, 4).tolist() == [True]


def test_a_mask_uses_all_64_bits() -> None:
    wide = strategy(paged(Kind.FULL, block_tokens=1, blocks_per_chunk=64))
    full, topless = (1 << 64) - 1, (1 << 63) - 1
    assert np.flatnonzero(~wide.resume_points(masks(full, topless), 128, 1)).tolist() == [128]
    chunks, valid = wide.storable(128, 0, np.where(np.arange(128) == 127, NULL_BLOCK, np.arange(128)))
    assert (chunks.tolist(), valid.tolist()) == ([0, 1], [full, topless])


@pytest.mark.parametrize("per_chunk", [1, 3, 8, 63, 64])
def test_masks_expand_and_pack(per_chunk: int) -> None:
    values = np.random.default_rng(0).integers(0, 1 << 64, 9, dtype=np.uint64)
    blocks = expand_masks(values, per_chunk)
    wanted = [bool(int(value) >> bit & 1) for value in values for bit in range(per_chunk)]
    assert blocks.tolist() == wanted
    assert pack_masks(blocks, per_chunk).tolist() == [int(value) & ((1 << per_chunk) - 1) for value in values]
    assert expand_masks(masks(), per_chunk).tolist() == []


def test_no_chunks_to_store_have_the_same_types_as_some() -> None:
    for progress in (0, 7, 8):
        chunks, valid = FULL.storable(progress, 1, np.arange(2))
        assert (chunks.tolist(), valid.tolist()) == ([], [])
        assert (chunks.dtype.name, valid.dtype.name) == ("int64", "uint64")


def test_snapshots_are_no_further_apart_than_wanted() -> None:
    """Multiples of the grid, rounded down: 720 would lose a shared part of 700 tokens that 480 finds."""
    assert [snapshot_spacing(wanted, 240) for wanted in (512, 480, 240, 100)] == [480, 480, 240, 240]
