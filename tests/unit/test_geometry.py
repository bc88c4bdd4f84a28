"""Sizes and capacities on examples, and what is refused (cases C and F9)."""

from __future__ import annotations

from typing import Any

import pytest

from stowage.core.geometry import (
    Geometry,
    Group,
    Kind,
    bytes_per_block,
    bytes_per_chunk,
    chunk_capacity,
    round_up,
    split_arena,
)
from stowage.errors import BudgetError, ConfigError

MIB = 1 << 20


def group(index: int = 0, kind: Kind = Kind.FULL, **changes: Any) -> Group:
    values: dict[str, Any] = {"block_tokens": 16, "blocks_per_chunk": 4, "bytes_per_block": 1000, **changes}
    return Group(index, kind, **values)


def test_sizes_of_a_chunk() -> None:
    some = group(block_tokens=528, blocks_per_chunk=3, bytes_per_block=700)
    assert (some.chunk_tokens, some.bytes_per_chunk, some.full_mask) == (1584, 2100, 0b111)
    assert group(blocks_per_chunk=64).full_mask == 2**64 - 1


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"index": -1}, "index"),
        ({"index": 1 << 16}, "index"),
        ({"block_tokens": 0}, "block_tokens is 0"),
        ({"blocks_per_chunk": 0}, "blocks_per_chunk is 0"),
        ({"blocks_per_chunk": 65}, "between 1 and 64"),
        ({"bytes_per_block": -1}, "bytes_per_block is -1"),
        ({"kind": Kind.SLIDING}, "window is 0"),
        ({"kind": Kind.CHUNKED, "window": -5}, "window is -5"),
        ({"window": 128}, "only sliding and chunked"),
        ({"kind": Kind.RECURRENT}, "blocks_per_chunk must be 1"),
        ({"kind": Kind.RECURRENT, "blocks_per_chunk": 1, "window": 4}, "only sliding and chunked"),
    ],
)
def test_impossible_groups_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        group(**changes)


def test_impossible_geometries_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least one"):
        Geometry(())
    with pytest.raises(ConfigError, match="has index 1"):
        Geometry((group(1),))


def test_boundaries_are_common_multiples_of_the_blocks() -> None:
    paged, state = group(0), group(1, Kind.RECURRENT, blocks_per_chunk=1, block_tokens=528)
    assert Geometry((paged, state)).boundary_tokens == 528
    assert Geometry((group(0, block_tokens=24), group(1, block_tokens=16))).boundary_tokens == 48
    assert Geometry((paged,)).boundary_tokens == 16


def test_case_c_a_sum_is_not_multiplied_again() -> None:
    """Two tensors of 61 layers and a small one, as seen by the group whose page size is a sum already."""
    tensors = [1000 * 1152] * 61 + [1000 * 256]
    per_block = bytes_per_block(tensors, 1000)
    assert per_block == 61 * 1152 + 256
    per_chunk = bytes_per_chunk(per_block, ranks=4, blocks_per_chunk=8)
    assert per_chunk == round_up(per_block * 32, 4096)
    assert chunk_capacity(100 * per_chunk + per_chunk - 1, per_chunk) == 100


def test_case_c_zero_blocks_are_zero_chunks() -> None:
    per_block = bytes_per_block([], 0)
    assert bytes_per_block([4096], 0) == per_block == 0
    assert bytes_per_chunk(per_block, ranks=8, blocks_per_chunk=4) == 0
    assert chunk_capacity(MIB, 0) == 0
    (slab,) = split_arena(Geometry((group(bytes_per_block=0),)), MIB)
    assert (slab.slots, slab.groups, slab.end_bytes) == (0, (0,), 0)


@pytest.mark.parametrize("host_bytes", [None, 0, -1, -(1 << 40)])
def test_case_c_no_host_size_is_a_clear_error(host_bytes: int | None) -> None:
    for capacity in (lambda: chunk_capacity(host_bytes, 4096), lambda: split_arena(Geometry((group(),)), host_bytes)):
        with pytest.raises(ConfigError, match="set host to a size") as raised:
            capacity()
        assert not isinstance(raised.value, BudgetError)


def test_a_host_too_small_names_the_least_that_works() -> None:
    with pytest.raises(BudgetError, match="least that works is 8192 bytes"):
        chunk_capacity(8191, 8192)
    assert chunk_capacity(8192, 8192) == 1
    geometry = Geometry((group(0, bytes_per_block=4096), group(1, bytes_per_block=1)))
    with pytest.raises(BudgetError, match="least that works is 20480 bytes"):
        split_arena(geometry, 20479)
    assert [slab.slots for slab in split_arena(geometry, 20480)] == [1, 1]


def test_groups_of_one_slot_size_share_a_class() -> None:
    geometry = Geometry((group(0), group(1, bytes_per_block=5000), group(2, Kind.SLIDING, window=64)))
    classes = split_arena(geometry, 28 * 4096)
    assert [(slab.slot_bytes, slab.groups) for slab in classes] == [(4096, (0, 2)), (20480, (1,))]
    assert [slab.slots for slab in classes] == [8, 4]
    assert [slab.first_slot for slab in classes] == [0, 8]
    assert classes[1].slot_offset_bytes(9) == 8 * 4096 + 20480
    with pytest.raises(AssertionError):
        classes[1].slot_offset_bytes(7)


def test_case_f9_a_hybrid_is_not_billed_for_its_largest_page() -> None:
    """A large snapshot beside small attention chunks: each group's chunks take the bytes that they need."""
    groups = (
        group(0, bytes_per_block=64 * 1024),
        group(1, Kind.SLIDING, window=1024, bytes_per_block=16 * 1024),
        group(2, Kind.RECURRENT, block_tokens=16, blocks_per_chunk=1, bytes_per_block=6 * MIB),
    )
    host_bytes, snapshot_tokens = 512 * MIB, 512
    classes = {slab.groups[0]: slab for slab in split_arena(Geometry(groups), host_bytes, snapshot_tokens)}
    tokens = min(classes[0].slots * 64, classes[1].slots * 64, classes[2].slots * snapshot_tokens)
    bytes_per_token = 64 * 1024 / 16 + 16 * 1024 / 16 + 6 * MIB / snapshot_tokens
    assert tokens >= 0.95 * host_bytes / bytes_per_token
    one_page_for_all = host_bytes // (6 * MIB) / (1 / 64 + 1 / 64 + 1 / snapshot_tokens)
    assert tokens > 10 * one_page_for_all


def test_snapshots_are_never_closer_than_their_blocks() -> None:
    geometry = Geometry((group(0, Kind.RECURRENT, block_tokens=528, blocks_per_chunk=1, bytes_per_block=4096),))
    assert split_arena(geometry, MIB, snapshot_tokens=16)[0].slots == 256
    with pytest.raises(ConfigError, match="snapshot_tokens is 0"):
        split_arena(geometry, MIB, snapshot_tokens=0)
