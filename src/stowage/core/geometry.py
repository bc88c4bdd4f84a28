"""Groups, blocks, chunks and how many of them fit (cases C and F9).

Owns the arithmetic of sizes and nothing else: no bytes are allocated here.

    tokens   0        bt       2bt      3bt      4bt
             |--------|--------|--------|--------|--
    block         0        1        2        3           block_tokens = bt
    chunk    |------- chunk 0 ------|-- chunk 1 ...      blocks_per_chunk = 3 would end chunk 0 at 3bt

Invariants: capacities are derived from what is allocated, never from what a page "should" cost; `slots * slot_bytes`
summed over the slab classes never exceeds `host_bytes`; slots are aligned, do not overlap and end within the arena.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from stowage.errors import BudgetError, ConfigError

NULL_BLOCK: Final = -1
"""The block-table entry of a block that the device does not hold: never allocated, or freed already."""

PAGE_BYTES: Final = 4096
"""Alignment of slots, files and direct reads."""
ALIGNMENT_BYTES: Final = 64
"""Alignment of tensors in memory and in files: a line of the processor's cache, as long as its widest vectors."""
BLOCKS_PER_CHUNK_MAX: Final = 64
GROUPS_MAX: Final = 1 << 16
_COMMON_PERCENT: Final = 80

# Device blocks, slots and chunk indices are int64; valid-block masks are uint64, bit j = block j of the chunk.
IntArray = npt.NDArray[np.int64]
MaskArray = npt.NDArray[np.uint64]
BoolArray = npt.NDArray[np.bool_]
Length = TypeVar("Length", int, IntArray)


class Kind(enum.StrEnum):
    """What a query of a group reads. Multi-head latent attention is FULL with another payload."""

    FULL = "full"
    SLIDING = "sliding"
    CHUNKED = "chunked"
    RECURRENT = "recurrent"


@dataclass(frozen=True, slots=True)
class Group:
    """The layers of a model that share one cache geometry. Raises ConfigError for impossible values.

    `window`: SLIDING: a query sees itself and the `window - 1` tokens before it. CHUNKED: the attention chunk's size, a
    query at p sees [p // window * window, p]. FULL and RECURRENT: 0.
    RECURRENT: a block is one snapshot of the state and `blocks_per_chunk` is 1; chunk i is the state after exactly
    (i + 1) * block_tokens tokens. Snapshots are sparse: most chunks are absent.
    `resume_tokens` (FULL only): boundaries are multiples of it, so they may lie inside a block; 0: they are block ends.
    The tokens of such a block before the boundary are stored in a RECURRENT group of its own. That group's
    `spared_tokens` are the full blocks' size: at its multiples a resume needs no snapshot. 0: every boundary needs one.
    `bytes_per_block` is what one block of all the group's layers takes; 0 only when the device has no blocks at all.
    """

    index: int
    kind: Kind
    block_tokens: int
    blocks_per_chunk: int
    bytes_per_block: int
    window: int = 0
    layers: tuple[int, ...] = ()
    resume_tokens: int = 0
    spared_tokens: int = 0

    def __post_init__(self) -> None:
        name = f"group {self.index} ({self.kind})"
        if not 0 <= self.index < GROUPS_MAX:
            raise ConfigError(f"{name}: index must be between 0 and {GROUPS_MAX - 1}")
        if self.block_tokens < 1:
            raise ConfigError(f"{name}: block_tokens is {self.block_tokens}; it must be at least 1")
        if not 1 <= self.blocks_per_chunk <= BLOCKS_PER_CHUNK_MAX:
            raise ConfigError(
                f"{name}: blocks_per_chunk is {self.blocks_per_chunk}; it must be between 1 and "
                f"{BLOCKS_PER_CHUNK_MAX}, because a chunk's valid blocks are one 64-bit mask"
            )
        if self.bytes_per_block < 0:
            raise ConfigError(f"{name}: bytes_per_block is {self.bytes_per_block}; it cannot be negative")
        if self.kind is Kind.RECURRENT and self.blocks_per_chunk != 1:
            raise ConfigError(f"{name}: a snapshot is a chunk of its own; blocks_per_chunk must be 1")
        if self.kind in (Kind.SLIDING, Kind.CHUNKED):
            if self.window < 1:
                raise ConfigError(f"{name}: window is {self.window}; it must be at least 1 token")
        elif self.window != 0:
            raise ConfigError(f"{name}: window is {self.window}; only sliding and chunked groups have one, set it to 0")
        if self.resume_tokens and (self.kind is not Kind.FULL or self.block_tokens % self.resume_tokens):
            raise ConfigError(
                f"{name}: resume_tokens is {self.resume_tokens}; it must divide a block of full attention"
            )
        if self.spared_tokens and (self.kind is not Kind.RECURRENT or self.spared_tokens % self.block_tokens):
            raise ConfigError(f"{name}: spared_tokens is {self.spared_tokens}; it must be a multiple of block_tokens")

    @property
    def boundary_tokens(self) -> int:
        """What boundaries are multiples of."""
        return self.resume_tokens or self.block_tokens

    @property
    def chunk_tokens(self) -> int:
        """Tokens that one chunk covers."""
        return self.block_tokens * self.blocks_per_chunk

    def blocks_of(self, tokens: int) -> int:
        """Blocks in the table of a sequence of so many tokens: of a state the live one alone."""
        return 1 if self.kind is Kind.RECURRENT else -(-tokens // self.block_tokens)

    @property
    def bytes_per_chunk(self) -> int:
        """Payload of one chunk, without alignment."""
        return self.bytes_per_block * self.blocks_per_chunk

    @property
    def full_mask(self) -> int:
        """The mask of a chunk whose blocks are all valid."""
        return (1 << self.blocks_per_chunk) - 1


@dataclass(frozen=True, slots=True)
class Geometry:
    """All cache groups of a model, in the order of their index. Raises ConfigError when empty or out of order."""

    groups: tuple[Group, ...]

    def __post_init__(self) -> None:
        if not self.groups:
            raise ConfigError("a geometry needs at least one cache group")
        for index, group in enumerate(self.groups):
            if group.index != index:
                raise ConfigError(f"group number {index} has index {group.index}; groups are listed by index")

    @property
    def boundary_tokens(self) -> int:
        """Least common multiple of the groups': every boundary is a multiple of it."""
        return math.lcm(*(group.boundary_tokens for group in self.groups))


@dataclass(frozen=True, slots=True)
class SlabClass:
    """Slots of one size, contiguous in the arena. It owns the global slot numbers [first_slot, first_slot + slots)."""

    slot_bytes: int
    groups: tuple[int, ...]
    slots: int
    offset_bytes: int
    first_slot: int

    @property
    def end_bytes(self) -> int:
        """The first byte after the class."""
        return self.offset_bytes + self.slots * self.slot_bytes

    @property
    def slot_offsets_bytes(self) -> IntArray:
        """Where each slot begins in the arena."""
        return self.offset_bytes + self.slot_bytes * np.arange(self.slots, dtype=np.int64)

    def slot_offset_bytes(self, slot: int) -> int:
        """Where a slot, named by its global number, begins in the arena."""
        assert self.first_slot <= slot < self.first_slot + self.slots, f"slot {slot} is not of this class"
        return self.offset_bytes + (slot - self.first_slot) * self.slot_bytes


def slab_of_groups(slabs: Iterable[SlabClass]) -> dict[int, SlabClass]:
    """The slab class of each group, by its index."""
    return {group: slab for slab in slabs for group in slab.groups}


def round_up(length: Length, unit: int = PAGE_BYTES) -> Length:
    """The length, or each of them, in whole units: the least multiple that is not below it."""
    return -(-length // unit) * unit


def split_arena(
    geometry: Geometry, host_bytes: int | None, snapshot_tokens: int = 512, *, common: bool = False
) -> tuple[SlabClass, ...]:
    """Divide `host_bytes` so that every group can hold the same number of tokens (case F9).

    One slab class per distinct slot size, in the order of the groups. A recurrent group has one snapshot per
    `snapshot_tokens` tokens. What rounding leaves over becomes further slots. Groups of zero bytes get zero slots.
    `common`: slot sizes that differ by little share slots of the largest of them, and eviction decides how many each
    group has: for callers that do not know how many chunks of one group are kept for one of another.
    Raises ConfigError for a missing, zero or negative host size, BudgetError when some group would have no slot.
    """
    host = _checked_host_bytes(host_bytes)
    if snapshot_tokens < 1:
        raise ConfigError(f"snapshot_tokens is {snapshot_tokens}; it must be at least 1")
    sizes = {group.index: round_up(group.bytes_per_chunk) for group in geometry.groups}
    rounded = _common_sizes(set(sizes.values())) if common else {}
    classes: dict[int, list[Group]] = {}
    for group in geometry.groups:
        size = sizes[group.index]
        classes.setdefault(rounded.get(size, size), []).append(group)

    def slots_for(tokens: int) -> dict[int, int]:
        return {
            slot_bytes: sum(-(-tokens // tokens_per_slot(group, snapshot_tokens)) for group in groups)
            for slot_bytes, groups in classes.items()
            if slot_bytes
        }

    slots = _largest_fit(slots_for, host, max(tokens_per_slot(group, snapshot_tokens) for group in geometry.groups))
    spare = host - _total_bytes(slots)
    for slot_bytes in sorted(slots, reverse=True):
        slots[slot_bytes] += spare // slot_bytes
        spare %= slot_bytes

    result: list[SlabClass] = []
    offset_bytes = first_slot = 0
    for slot_bytes, groups in classes.items():
        slab = SlabClass(slot_bytes, tuple(g.index for g in groups), slots.get(slot_bytes, 0), offset_bytes, first_slot)
        result.append(slab)
        offset_bytes, first_slot = slab.end_bytes, first_slot + slab.slots
    return tuple(result)


def _common_sizes(sizes: set[int]) -> dict[int, int]:
    """For each slot size the one whose slots it shares: the largest that it fills to at least `_COMMON_PERCENT`."""
    found: dict[int, int] = {}
    largest = 0
    for size in sorted(sizes, reverse=True):
        if size * 100 < largest * _COMMON_PERCENT or not largest:
            largest = size
        found[size] = largest
    return found


def tokens_per_slot(group: Group, snapshot_tokens: int) -> int:
    """Tokens of a prompt for each slot that it takes: of a state it has one in so many tokens."""
    return max(group.chunk_tokens, snapshot_tokens) if group.kind is Kind.RECURRENT else group.chunk_tokens


def _total_bytes(slots: dict[int, int]) -> int:
    return sum(slot_bytes * count for slot_bytes, count in slots.items())


def _largest_fit(
    slots_for: Callable[[int], dict[int, int]], host_bytes: int, tokens_per_slot_max: int
) -> dict[int, int]:
    """The slots of the largest number of tokens that fits, by bisection: the bytes grow with the tokens."""
    slots = slots_for(1)
    if not slots:
        return slots
    if _total_bytes(slots) > host_bytes:
        raise _too_small(host_bytes, _total_bytes(slots), "one chunk of every cache group")
    fits, fails = 1, (host_bytes // min(slots) + 1) * tokens_per_slot_max + 1
    while fails - fits > 1:
        middle = (fits + fails) // 2
        if _total_bytes(slots_for(middle)) <= host_bytes:
            fits = middle
        else:
            fails = middle
    return slots_for(fits)


def _checked_host_bytes(host_bytes: int | None) -> int:
    if host_bytes is None:
        raise ConfigError("no size of host memory is given; set host_memory to a size such as '2GiB'")
    if host_bytes <= 0:
        raise ConfigError(f"host memory of {host_bytes} bytes is not a size; set host_memory to a size such as '2GiB'")
    return host_bytes


def _too_small(host_bytes: int, least_bytes: int, what: str) -> BudgetError:
    return BudgetError(
        f"host memory of {host_bytes} bytes cannot hold {what}; set host_memory to at least {least_bytes} bytes"
    )
