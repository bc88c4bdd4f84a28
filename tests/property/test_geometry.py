"""Case C and F9 for any geometry: capacities never exceed the host, and no slot reaches past the arena."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from stowage.core.geometry import (
    PAGE_BYTES,
    Geometry,
    Group,
    Kind,
    bytes_per_block,
    bytes_per_chunk,
    chunk_capacity,
    split_arena,
)
from stowage.errors import BudgetError


@dataclass
class Layers:
    """A group as a device allocates it: one tensor per layer that does not read another layer's."""

    block_tokens: int
    num_blocks: int
    tensor_bytes: list[int]

    def allocate(self) -> list[bytearray]:
        return [bytearray(size) for size in self.tensor_bytes]


@st.composite
def device_layers(draw: st.DrawFn) -> Layers:
    block_tokens, num_blocks = draw(st.integers(1, 64) | st.just(528)), draw(st.integers(0, 40))
    layers, shared = draw(st.integers(1, 12)), draw(st.integers(0, 11))
    heads, dtype_bytes = draw(st.integers(1, 8)), draw(st.sampled_from([1, 2, 4]))
    sizes = draw(st.lists(st.integers(1, 96), min_size=1, max_size=2))  # head sizes; a second one for an odd layer
    tensors = []
    for layer in range(max(layers - shared, 1)):
        head_size = sizes[-1] if layer == 0 else sizes[0]
        tensors.append(num_blocks * block_tokens * 2 * heads * head_size * dtype_bytes)
    return Layers(block_tokens, num_blocks, tensors)


@given(device_layers(), st.integers(1, 8), st.integers(1, 64), st.integers(1, 1 << 34))
def test_case_c_chunks_fit_the_host(layers: Layers, ranks: int, blocks_per_chunk: int, host_bytes: int) -> None:
    per_block = bytes_per_block(layers.tensor_bytes, layers.num_blocks)
    assert per_block * layers.num_blocks == sum(layers.tensor_bytes)
    per_chunk = bytes_per_chunk(per_block, ranks, blocks_per_chunk)
    if layers.num_blocks == 0:
        assert chunk_capacity(host_bytes, per_chunk) == per_chunk == 0
        return
    assert per_chunk >= per_block * ranks * blocks_per_chunk > per_chunk - PAGE_BYTES
    assert per_chunk % PAGE_BYTES == 0
    try:
        chunks = chunk_capacity(host_bytes, per_chunk)
    except BudgetError:
        assert host_bytes < per_chunk
        return
    assert chunks * per_chunk <= host_bytes < (chunks + 1) * per_chunk


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


@settings(suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(device_layers(), st.integers(1, 4), st.integers(1, 8), st.integers(1, 5))
def test_chunks_hold_the_tensors_really_allocated(layers: Layers, ranks: int, per_chunk: int, chunks: int) -> None:
    """Copy every block of real tensors into an arena of real bytes: nothing is cut off, nothing runs over."""
    assume(0 < sum(layers.tensor_bytes) <= 1 << 18)
    per_block = bytes_per_block(layers.tensor_bytes, layers.num_blocks)
    slot_bytes = bytes_per_chunk(per_block, ranks, per_chunk)
    arena = bytearray(chunk_capacity(slot_bytes * chunks + slot_bytes // 2, slot_bytes) * slot_bytes)
    tensors = layers.allocate()
    block = b"".join(bytes(tensor[: len(tensor) // layers.num_blocks]) for tensor in tensors)
    for slot in range(chunks):
        chunk = block * per_chunk * ranks
        start = slot * slot_bytes
        arena[start : start + len(chunk)] = chunk
        assert len(chunk) <= slot_bytes
    assert len(arena) == chunks * slot_bytes
