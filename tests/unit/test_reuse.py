"""The longest common boundary: hybrids, hits in the middle of a stored conversation (F10), and the edges."""

from __future__ import annotations

import numpy as np
import pytest

from stowage.core.geometry import Geometry, Group, Kind
from stowage.core.groups import GroupStrategy, strategy
from stowage.core.reuse import longest_boundary

Masks = np.ndarray[tuple[int, ...], np.dtype[np.uint64]]


def masks(*values: int) -> Masks:
    return np.array(values, dtype=np.uint64)


def full(block_tokens: int = 16, blocks_per_chunk: int = 4) -> GroupStrategy:
    return strategy(Group(0, Kind.FULL, block_tokens, blocks_per_chunk, 1))


@pytest.mark.parametrize("prompt_tokens", [0, 1, 16])
def test_short_prompts_have_nothing_to_reuse(prompt_tokens: int) -> None:
    assert longest_boundary([full()], [masks(0b1111)], prompt_tokens, 16) == 0


def test_the_last_token_is_always_computed() -> None:
    stored = [masks(0b1111, 0b1111)]
    assert longest_boundary([full()], stored, 64, 16) == 48
    assert longest_boundary([full()], stored, 65, 16) == 64
    assert longest_boundary([full()], stored, 129, 16) == 128
    assert longest_boundary([full()], stored, 10_000, 16) == 128


def test_nothing_stored_is_boundary_zero() -> None:
    assert longest_boundary([full()], [masks()], 1000, 16) == 0


def test_f10_a_shared_prefix_that_ends_inside_a_stored_conversation() -> None:
    """All chunks of attention were stored, snapshots every 128 tokens; the new prompt shares 330 tokens, 5 chunks."""
    groups = (
        Group(0, Kind.FULL, 16, 4, 1),
        Group(1, Kind.SLIDING, 16, 4, 1, window=100),
        Group(2, Kind.CHUNKED, 16, 4, 1, window=96),
        Group(3, Kind.RECURRENT, 16, 1, 1),
    )
    strategies = [strategy(group) for group in groups]
    snapshots = np.zeros(20, dtype=np.uint64)
    snapshots[7::8] = 1  # after 128 and 256 tokens
    stored = [masks(*[0b1111] * 5)] * 3
    assert longest_boundary(strategies, [*stored, snapshots], 1000, 16) == 256
    assert longest_boundary(strategies[:3], stored, 1000, 16) == 320
    only_last_window = [stored[0], masks(0, 0, 0, 0b1110, 0b1111), stored[2]]
    assert longest_boundary(strategies[:3], only_last_window, 1000, 16) == 320
    hole = [stored[0], masks(0, 0, 0, 0b1100, 0b1111), stored[2]]
    assert longest_boundary(strategies[:3], hole, 1000, 16) == 0
    assert longest_boundary([strategies[1]], [hole[1]], 1000, 16) == 0


def test_groups_of_different_blocks_meet_at_common_multiples() -> None:
    geometry = Geometry((Group(0, Kind.FULL, 16, 4, 1), Group(1, Kind.RECURRENT, 528, 1, 1)))
    strategies = [strategy(group) for group in geometry.groups]
    stored = [np.full(40, 0b1111, dtype=np.uint64), masks(1, 0, 1)]
    step = geometry.boundary_tokens
    assert longest_boundary(strategies, stored, 2000, step) == 1584
    assert longest_boundary(strategies, stored, 1584, step) == 528
    assert longest_boundary(strategies, [stored[0][:8], stored[1]], 2000, step) == 0
    assert longest_boundary(strategies, [stored[0][:9], stored[1]], 2000, step) == 528


def test_the_masks_are_not_written_to() -> None:
    stored = masks(0b1111, 0b0111)
    stored.flags.writeable = False
    assert longest_boundary([full(), full()], [stored, stored], 1000, 16) == 112


def test_a_boundary_right_before_the_last_token() -> None:
    assert longest_boundary([full()], [masks(0b1111)], 17, 16) == 16


def test_masks_of_other_groups_than_asked_for_are_a_bug() -> None:
    for strategies, stored in (([], []), ([full()], []), ([full()], [masks(1), masks(1)])):
        with pytest.raises(AssertionError):
            longest_boundary(strategies, stored, 100, 16)
