"""The tables of keys: what they refuse, what they are made of, and how much memory they take."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from stowage.core.table import make_rows, make_slots, rows, slots
from stowage.core.table.rows import EXTENT
from stowage.native import extension, is_built
from tests.flow_setup import keys
from tests.native import needs_native

BOTH = ["Python", pytest.param("C", marks=needs_native)]
MODULES: dict[str, Any] = {"Python": (rows.Rows, slots.Slots)}
if is_built():
    MODULES["C"] = (extension.Rows, extension.Slots)


def joined(names: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(names), "V32")


def fields(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def two_owners(kind: str) -> tuple[Any, dict[int, list[int]]]:
    """Owner 7 with keys 1 and 2, owner 8 with keys 3 to 72, in extents 1 and 2."""
    table = MODULES[kind][0](8)
    extents: dict[int, list[int]] = {7: [], 8: []}
    table.insert(7, extents[7], joined(keys(1, 2)), fields(1, 2))
    table.insert(8, extents[8], joined(keys(*range(3, 73))), fields(*range(3, 73)))
    assert extents == {7: [0], 8: [1, 2]}
    return table, extents


def found(table: Any, *names: int) -> list[tuple[int, int]]:
    owners, values = np.empty(len(names), np.int64), np.empty(len(names), np.int64)
    table.find(keys(*names), owners, values)
    return list(zip(owners.tolist(), values.tolist(), strict=True))


REFUSED: list[tuple[str, type[Exception] | tuple[type[Exception], ...], Callable[[Any], object]]] = [
    ("another owner's extent", ValueError, lambda t: t.insert(7, [1], joined(keys(9)), fields(9))),
    ("an extent that is not there", ValueError, lambda t: t.insert(7, [3], joined(keys(9)), fields(9))),
    ("an extent below 0", ValueError, lambda t: t.insert(7, [-1], joined(keys(9)), fields(9))),
    ("a key without fields", ValueError, lambda t: t.insert(7, [0], joined(keys(9)), fields())),
    ("fields without a key", ValueError, lambda t: t.insert(7, [0], joined(keys(9)), fields(9, 10))),
    ("room for one too few", ValueError, lambda t: t.find(keys(1, 2), np.empty(1, np.int64), fields(0, 0))),
    ("room for one too many", ValueError, lambda t: t.find(keys(1), np.empty(1, np.int64), fields(0, 0))),
    ("what another marked", ValueError, lambda t: t.marked(7, [0, 1])),
    ("another's rows", ValueError, lambda t: t.release(7, [0, 1])),
    ("rows of nobody", ValueError, lambda t: t.release(9, [0])),
]


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(("what", "error", "call"), REFUSED, ids=[what for what, _, _ in REFUSED])
def test_what_rows_refuse_changes_nothing(kind: str, what: str, error: Any, call: Callable[[Any], object]) -> None:
    table, extents = two_owners(kind)
    with pytest.raises(error):
        call(table)
    table.check()
    assert len(table) == 72 and table.extents_used() == 3
    assert found(table, 1, 2, 3, 72, 73) == [(7, 1), (7, 2), (8, 3), (8, 72), (-1, 0)]
    assert table.marked(7, extents[7]) == ([], b"")


ONLY_IN_C: list[tuple[str, type[Exception] | tuple[type[Exception], ...], Callable[[Any], object]]] = [
    ("an owner below 0", ValueError, lambda t: t.insert(-1, [], joined(keys(9)), fields(9))),
    ("an owner that is text", TypeError, lambda t: t.release("7", [0])),
    ("extents in a tuple", TypeError, lambda t: t.insert(7, (0,), joined(keys(9)), fields(9))),
    ("extents in a tuple, to go", TypeError, lambda t: t.release(7, (0,))),
    ("an extent that is text", TypeError, lambda t: t.marked(7, ["0"])),
    ("too few arguments", TypeError, lambda t: t.find(keys(1), np.empty(1, np.int64))),
    ("keys in a tuple", TypeError, lambda t: t.drop(tuple(keys(1)))),
    ("a key that is text", TypeError, lambda t: t.mark([*keys(1), "text"])),
    ("a key that is text, to be found", TypeError, lambda t: t.find(["text"], np.empty(1, np.int64), fields(0))),
    ("half a key", ValueError, lambda t: t.insert(7, [0], b"half a key", fields(9))),
    ("room that cannot be written", (ValueError, BufferError), lambda t: t.find(keys(1), bytes(8), fields(0))),
    ("room with holes", (ValueError, BufferError), lambda t: t.find(keys(1, 2), fields(0, 0, 0, 0)[::2], fields(0, 0))),
    ("no array", TypeError, lambda t: t.insert(7, [0], keys(9), fields(9))),
]


@needs_native
@pytest.mark.parametrize(("what", "error", "call"), ONLY_IN_C, ids=[what for what, _, _ in ONLY_IN_C])
def test_what_no_caller_does_crashes_nothing(what: str, error: Any, call: Callable[[Any], object]) -> None:
    test_what_rows_refuse_changes_nothing("C", what, error, call)


@pytest.mark.parametrize("kind", BOTH)
def test_an_extent_that_is_released_twice_is_released_once(kind: str) -> None:
    table, _ = two_owners(kind)
    with pytest.raises(ValueError, match="not an extent of this owner"):
        table.release(7, [0, 0])
    table.check()
    assert found(table, 1, 3) == [(-1, 0), (8, 3)] and table.extents_used() == 2


@pytest.mark.parametrize("kind", BOTH)
def test_what_is_free_is_used_again_from_the_first_on(kind: str) -> None:
    table, extents = two_owners(kind)
    assert table.release(8, extents[8]) == 70
    again: list[int] = []
    table.insert(9, again, joined(keys(*range(100, 100 + 2 * EXTENT))), fields(*range(2 * EXTENT)))
    assert again == [1, 2] and table.extents_used() == 3
    assert found(table, 1, 3, 100) == [(7, 1), (-1, 0), (9, 0)]
    table.check()


def test_more_rows_than_a_block_of_them_has() -> None:
    """In Python a block has 2^16 rows, in C 2^12. What is found and replaced lies in several."""
    for table in [kind[0](8) for kind in MODULES.values()]:
        extents: list[int] = []
        count = (1 << 16) + 100
        table.insert(1, extents, joined(keys(*range(count))), fields(*range(count)))
        table.insert(2, [], joined(keys(5, count - 1)), fields(-5, -6))
        assert found(table, 5, count - 1, 6, count - 2, count) == [(2, -5), (2, -6), (1, 6), (1, count - 2), (-1, 0)]
        table.mark(keys(7, count - 3))
        assert table.marked(1, extents)[0] == keys(7, count - 3)
        table.check()
        assert table.drop(keys(6, 7, count - 2)) == 3 and table.release(1, extents) == count - 5
        table.check()


@needs_native
def test_keys_with_one_print_are_told_apart() -> None:
    """A print has 32 bits: of so many keys some ten pairs have one, and whoever has it is not who was asked for."""
    there, asked = 300_000, 600_000
    raw = np.random.default_rng(1).bytes(32 * asked)
    names = [raw[at : at + 32] for at in range(0, len(raw), 32)]
    rows_of_all, slots_of_all = MODULES["C"][0](8), MODULES["C"][1](there)
    rows_of_all.insert(0, [], np.frombuffer(raw, "V32", there), np.arange(there))
    slots_of_all.set(names[:there], np.arange(there))
    rows_of_all.mark(names[there - 1 :])
    owners, values, places = (np.empty(asked, np.int64) for _ in range(3))
    rows_of_all.find(names, owners, values)
    slots_of_all.find(names, places)
    assert np.array_equal(values[:there], np.arange(there)) and not owners[:there].any()
    assert (owners[there:] == -1).all() and not values[there:].any()
    assert np.array_equal(places, np.where(np.arange(asked) < there, np.arange(asked), -1))
    marked, _ = rows_of_all.marked(0, list(range(-(-there // EXTENT))))
    assert marked == names[there - 1 : there]


@needs_native
def test_others_run_during_a_large_batch_and_are_kept_out() -> None:
    """Without their owner's lock they are told so; nothing is damaged."""
    table = extension.Rows(8)
    done, told = threading.Event(), threading.Event()
    odd: list[object] = []

    def look() -> None:
        while not done.is_set():
            try:
                odd.extend(pair for pair in found(table, 1, 99_999) if pair[1] not in (0, 1))
            except RuntimeError:
                told.set()

    thread = threading.Thread(target=look)
    thread.start()
    until_s = time.monotonic() + 120
    try:
        while not told.is_set() and time.monotonic() < until_s:
            extents: list[int] = []
            table.insert(1, extents, joined(keys(*range(50_000))), np.arange(50_000))
            thread.join(0.001)
            table.check()
            assert table.release(1, extents) == 50_000
    finally:
        done.set()
        thread.join()
    assert told.is_set() and not odd


@needs_native
def test_rows_and_slots_are_made_of_sizes_in_range() -> None:
    kernel = extension
    for width in (-8, 0, 12, 1 << 20):
        with pytest.raises(ValueError, match="width"):
            kernel.Rows(width)
    for bits, depth in ((0, 20), (17, 20), (12, 21), (12, -1)):
        with pytest.raises(ValueError, match="bits"):
            kernel.Rows(8, bits, depth)
        with pytest.raises(ValueError, match="bits"):
            kernel.Slots(8, bucket_bits=bits, depth_max=depth)
    for count in (-1, 1 << 31):
        with pytest.raises(ValueError, match="slots"):
            kernel.Slots(count)


@pytest.mark.parametrize("kind", BOTH)
def test_what_slots_refuse(kind: str) -> None:
    table = MODULES[kind][1](4)
    table.set(keys(1, 2), np.array([0, 3]))
    for names, numbers in (([], [1]), (keys(3), [])):
        with pytest.raises(ValueError, match=r"length|shorter|longer"):
            table.set(names, np.array(numbers, np.int64))
    with pytest.raises(KeyError):
        table.drop(keys(1, 9))
    assert table.items() == [(keys(2)[0], 3)] and len(table) == 1
    table.check()


def some_orders() -> dict[str, tuple[list[int], list[int]]]:
    """In which slots 300 keys lie, and in what order they are asked for; a key of 300 or more is absent."""
    up = list(range(300))
    mixed = np.random.default_rng(0).permutation(300).tolist()
    return {
        "one behind the other": (up, up),
        "one before the other": (up[::-1], up),
        "asked backwards": (up, up[::-1]),
        "in pieces of both directions": ([*up[100:200], *up[99::-1], *up[200:]], up),
        "anywhere": (mixed, up),
        "asked in any order": (up, mixed),
        "absent ones between": (up, [*up[:70], 300, 301, *up[70:150], *range(302, 500), *up[150:]]),
        "asked twice": (up, [*up[:80], *up[:80], 5, 5, 5, *up]),
    }


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(("lie", "asked"), some_orders().values(), ids=some_orders())
def test_slots_are_found_however_they_lie(kind: str, lie: list[int], asked: list[int]) -> None:
    """One key of ten has left its slot; of these slots every other one is another key's."""
    table = MODULES[kind][1](300)
    table.set(keys(*range(300)), np.array(lie))
    slot_of = dict(zip(range(300), lie, strict=True))
    left = list(range(0, 300, 10))
    table.drop(keys(*left))
    table.set(keys(*range(1000, 1015)), np.array([slot_of[name] for name in left[::2]]))
    found_slots = np.empty(len(asked) + 2, np.int64)
    table.find([*keys(*asked), b"short", *keys(1001)], found_slots)
    expected = [-1 if name % 10 == 0 else slot_of.get(name, -1) for name in asked]
    assert found_slots.tolist() == [*expected, -1, slot_of[20]]


@needs_native
def test_slots_that_are_not_there_or_not_free_are_refused() -> None:
    table = extension.Slots(4)
    table.set(keys(1, 2), np.array([0, 3]))
    for slot in (-1, 4, 1 << 40):
        with pytest.raises(IndexError):
            table.set(keys(5), np.array([slot]))
    with pytest.raises(ValueError, match="another key leads to slot 3"):
        table.set(keys(5), np.array([3]))
    with pytest.raises(ValueError, match="32 bytes"):
        table.set([b"short"], np.array([1]))
    with pytest.raises(TypeError):
        table.slot_of("text")
    with pytest.raises(KeyError):
        table.drop([b"short"])
    table.set(keys(2), np.array([3]))
    assert table.items() == [(keys(1)[0], 0), (keys(2)[0], 3)]
    table.check()


def test_two_keys_with_one_slot_are_found_by_the_check() -> None:
    table = slots.Slots(4)
    table.set(keys(1, 2), np.array([0, 0]))
    with pytest.raises(AssertionError, match="two keys lead to one slot"):
        table.check()


def break_rows(table: Any, name: str, place: int, value: Any) -> None:
    getattr(table._blocks[0], name)[place] = value


DAMAGE: list[tuple[str, Callable[[Any], object]]] = [
    ("a live row that was never written", lambda t: break_rows(t, "live", 2, True)),
    ("a live row that no key leads to", lambda t: break_rows(t, "keys", 1, np.void(bytes(32)))),
    ("a key whose row is not live", lambda t: break_rows(t, "live", 1, False)),
    ("a free extent that is in use, or lost", lambda t: t._free.append(0)),
    ("a free extent that is in use, or lost", lambda t: break_rows(t, "owner", 0, -1)),
]


@pytest.mark.parametrize(("says", "damage"), DAMAGE)
def test_the_check_of_rows_finds(says: str, damage: Callable[[Any], object]) -> None:
    table, _ = two_owners("Python")
    table.check()
    damage(table)
    with pytest.raises(AssertionError, match=f"^{says}$"):
        table.check()


def test_the_kernel_is_chosen_unless_it_is_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = MODULES.get("C", MODULES["Python"])
    for wanted in ("", "0"):
        monkeypatch.setenv("STOWAGE_PURE_PYTHON", wanted)
        assert type(make_rows(8)) is quick[0] and type(make_slots(8)) is quick[1]
    monkeypatch.delenv("STOWAGE_PURE_PYTHON")
    assert type(make_rows(8)) is quick[0]
    monkeypatch.setenv("STOWAGE_PURE_PYTHON", "1")
    assert type(make_rows(8)) is rows.Rows and type(make_slots(8)) is slots.Slots
    monkeypatch.delenv("STOWAGE_PURE_PYTHON")
    monkeypatch.setattr("stowage.native.extension", None)
    assert type(make_rows(8)) is rows.Rows and type(make_slots(8)) is slots.Slots


MEASURE = """
import numpy as np
from stowage.storage.disk.index import Columns, Index, _FIELDS
resident = lambda: int(open("/proc/self/statm").read().split()[1]) * 4096
index, chance, count = Index(), np.random.default_rng(0), 400_000
columns = [Columns(np.frombuffer(chance.bytes(32 * 4000), "V32"), np.ones(4000, _FIELDS)) for _ in range(count // 4000)]
before = resident()
for number, some in enumerate(columns):
    index.insert(number, some)
assert len(index) == count
print((resident() - before) / count)
"""


@needs_native
def test_a_chunk_takes_less_than_150_bytes_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STOWAGE_PURE_PYTHON", raising=False)
    answer = subprocess.run([sys.executable, "-c", MEASURE], check=True, capture_output=True, text=True).stdout
    assert 64 <= float(answer) < 150, answer
