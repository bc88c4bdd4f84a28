"""Strategies and the longest boundary against models that know only the attention mask, token by token."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from stowage.core.geometry import NULL_BLOCK, Geometry, Group, Kind, MaskArray
from stowage.core.groups import strategy
from stowage.core.reuse import longest_boundary
from tests.property.cache_groups import blocks_to_resume, groups, read_later

PROMPT_TOKENS_MAX = 90


def to_masks(group: Group, present: set[int], chunks: int) -> MaskArray:
    """Masks of `chunks` chunks whose valid blocks are `present`; blocks beyond them do not count."""
    masks = [0] * chunks
    for block in present:
        if block < chunks * group.blocks_per_chunk:
            masks[block // group.blocks_per_chunk] |= 1 << block % group.blocks_per_chunk
    return np.array(masks, dtype=np.uint64)


@st.composite
def stored(draw: st.DrawFn, group: Group) -> tuple[MaskArray, set[int]]:
    """What could be stored of a prompt: some blocks of its first chunks, often nearly all of them."""
    chunks = draw(st.integers(0, PROMPT_TOKENS_MAX // group.chunk_tokens + 1))
    everything = set(range(chunks * group.blocks_per_chunk))
    holes = draw(st.sets(st.sampled_from(sorted(everything)), max_size=4)) if everything else set()
    present = everything - holes if draw(st.integers(0, 3)) else holes
    return to_masks(group, present, chunks), present


@given(groups(), st.integers(0, 20))
def test_needed_is_what_the_queries_from_the_boundary_on_read(group: Group, blocks: int) -> None:
    boundary = blocks * group.block_tokens
    model = blocks_to_resume(group, boundary)
    kind = strategy(group)
    assert set(kind.needed_blocks(boundary)) == model
    assert set(kind.needed(boundary)) == {block // group.blocks_per_chunk for block in model}


@given(groups(), st.integers(0, PROMPT_TOKENS_MAX))
def test_first_live_block_is_the_first_that_a_later_query_reads(group: Group, position: int) -> None:
    first_live = strategy(group).first_live_block(position)
    if group.kind is Kind.RECURRENT:
        assert first_live == 0
        return
    live = (token // group.block_tokens for token in range(position + 1) if read_later(group, position, token))
    assert first_live == min(live)


@given(st.data(), groups(), st.integers(1, 3), st.integers(0, PROMPT_TOKENS_MAX))
def test_resume_points_are_those_whose_blocks_are_present(
    data: st.DataObject, group: Group, multiple: int, limit: int
) -> None:
    masks, present = data.draw(stored(group))
    step = group.block_tokens * multiple
    model = [blocks_to_resume(group, boundary) <= present for boundary in range(0, limit + 1, step)]
    assert strategy(group).resume_points(masks, limit, step).tolist() == model
    needed = [set(strategy(group).needed_blocks(boundary)) <= present for boundary in range(0, limit + 1, step)]
    assert needed == model


@given(st.data(), st.integers(1, 4), st.integers(0, PROMPT_TOKENS_MAX))
def test_longest_boundary_is_the_largest_that_all_groups_serve(
    data: st.DataObject, group_count: int, prompt_tokens: int
) -> None:
    sizes = st.sampled_from([1, 2, 3, 4, 6])
    some = [data.draw(groups(index, sizes)) for index in range(group_count)]
    held = [data.draw(stored(group)) for group in some]
    step = math.lcm(*(group.block_tokens for group in some))
    model = 0
    for boundary in range(0, prompt_tokens, step):
        if all(blocks_to_resume(group, boundary) <= present for group, (_, present) in zip(some, held, strict=True)):
            model = boundary
    found = longest_boundary([strategy(group) for group in some], [masks for masks, _ in held], prompt_tokens, step)
    assert found == model


@given(st.data(), groups(), st.integers(0, PROMPT_TOKENS_MAX), st.integers(0, 6))
@example(data=None, group=Group(0, Kind.FULL, 1, 64, 1), progress=64, first_chunk=0)
def test_storable_chunks_end_within_the_progress(
    data: st.DataObject | None, group: Group, progress: int, first_chunk: int
) -> None:
    blocks = -(-progress // group.block_tokens)
    table = np.arange(blocks, dtype=np.int64) + 100
    if data is not None and blocks:
        table[data.draw(st.lists(st.integers(0, blocks - 1)))] = NULL_BLOCK
    model = {}
    for chunk in range(first_chunk, progress + 1):
        last_token = (chunk + 1) * group.chunk_tokens - 1
        bits = [chunk * group.blocks_per_chunk + bit for bit in range(group.blocks_per_chunk)]
        if last_token < progress and any(table[block] != NULL_BLOCK for block in bits):
            model[chunk] = sum(1 << bit for bit, block in enumerate(bits) if table[block] != NULL_BLOCK)
    chunks, masks = strategy(group).storable(progress, first_chunk, table)
    assert dict(zip(chunks.tolist(), masks.tolist(), strict=True)) == model
    assert chunks.tolist() == sorted(model)


@given(st.data(), st.integers(1, 4), st.integers(2, 4), st.integers(0, 120))
def test_boundaries_inside_of_blocks_need_what_the_block_holds_before_them(
    data: st.DataObject, unit: int, parts: int, prompt_tokens: int
) -> None:
    """Attention resumes at its whole blocks, or inside of the one behind them where that part was stored too."""
    block = unit * parts
    attention = Group(0, Kind.FULL, block, 1, 1, resume_tokens=unit)
    state, part = Group(1, Kind.RECURRENT, unit, 1, 1), Group(2, Kind.RECURRENT, unit, 1, 1, spared_tokens=block)
    blocks, states, begun = (
        data.draw(st.lists(st.sampled_from([0, 1, 1]), max_size=size)) for size in (6, 6 * parts, 6 * parts)
    )
    leading = blocks.index(0) if 0 in blocks else len(blocks)

    def there(snapshots: list[int], boundary: int) -> bool:
        return boundary // unit <= len(snapshots) and snapshots[boundary // unit - 1] == 1

    expected = max(
        at
        for at in range(0, max(1, prompt_tokens), unit)
        if not at or (at // block <= leading and there(states, at) and (at % block == 0 or there(begun, at)))
    )
    strategies = [strategy(group) for group in (attention, state, part)]
    masks = [np.array(some, dtype=np.uint64) for some in (blocks, states, begun)]
    geometry = Geometry((attention, state, part))
    assert geometry.boundary_tokens == unit
    found = longest_boundary(strategies, masks, prompt_tokens, unit)
    assert found == expected
    needed = [one.needed(found) for one in strategies]
    assert len(needed[0]) == found // block
    assert [*needed[2]] == ([] if found % block == 0 else [found // unit - 1])
