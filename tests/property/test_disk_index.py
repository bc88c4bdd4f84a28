"""The disk tier's index against the obvious model, for any order of events."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from stowage.core.geometry import PAGE_BYTES
from stowage.storage.disk.index import Columns, Index
from stowage.storage.format import segment
from stowage.storage.format.envelope import pack_fields
from stowage.storage.format.segment import Entries

KEYS = [bytes([n]) * 32 for n in range(8)]
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("insert"), st.integers(0, 3), st.lists(st.integers(0, 7), max_size=6)),
        st.tuples(st.just("drop"), st.lists(st.integers(0, 7), max_size=3)),
        st.tuples(st.just("drop segment"), st.integers(0, 3)),
        st.tuples(st.just("hit"), st.lists(st.integers(0, 7), max_size=4)),
        st.tuples(st.just("drop record"), st.integers(0, 7), st.booleans()),
    ),
    max_size=40,
)


def entries(keys: list[bytes], numbers: NDArray[np.int64]) -> Entries:
    """As they come out of a footer; the numbers are masks, tenths of lengths, pages and digests."""
    headers = [
        pack_fields(key, bytes(32), n, n * 10) + 2 * n.to_bytes(8, "little")
        for key, n in zip(keys, numbers.tolist(), strict=True)
    ]
    raw = b"".join(
        header + (n * PAGE_BYTES).to_bytes(8, "little") for header, n in zip(headers, numbers.tolist(), strict=True)
    )
    return np.frombuffer(raw, segment._ENTRY)


@given(EVENTS)
def test_the_newest_record_that_is_left_is_found(events: list[tuple[object, ...]]) -> None:
    index = Index()
    model: dict[int, tuple[int, int]] = {}  # key -> segment, record number
    hit: set[int] = set()  # record numbers
    ends: dict[int, int] = {}  # segment -> where its last chunk ends
    number = 0
    for event in events:
        match event:
            case ("insert", int(owner), list(names)):
                count = len(names)
                numbers = np.arange(number + 1, number + 1 + count)
                index.insert(owner, Columns.of(entries([KEYS[name] for name in names], numbers)))
                for name, record in zip(names, numbers.tolist(), strict=True):
                    model[name] = (owner, record)
                number += count
                if count:
                    ends[owner] = max(ends.get(owner, 0), number * PAGE_BYTES + number * 10)
            case ("drop", list(names)):
                index.drop([KEYS[name] for name in names])
                for name in names:
                    model.pop(name, None)
            case ("drop segment", int(segment)):
                index.drop_segment(segment)
                ends.pop(segment, None)
                model = {name: record for name, record in model.items() if record[0] != segment}
            case ("hit", list(names)):
                index.mark_hits([KEYS[name] for name in names])
                hit |= {model[name][1] for name in names if name in model}
            case ("drop record", int(name), bool(newest)):
                segment, record = model.get(name, (0, 1))
                index.drop_record(KEYS[name], segment, 4096 * (record if newest else record + 1))
                if newest:
                    model.pop(name, None)
        index.check()
    assert len(index) == len(model) and index.filled_bytes == sum(ends.values())
    found = index.find(KEYS)
    for name in range(8):
        segment, record = model.get(name, (-1, 0))
        assert found.segments[name] == segment and found.masks[name] == record == index.masks(KEYS)[name]
        if record:
            assert (found.offsets[name], found.lengths[name]) == (record * 4096, record * 10)
            assert found.digests[name].tolist() == [record, record]
    for segment in range(4):
        keys, places = index.hits(segment)
        expected = [(KEYS[name], at[1]) for name, at in model.items() if at[0] == segment and at[1] in hit]
        assert sorted(zip(keys, places.masks.tolist(), strict=True)) == sorted(expected)
