"""Sizes and capacities on examples, and what is refused (cases C and F9)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from stowage.core.geometry import Geometry, Group, Kind, split_arena
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
        ({"resume_tokens": 48}, "resume_tokens is 48; it must divide a block of full attention"),
        ({"kind": Kind.SLIDING, "window": 64, "resume_tokens": 8}, "resume_tokens is 8"),
        ({"spared_tokens": 256}, "spared_tokens is 256; it must be a multiple"),
        ({"kind": Kind.RECURRENT, "blocks_per_chunk": 1, "spared_tokens": 24}, "spared_tokens is 24"),
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


def test_case_c_zero_blocks_are_zero_chunks() -> None:
    (slab,) = split_arena(Geometry((group(bytes_per_block=0),)), MIB)
    assert (slab.slots, slab.groups, slab.end_bytes) == (0, (0,), 0)


@pytest.mark.parametrize("host_bytes", [None, 0, -1, -(1 << 40)])
def test_case_c_no_host_size_is_a_clear_error(host_bytes: int | None) -> None:
    with pytest.raises(ConfigError, match="set host_memory to a size") as raised:
        split_arena(Geometry((group(),)), host_bytes)
    assert not isinstance(raised.value, BudgetError)


def test_a_host_too_small_names_the_least_that_works() -> None:
    geometry = Geometry((group(0, bytes_per_block=4096), group(1, bytes_per_block=1)))
    with pytest.raises(BudgetError, match="at least 20480 bytes"):
        split_arena(geometry, 20479)
    assert [slab.slots for slab in split_arena(geometry, 20480)] == [1, 1]


def test_groups_of_one_slot_size_share_a_class() -> None:
    geometry = Geometry((group(0), group(1, bytes_per_block=5000), group(2, Kind.SLIDING, window=64)))
    classes = split_arena(geometry, 28 * 4096)
    assert [(slab.slot_bytes, slab.groups) for slab in classes] == [(4096, (0, 2)), (20480, (1,))]
    assert [slab.slots for slab in classes] == [8, 4]
    assert [slab.first_slot for slab in classes] == [0, 8]
    assert classes[1].slot_offset_bytes(9) == 8 * 4096 + 20480
    assert [classes[1].slot_offset_bytes(slot) for slot in range(8, 8 + classes[1].slots)] == list(
        classes[1].slot_offsets_bytes
    )
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


def test_sizes_that_differ_by_little_may_share_slots() -> None:
    """Down to four fifths of the largest; what is smaller has slots of its own, and so has its neighbourhood."""
    sizes = [100, 80, 79, 64, 63]
    groups = tuple(Group(index, Kind.FULL, 16, 1, size * 4096) for index, size in enumerate(sizes))
    host = 4096 * 4000
    slabs = split_arena(Geometry(groups), host, common=True)
    assert [(slab.slot_bytes // 4096, slab.groups) for slab in slabs] == [(100, (0, 1)), (79, (2, 3)), (63, (4,))]
    assert host - 63 * 4096 < sum(slab.slots * slab.slot_bytes for slab in slabs) <= host
    assert len(split_arena(Geometry(groups), host)) == 5


def test_snapshots_are_never_closer_than_their_blocks() -> None:
    geometry = Geometry((group(0, Kind.RECURRENT, block_tokens=528, blocks_per_chunk=1, bytes_per_block=4096),))
    assert split_arena(geometry, MIB, snapshot_tokens=16)[0].slots == 256
    with pytest.raises(ConfigError, match="snapshot_tokens is 0"):
        split_arena(geometry, MIB, snapshot_tokens=0)


def test_what_is_left_over_becomes_the_largest_slots_that_fit() -> None:
    """Pages of 4 KiB: slots of 1 and 5; 6 for a token's worth, and 6 + 5 + 3 more."""
    geometry = Geometry((group(0), group(1, bytes_per_block=5000)))
    assert [slab.slots for slab in split_arena(geometry, 11 * 4096)] == [1, 2]
    assert [slab.slots for slab in split_arena(geometry, 14 * 4096)] == [4, 2]
    assert [slab.slots for slab in split_arena(geometry, 17 * 4096)] == [2, 3]
    assert all(type(slab.slots) is int for slab in split_arena(geometry, 17 * 4096))


def test_an_arena_that_fits_exactly_holds_the_same_of_every_group() -> None:
    """Slots of 3, 4 and 5 pages: one token less, and what is left over goes to the large ones."""
    geometry = Geometry(tuple(group(index, bytes_per_block=1024 * pages) for index, pages in enumerate((3, 4, 5))))
    for each in (1, 2, 7, 100):
        assert [slab.slots for slab in split_arena(geometry, 12 * each * 4096)] == [each] * 3


def test_slots_of_a_single_token() -> None:
    small, large = group(block_tokens=1, blocks_per_chunk=1), group(1, block_tokens=1, blocks_per_chunk=1)
    assert split_arena(Geometry((small, large)), 2 * 4096)[0].slots == 2
    geometry = Geometry((small, replace(large, bytes_per_block=5000)))
    assert [slab.slots for slab in split_arena(geometry, 3 * 4096)] == [1, 1]
    with pytest.raises(BudgetError) as raised:
        split_arena(geometry, 3 * 4096 - 1)
    says = (
        "host memory of 12287 bytes cannot hold one chunk of every cache group; set host_memory to at least 12288 bytes"
    )
    assert str(raised.value) == says


def test_a_snapshot_every_512_tokens_unless_told_otherwise() -> None:
    state = group(1, Kind.RECURRENT, block_tokens=1, blocks_per_chunk=1, bytes_per_block=8192)
    geometry = Geometry((group(0, block_tokens=1, blocks_per_chunk=1), state))
    assert [slab.slots for slab in split_arena(geometry, 4096 * 516)] == [512, 2]
    assert [slab.slots for slab in split_arena(geometry, 4096 * 516, 513)] == [514, 1]


def test_a_slot_belongs_to_its_class() -> None:
    slab = split_arena(Geometry((group(0), group(1, bytes_per_block=5000))), 14 * 4096)[0]
    assert [slab.slot_offset_bytes(slot) for slot in (0, 3)] == [0, 3 * 4096]
    for slot in (-1, 4):
        with pytest.raises(AssertionError, match=f"^slot {slot} is not of this class$"):
            slab.slot_offset_bytes(slot)


@pytest.mark.parametrize(
    ("refused", "says"),
    [
        (lambda: group(65536), "group 65536 (full): index must be between 0 and 65535"),
        (lambda: group(3, Kind.SLIDING), "group 3 (sliding): window is 0; it must be at least 1 token"),
        (lambda: Geometry(()), "a geometry needs at least one cache group"),
        (
            lambda: split_arena(Geometry((group(),)), 4095),
            "host memory of 4095 bytes cannot hold one chunk of every cache group; "
            "set host_memory to at least 4096 bytes",
        ),
        (
            lambda: split_arena(Geometry((group(),)), None),
            "no size of host memory is given; set host_memory to a size such as '2GiB'",
        ),
        (
            lambda: split_arena(Geometry((group(),)), -5),
            "host memory of -5 bytes is not a size; set host_memory to a size such as '2GiB'",
        ),
    ],
)
def test_a_refusal_says_what_and_which(refused: Callable[[], object], says: str) -> None:
    with pytest.raises((ConfigError, BudgetError)) as raised:
        refused()
    assert str(raised.value) == says
    assert group(65535).index == 65535
