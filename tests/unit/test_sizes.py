"""What the chunk in each slot holds, with one group and with several."""

from __future__ import annotations

import numpy as np
import pytest

from stowage.core.geometry import Group, Kind
from stowage.core.sizes import Sizes

FULL = Group(0, Kind.FULL, 16, 4, 1024)
SLIDING = Group(1, Kind.SLIDING, 16, 2, 512, window=32)


@pytest.mark.parametrize("count", [0, 3, 1024, 1025, 3000])
def test_with_one_group_all_are_alike(count: int) -> None:
    sizes = Sizes([FULL], 4000)
    slots = np.arange(count)
    sizes.taken(slots, 0)
    each, total = sizes.of(slots)
    assert each.tolist() == [4096] * count and total == 4096 * count
    assert sizes.full_masks(slots).tolist() == [0b1111] * count and sizes.of_group(0) == 4096


def test_with_several_groups_a_slot_is_as_large_as_it_was_taken_for() -> None:
    sizes = Sizes([FULL, SLIDING], 4)
    sizes.taken(np.array([3, -1, 1]), 1)
    sizes.taken(np.array([-1]), 1)
    each, total = sizes.of(np.arange(4))
    assert each.tolist() == [4096, 1024, 4096, 1024] and total == 10240
    assert sizes.full_masks(np.array([1, 2])).tolist() == [0b11, 0b1111]
    sizes.taken(np.array([3, -1]), 0)
    assert sizes.of(np.array([3, 1]))[0].tolist() == [4096, 1024], "the last slot is not what -1 names"
    sizes.taken(np.array([2, -1]), 1)
    assert sizes.of(np.array([3]))[1] == 4096
    assert (sizes.of_group(0), sizes.of_group(1)) == (4096, 1024)
