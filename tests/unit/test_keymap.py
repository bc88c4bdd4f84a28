"""The key map by itself: what replaces what, and batches that do not fit together."""

from __future__ import annotations

import numpy as np
import pytest

from stowage.cache.keymap import KeyMap, present_slots
from tests.flow_setup import keys


def two_replaced() -> KeyMap:
    """Keys 1 and 2 in slots 0 and 1, to be replaced by slots 2 and 3."""
    table = KeyMap(8)
    assert table.add_or_replace(keys(1, 2), np.array([0, 1]), all_new=True)
    assert table.add_or_replace(keys(1, 2), np.array([2, 3]), all_new=False)
    table.check()
    return table


def test_a_replacement_is_in_no_look_up_until_it_takes_the_place() -> None:
    table = two_replaced()
    assert table.find(keys(1, 2, 3)).tolist() == [0, 1, -1]
    assert table.find_replacements(keys(1, 2, 3)).tolist() == [2, 3, -1]
    assert table.replace(keys(2), np.array([3])).tolist() == [1]
    assert table.find(keys(1, 2)).tolist() == [0, 3] and table.find_replacements(keys(1, 2)).tolist() == [2, -1]
    assert table.replace(keys(2), np.array([3])).tolist() == [], "it is no replacement any more"
    table.check()


def test_a_replacement_takes_the_place_of_what_is_gone() -> None:
    table = two_replaced()
    table.forget(keys(1))
    assert table.replace(keys(1, 2), np.array([2, 3])).tolist() == [1]
    assert table.find(keys(1, 2)).tolist() == [2, 3]
    table.check()


def test_what_is_withdrawn_leaves_what_it_would_have_replaced() -> None:
    table = two_replaced()
    others = table.withdraw(keys(1, 2, 3), np.array([2, 1, 7]))
    assert others.tolist() == [1, 7] and others.dtype == np.int64
    assert table.find(keys(1, 2)).tolist() == [0, 1] and table.find_replacements(keys(1, 2)).tolist() == [-1, 3]
    assert not table.has_none(keys(9)), "not looked into while there are replacements"
    assert table.withdraw(keys(2), np.array([3])).dtype == np.int64
    assert table.has_none(keys(9)) and not table.has_none(keys(9, 1))


def test_batches_that_do_not_fit_together_are_refused() -> None:
    for change in (two_replaced().replace, two_replaced().withdraw):
        for names, slots in ((keys(1, 2), [2]), (keys(1), [2, 3])):
            with pytest.raises(ValueError, match=r"shorter|longer"):
                change(names, np.array(slots))


def test_taken_are_those_that_are_slots() -> None:
    assert present_slots(np.array([3, -1, 0, -1])).tolist() == [3, 0]
    whole = np.array([3, 0])
    assert present_slots(whole) is whole and present_slots(np.array([-1])).tolist() == []
