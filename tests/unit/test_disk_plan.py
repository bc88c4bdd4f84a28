"""What is read next, and what is written next: every chunk once, in order, in pieces of bounded size."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stowage.core.geometry import round_up
from stowage.storage.disk.index import LookupResult
from stowage.storage.disk.read_plan import GAP_BYTES_MAX, RUN_BYTES_MAX, RUN_BYTES_MIN, Plan, Run, make_plan
from stowage.storage.disk.write_queue import WriteQueue
from stowage.storage.format.protection import NO_MARK, Protection
from stowage.storage.format.segment import SegmentName
from stowage.storage.protocol import Transfer

KIB = 1 << 10
GUARD = Protection().guard(bytes(8), NO_MARK)
assert GUARD is not None
Place = tuple[int, int, int]
"""Segment, offset, length."""


def found_at(places: list[Place]) -> LookupResult:
    segments, offsets, lengths = (np.array(column, np.int64) for column in zip(*places, strict=True))
    masks = np.arange(1, len(places) + 1).astype(np.uint64)
    return LookupResult(
        segments, offsets, lengths, masks, np.stack((masks, masks + np.uint64(100)), axis=1), masks == 0
    )


def planned(places: list[Place], readers: int = 4, rest: Plan | None = None, first: int = 0) -> Plan:
    """Chunks whose positions are numbered from `first` on. There is no segment 9."""
    here = np.arange(first, first + len(places))
    known = lambda segment: None if segment == 9 else (SegmentName(segment, bytes(8)), GUARD)  # noqa: E731
    return make_plan(here, found_at(places), known, readers, rest)


def runs_of(plan: Plan, count: int) -> list[Run]:
    keys = [bytes([at]) for at in range(count)]
    buffers = [memoryview(bytes([at])) for at in range(count)]
    runs = []
    while len(plan):
        runs.append(plan.take(keys, buffers))
    return runs


PLACES = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 40), st.sampled_from([100, 4 * KIB, 60 * KIB, 900 * KIB, 5000 * KIB])),
    min_size=1,
    max_size=25,
)


@given(wanted=PLACES, readers=st.integers(1, 16), gaps=st.lists(st.integers(0, 40), min_size=25, max_size=25))
def test_every_chunk_is_in_one_run_in_the_order_of_the_disk(wanted: list[Place], readers: int, gaps: list[int]) -> None:
    ends = [0, 0, 0]
    places = []
    for (segment, _, length), gap in zip(wanted, gaps, strict=False):
        offset = ends[segment] + gap * 4 * KIB
        places.append((segment, offset, length))
        ends[segment] = offset + round_up(length)
    order = np.random.default_rng(len(places)).permutation(len(places)).tolist()
    places = [places[at] for at in order]
    runs = runs_of(planned(places, readers), len(places))
    positions = [position for run in runs for position in run.positions]
    assert sorted(positions) == list(range(len(places)))
    assert [places[at][:2] for at in positions] == sorted(place[:2] for place in places)
    for run in runs:
        assert len({places[at][0] for at in run.positions}) == 1 and run.name.sequence == run.segment
        assert [(run.segment, *rest) for rest in zip(run.offsets, run.lengths, strict=True)] == [
            places[at] for at in run.positions
        ]
        assert run.masks == [at + 1 for at in run.positions] and run.digests[:, 0].tolist() == run.masks
        assert run.keys == [bytes([at]) for at in run.positions] == [bytes(buffer) for buffer in run.buffers]
        assert run.bounds[0] == 0 and run.bounds[-1] == len(run) and all(a < b for a, b in pairwise(run.bounds))
        stretches = [run.part(*bounds) for bounds in pairwise(run.bounds)]
        for stretch in stretches:
            assert len(stretch) == 1 or stretch.end - stretch.offsets[0] <= RUN_BYTES_MAX + 4 * KIB
            ends_of = [
                offset + round_up(length) for offset, length in zip(stretch.offsets, stretch.lengths, strict=True)
            ]
            assert all(
                0 <= after - end <= GAP_BYTES_MAX for end, after in zip(ends_of, stretch.offsets[1:], strict=False)
            )
        for before, after in pairwise(stretches):
            assert after.offsets[0] - before.end > GAP_BYTES_MAX, "what lies together is read together"
        if len(stretches) > 1:
            assert sum(stretch.end - stretch.offsets[0] for stretch in stretches) <= RUN_BYTES_MIN


def test_scattered_chunks_share_a_run_unless_every_reader_can_have_one() -> None:
    places = [(0, at * 1024 * KIB, 64 * KIB) for at in range(64)]
    assert [len(run) for run in runs_of(planned(places, readers=2), 64)] == [16] * 4, "1 MiB each"
    assert [len(run) for run in runs_of(planned(places, readers=16), 64)] == [4] * 16
    assert [len(run) for run in runs_of(planned(places[:8], readers=16), 8)] == [1] * 8


def test_what_comes_later_is_planned_with_what_is_left() -> None:
    """Every second chunk first: when one was taken the others come, and all are read in stretches."""
    every_second = [(0, 128 * KIB * 2 * at, 128 * KIB) for at in range(16)]
    plan = planned(every_second, readers=16)
    keys, buffers = [b""] * 32, [memoryview(b"")] * 32
    (taken,) = plan.take(keys, buffers).positions
    assert taken == 0 and len(plan) == 15
    others = [(0, offset + 128 * KIB, length) for _, offset, length in every_second]
    both = planned(others, readers=1, rest=plan, first=16)
    runs = runs_of(both, 32)
    assert [position for run in runs for position in run.positions] == [
        position for at in range(16) for position in (at, at + 16) if position != taken
    ]
    assert [len(run.bounds) for run in runs] == [2], "one stretch of 31 chunks, less than 4 MiB"
    nothing = planned(others, readers=1, rest=both, first=32)
    assert len(nothing) == 16, "of a plan that was taken nothing is left"


def test_chunks_of_a_segment_that_is_gone_are_left_out() -> None:
    plan = planned([(0, 0, 100), (9, 0, 100), (1, 0, 100), (9, 8192, 100)])
    assert sorted(position for run in runs_of(plan, 4) for position in run.positions) == [0, 2]
    assert len(planned([(9, 0, 100)])) == 0 and planned([(9, 0, 100)]).runs_about == 0


def transfer_of(number: int, masks: list[int], lengths: list[int]) -> Transfer:
    buffers = [memoryview(bytes(length)) for length in lengths]
    keys = [bytes([number, at]) for at in range(len(lengths))]
    return Transfer(number, keys, buffers, np.array(masks, np.uint64), 0.0)


class Waiting:
    """Transfers that come one after the other."""

    def __init__(self, *transfers: Transfer) -> None:
        self.left = list(transfers)
        self.stream = WriteQueue(lambda: self.left.pop(0) if self.left else None, lambda length: length < 100)


def test_transfers_are_one_stream_and_end_one_by_one() -> None:
    waiting = Waiting(
        transfer_of(1, [1, 2, 3], [10, 11, 12]), transfer_of(2, [4], [13]), transfer_of(3, [5, 6], [14, 15])
    )
    stream = waiting.stream
    assert stream.peek(2).keys == [b"\1\0", b"\1\1"] and len(waiting.left) == 2, "no more than is asked for"
    first = stream.peek(5)
    assert first.keys == [b"\1\0", b"\1\1", b"\1\2", b"\2\0", b"\3\0"]
    assert first.masks == [1, 2, 3, 4, 5] and first.lengths == [10, 11, 12, 13, 14]
    assert stream.peek(5).keys == first.keys, "they stay there"
    stream.take(4)
    assert stream.peek(9).keys == [b"\3\0", b"\3\1"]
    stream.payloads_written(3)
    stream.written(2)
    assert stream.pop_finished() == []
    stream.take(1)
    stream.payloads_written(1)
    stream.written(2)
    done = stream.pop_finished()
    assert [writing.transfer.id for writing in done] == [1, 2] and all(writing.ok.all() for writing in done)
    assert stream.pop_finished() == []
    (left,) = stream.unfinished
    assert left.transfer.id == 3 and not left.ok.any()
    with pytest.raises(AssertionError, match="than were written"):
        stream.written(1)
    stream.payloads_written(1)
    stream.written(1)
    assert left.ok.tolist() == [True, False], "what failed after this fails alone"
    with pytest.raises(AssertionError, match="than were taken"):
        stream.payloads_written(1)
    with pytest.raises(AssertionError, match="than there is"):
        stream.take(2)


def test_what_cannot_be_written_is_refused_and_holds_nobody_up() -> None:
    waiting = Waiting(
        transfer_of(1, [1, 0, 1, 1], [10, 10, 100, 0]),
        transfer_of(2, [0], [10]),
        transfer_of(3, [], []),
        transfer_of(4, [1], [5]),
    )
    stream = waiting.stream
    assert stream.peek(9).keys == [b"\1\0", b"\4\0"] and stream.refused == 4
    stream.take(2)
    stream.payloads_written(2)
    stream.written(1)
    done = stream.pop_finished()
    assert [(writing.transfer.id, writing.ok.tolist()) for writing in done] == [
        (1, [True, False, False, False]),
        (2, [False]),
        (3, []),
    ]
    stream.written(1)
    assert [writing.transfer.id for writing in stream.pop_finished()] == [4] and not stream.peek(1)
