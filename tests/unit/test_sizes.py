"""What the chunk in each slot holds, with one group and with several."""

from __future__ import annotations

import numpy as np
import pytest

from stowage.cache.slot_sizes import Sizes
from stowage.core.geometry import Group, Kind

FULL = Group(0, Kind.FULL, 16, 4, 1024)
SLIDING = Group(1, Kind.SLIDING, 16, 2, 512, window=32)


@pytest.mark.parametrize("count", [0, 3, 1024, 1025, 3000])
def test_with_one_group_all_are_alike(count: int) -> None:
    sizes = Sizes([FULL], 4000)
    slots = np.arange(count)
    sizes.assign(slots, 0)
    each, total = sizes.of(slots)
    assert each.tolist() == [4096] * count and total == 4096 * count
    masks = sizes.full_masks(slots)
    assert masks.tolist() == [0b1111] * count and sizes.of_group(0) == sizes.least == 4096
    assert each.dtype == np.int64 and masks.dtype == np.uint64


def test_what_many_share_cannot_be_changed() -> None:
    sizes = Sizes([FULL], 4000)
    for shared in (sizes.of(np.arange(1024))[0], sizes.full_masks(np.arange(1024))):
        with pytest.raises(ValueError, match="read-only"):
            shared[0] = 7


def test_a_full_mask_of_64_blocks_is_a_number_without_a_sign() -> None:
    wide = [Group(0, Kind.FULL, 1, 64, 64), Group(1, Kind.SLIDING, 1, 64, 32, window=2)]
    for sizes in (Sizes(wide[:1], 2), Sizes(wide, 2)):
        assert sizes.full_masks(np.array([1])).tolist() == [2**64 - 1]


def test_with_several_groups_a_slot_is_as_large_as_it_was_taken_for() -> None:
    sizes = Sizes([FULL, SLIDING], 4)
    sizes.assign(np.array([3, -1, 1]), 1)
    sizes.assign(np.array([-1]), 1)
    each, total = sizes.of(np.arange(4))
    assert each.tolist() == [4096, 1024, 4096, 1024] and total == 10240
    assert sizes.full_masks(np.array([1, 2])).tolist() == [0b11, 0b1111]
    sizes.assign(np.array([3, -1]), 0)
    assert sizes.of(np.array([3, 1]))[0].tolist() == [4096, 1024], "the last slot is not what -1 names"
    sizes.assign(np.array([2, -1]), 1)
    assert sizes.of(np.array([3]))[1] == 4096
    assert (sizes.of_group(0), sizes.of_group(1), sizes.least) == (4096, 1024, 1024)
    sizes.assign(np.array([0]), 1)
    assert sizes.of(np.array([0]))[1] == 1024, "the first slot is a slot"
    assert sizes.of(np.array([0]))[0].dtype == np.int64 and sizes.full_masks(np.array([0])).dtype == np.uint64


def test_a_group_without_bytes_takes_one() -> None:
    """For whoever divides by it."""
    assert Sizes([Group(0, Kind.FULL, 16, 4, 0)], 4).least == 1
