"""Where prompts can resume, against a model that asks for every boundary whether it is one."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stowage.core.geometry import Group, Kind
from stowage.core.groups import strategy
from stowage.core.resume_points import NOWHERE, Points, tail_of
from tests.property.cache_groups import blocks_to_resume, groups

POSITIONS = np.arange(1, 200)
SMALL = groups(block_tokens=st.integers(1, 3)).filter(lambda group: group.blocks_per_chunk <= 4)


@st.composite
def some_points(draw: st.DrawFn, unit: int = 1) -> Points:
    """Of any sort, at multiples of `unit`."""
    least = draw(st.sampled_from([0, 1])) if draw(st.integers(0, 3)) == 0 else unit * draw(st.integers(1, 6))
    return Points(least, draw(st.integers(0, 5)))


def is_point(points: Points, position: int) -> bool:
    """By the definition: the distance there is the largest that the growth allows, and divides the position."""
    if not points.least:
        return False
    distance = points.least
    while points.share and distance * 2 * points.share <= position:
        distance *= 2
    return position % distance == 0


@given(some_points())
def test_the_point_that_follows_is_the_next_by_the_definition(points: Points) -> None:
    found = points.following(POSITIONS).tolist()
    here = NOWHERE
    assert found[-1] >= POSITIONS[-1]
    for position, following in zip(POSITIONS[::-1].tolist(), found[::-1], strict=True):
        if is_point(points, position):
            here = position
        if here != NOWHERE:  # behind the last position the model does not look
            assert following == here
        assert points.least == 0 or following < NOWHERE


@given(some_points(), st.integers(0, 200), st.integers(0, 60))
def test_a_point_is_crossed_when_one_lies_between(points: Points, begin: int, tokens: int) -> None:
    between = [at for at in range(begin + 1, begin + tokens + 1) if is_point(points, at)]
    assert points.crossed(begin, begin + tokens) == bool(between)


@given(st.integers(1, 200), st.integers(1, 6), st.integers(1, 5000))
def test_so_much_of_a_prefix_is_lost_at_most(least: int, share: int, shared: int) -> None:
    """A prompt that parts from a stored one after `shared` tokens resumes at the last point before."""
    points = Points(least, share)
    ends = np.arange(shared + 1)
    resumed = int(ends[points.following(ends) == ends].max())
    assert shared - resumed < max(least, shared / (share + 1) + 1e-6) or resumed == shared


@given(st.integers(1, 200), st.integers(1, 6), st.integers(0, 2000))
def test_points_of_growing_distance_lie_on_those_of_smaller(least: int, share: int, position: int) -> None:
    """So prompts of any length that begin alike have theirs in common: a place is a point or not, by itself."""
    distances = Points(least, share).distances(np.arange(position, position + 300))
    assert (np.diff(distances) >= 0).all() and (distances % least == 0).all()
    assert all(later % earlier == 0 for earlier, later in itertools.pairwise(distances.tolist()))


@settings(max_examples=60)
@given(st.data(), SMALL, st.integers(0, 3), st.integers(0, 4))
def test_what_some_resume_needs_is_kept_and_before_the_tail_nothing_else(
    data: st.DataObject, group: Group, first: int, count: int
) -> None:
    """At a point, at the junction, at a boundary of the tail: their blocks, token by token from the attention mask.

    From the tail on all is kept, though windows of a single token, or of a part of a block, may need nothing there.
    """
    points = data.draw(some_points(group.chunk_tokens))
    block, size = group.block_tokens, group.chunk_tokens
    end = (first + count) * size
    tail = data.draw(st.just(NOWHERE) | st.integers(0, end // block + 3).map(lambda blocks: blocks * block))
    junction = data.draw(st.integers(0, end // block).map(lambda blocks: blocks * block))
    reach = end + points.least * 2 + (0 if group.window == 10_000 else group.window) + 2 * size
    model: set[int] = set()
    for boundary in range(block, reach, block):
        dense = points.everywhere or group.kind is Kind.FULL
        if dense or boundary == junction or boundary >= tail or is_point(points, boundary):
            model |= {at // group.blocks_per_chunk for at in blocks_to_resume(group, boundary)}
    found = points.kept(strategy(group), range(first, first + count), tail, junction)
    kept = {first + place for place in np.flatnonzero(found).tolist()}
    if points.everywhere or group.kind is Kind.FULL:
        assert kept == set(range(first, first + count))
    else:
        needed = model & set(range(first, first + count))
        behind = strategy(group).needed(tail).start if tail != NOWHERE else first + count
        assert needed <= kept, "a resume lacks something"
        assert all(chunk >= behind for chunk in kept - needed), "before the tail nothing is kept that nobody needs"


@pytest.mark.parametrize("window", [128, 1024, 4096])
def test_a_long_prompt_keeps_few_windows(window: int) -> None:
    """Twice the prompt costs few chunks more: three points per doubling at the most, the doubling itself among them."""
    kind = strategy(Group(0, Kind.SLIDING, 16, 8, 1, window))
    chunks = [int(Points(128, 2).kept(kind, range(length // 128)).sum()) for length in (32768, 65536, 131072)]
    assert all(after - before == 2 * window // 128 for before, after in itertools.pairwise(chunks))


@given(st.integers(1, 3000), st.integers(1, 40), st.integers(0, 16))
def test_the_end_of_a_prompt_holds_the_last_boundary_of_whole_chunks(length: int, chunk: int, lost: int) -> None:
    """Even where the last tokens of the prompt are a template's; and no more of it than that takes."""
    tail = tail_of(length, chunk)
    assert tail % chunk == 0
    assert 0 <= tail <= max(0, length - 1 - lost) // chunk * chunk
    assert length - 17 - chunk < tail
