"""Case F9 for any geometry: slots never exceed the host, and none reaches past the arena."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stowage.core.copy_plan import CopyPlan
from stowage.core.geometry import PAGE_BYTES, Geometry, Group, Kind, SlabClass, slab_of_groups, split_arena
from stowage.errors import BudgetError


@st.composite
def geometries(draw: st.DrawFn, bytes_max: int = 1 << 22) -> Geometry:
    count = draw(st.integers(1, 5))
    sizes = st.lists(st.integers(0, bytes_max), min_size=1, max_size=3)
    choices = draw(sizes)  # few sizes, so that groups share slab classes
    groups = []
    for index in range(count):
        kind = draw(st.sampled_from(Kind))
        groups.append(
            Group(
                index,
                kind,
                block_tokens=draw(st.sampled_from([1, 16, 32, 528])),
                blocks_per_chunk=1 if kind is Kind.RECURRENT else draw(st.sampled_from([1, 4, 7, 64])),
                bytes_per_block=draw(st.sampled_from(choices)),
                window=64 if kind in (Kind.SLIDING, Kind.CHUNKED) else 0,
            )
        )
    return Geometry(tuple(groups))


def tokens_per_slot(group: Group, snapshot_tokens: int) -> int:
    return max(snapshot_tokens, group.block_tokens) if group.kind is Kind.RECURRENT else group.chunk_tokens


@given(geometries(), st.integers(1, 1 << 34), st.sampled_from([1, 512, 4096]))
def test_no_slot_reaches_past_the_arena(geometry: Geometry, host_bytes: int, snapshot_tokens: int) -> None:
    try:
        classes = split_arena(geometry, host_bytes, snapshot_tokens)
    except BudgetError:
        assert host_bytes < sum(-(-group.bytes_per_chunk // PAGE_BYTES) * PAGE_BYTES
                                for group in geometry.groups)  # fmt: skip
        return
    assert sorted(index for slab in classes for index in slab.groups) == list(range(len(geometry.groups)))
    assert len({slab.slot_bytes for slab in classes}) == len(classes)
    assert sum(slab.slots * slab.slot_bytes for slab in classes) <= host_bytes
    end_bytes = next_slot = 0
    for slab in classes:
        assert slab.slot_bytes % PAGE_BYTES == 0
        assert slab.first_slot == next_slot
        assert slab.offset_bytes == end_bytes
        for index in slab.groups:
            payload = geometry.groups[index].bytes_per_chunk
            assert payload <= slab.slot_bytes < payload + PAGE_BYTES
            assert bool(payload) == bool(slab.slots)
        if slab.slots:
            last = slab.first_slot + slab.slots - 1
            assert slab.slot_offset_bytes(slab.first_slot) == slab.offset_bytes
            assert slab.slot_offset_bytes(last) + slab.slot_bytes == slab.end_bytes <= host_bytes
        next_slot += slab.slots
        end_bytes = slab.end_bytes


@given(geometries(bytes_max=1 << 18), st.integers(20, 400), st.sampled_from([64, 512]))
def test_f9_every_group_holds_the_same_tokens(geometry: Geometry, scale: int, snapshot_tokens: int) -> None:
    """At least 95 % of what the bytes per token allow, when the host is 20 chunks of each group or more."""
    aligned = tuple(
        replace(group, bytes_per_block=group.bytes_per_block // 4096 * 4096 + 4096) for group in geometry.groups
    )
    bytes_per_token = sum(group.bytes_per_chunk / tokens_per_slot(group, snapshot_tokens) for group in aligned)
    host_bytes = scale * sum(group.bytes_per_chunk for group in aligned)
    classes = split_arena(Geometry(aligned), host_bytes, snapshot_tokens)
    target = 0.95 * host_bytes / bytes_per_token
    for slab in classes:
        slots_wanted = sum(target / tokens_per_slot(aligned[index], snapshot_tokens) for index in slab.groups)
        assert slab.slots >= slots_wanted
    largest = max(slab.slot_bytes for slab in classes)
    one_page_for_all = host_bytes / sum(largest / tokens_per_slot(group, snapshot_tokens) for group in aligned)
    assert host_bytes / bytes_per_token >= one_page_for_all


def test_tables_slabs_and_addresses() -> None:
    full, state = Group(0, Kind.FULL, 16, 4, 1024), Group(1, Kind.RECURRENT, 512, 1, 4096)
    assert [full.blocks_of(tokens) for tokens in (0, 1, 16, 17)] == [0, 1, 1, 2]
    assert [state.blocks_of(tokens) for tokens in (1, 5000)] == [1, 1]
    slabs = [SlabClass(4096, (0, 2), 3, 0, 0), SlabClass(8192, (1,), 2, 12288, 3)]
    assert slab_of_groups(slabs) == {0: slabs[0], 2: slabs[0], 1: slabs[1]}
    plan = CopyPlan(1, np.array([7, 8]), np.array([3, 4]), np.array([0, 1]))
    assert plan.addresses(slabs[1], 4096).tolist() == [12288, 12288 + 8192 + 4096]
