"""What the rest of the code asks of a cache group, and what the paged kinds have in common.

A group strategy answers which blocks a resume at a boundary needs, which chunks can be stored now, which boundaries
can be resumed, and which blocks no later query sees. Nothing else in the code knows the difference between kinds.

    a resume at boundary b: tokens [0, b) are known, the next query stands at b

    tokens   0                first(b)            b
             |...... unseen ......|==== needed ====|-- computed from here on
    blocks   |     0     |     1     |     2     |     every block that overlaps [first(b), b) must be valid

Invariants: strategies are stateless; a boundary is a multiple of the group's boundary_tokens; boundary 0 needs nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from stowage.core.geometry import NULL_BLOCK, BoolArray, Group, IntArray, MaskArray


@dataclass(frozen=True, slots=True)
class GroupStrategy(ABC):
    """One kind of attention, or of recurrence, seen from the cache of ``group``."""

    group: Group

    @abstractmethod
    def needed_blocks(self, boundary: int) -> range:
        """Indices of the sequence's blocks that must be valid; block b covers tokens [b*bt, (b+1)*bt).

        A recurrent group needs the one block boundary/bt - 1: the snapshot after `boundary` tokens.
        """

    @abstractmethod
    def resume_points(self, masks: MaskArray, limit: int, step: int) -> BoolArray:
        """For each boundary 0, step, 2*step, ... <= limit: can this group resume there?

        `masks[i]` are the valid blocks of chunk i, 0 or beyond the end: absent. `step` is one of boundary_tokens.
        Boundary 0 is always True. Linear in chunks and boundaries.
        """

    @abstractmethod
    def first_live_block(self, position: int) -> int:
        """Blocks before this one are read by no query at a token >= `position`, and may be freed."""

    def needed(self, boundary: int) -> range:
        """Indices of the chunks that a resume at `boundary` reads."""
        return overlapping(self.needed_blocks(boundary), self.group.blocks_per_chunk)

    def storable(self, progress: int, first_chunk: int, block_table: IntArray) -> tuple[IntArray, MaskArray]:
        """Chunks from `first_chunk` on that end at or before token `progress`, and the masks of the blocks still held.

        `block_table[b]` is the device block of the sequence's block b, NULL_BLOCK or beyond the end: not held. Chunks
        of which nothing is held are left out.
        """
        group = self.group
        last_chunk = progress // group.chunk_tokens
        if last_chunk <= first_chunk:
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.uint64)
        first, end = first_chunk * group.blocks_per_chunk, last_chunk * group.blocks_per_chunk
        held = block_table[first:end] != NULL_BLOCK
        valid = np.zeros(end - first, dtype=np.bool_)
        valid[: len(held)] = held
        masks = pack_masks(valid, group.blocks_per_chunk)
        present = np.flatnonzero(masks)
        return present.astype(np.int64) + first_chunk, masks[present]

    def _check_boundary(self, boundary: int) -> None:
        """A boundary where the group cannot have one is a bug of the caller."""
        assert boundary >= 0 and boundary % self.group.boundary_tokens == 0, (boundary, self.group.boundary_tokens)

    def _boundaries(self, limit: int, step: int) -> IntArray:
        """The boundaries 0, step, 2*step, ... <= limit."""
        unit = self.group.boundary_tokens
        assert limit >= 0 and step >= 1 and step % unit == 0, (limit, step, unit)
        return np.arange(0, limit + 1, step, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Paged(GroupStrategy):
    """What full, sliding and chunked-local attention share; a kind adds only the first token that a query reads."""

    @abstractmethod
    def first_tokens(self, positions: IntArray) -> IntArray:
        """The first token that a query at each position reads. Never decreases with the position."""

    def needed_blocks(self, boundary: int) -> range:
        self._check_boundary(boundary)
        return range(self.first_live_block(boundary), boundary // self.group.block_tokens)

    def resume_points(self, masks: MaskArray, limit: int, step: int) -> BoolArray:
        boundaries = self._boundaries(limit, step)
        ends = boundaries // self.group.block_tokens
        starts = self.first_tokens(boundaries) // self.group.block_tokens
        # invalid[b]: how many of the blocks before b are not valid; blocks beyond the masks are not.
        invalid = np.zeros(int(ends[-1]) + 1, dtype=np.int64)
        valid = expand_masks(masks, self.group.blocks_per_chunk)[: len(invalid) - 1]
        invalid[1:] = 1
        invalid[1 : len(valid) + 1] -= valid
        np.cumsum(invalid, out=invalid)
        servable: BoolArray = invalid[ends] == invalid[starts]
        return servable

    def first_live_block(self, position: int) -> int:
        return int(self.first_tokens(np.array([position], dtype=np.int64))[0]) // self.group.block_tokens


def overlapping(blocks: range, blocks_per_chunk: int) -> range:
    """The chunks that contain at least one of these blocks."""
    if not blocks:
        return range(blocks.start // blocks_per_chunk, blocks.start // blocks_per_chunk)
    return range(blocks.start // blocks_per_chunk, (blocks.stop - 1) // blocks_per_chunk + 1)


def expand_masks(masks: MaskArray, blocks_per_chunk: int) -> BoolArray:
    """One bool per block, chunk after chunk: element i*k + j is bit j of masks[i]. Higher bits are ignored."""
    octets = np.ascontiguousarray(masks, dtype="<u8").view(np.uint8).reshape(len(masks), 8)
    bits = np.unpackbits(octets, axis=1, count=blocks_per_chunk, bitorder="little")
    return bits.reshape(-1).view(np.bool_)


def pack_masks(valid: BoolArray, blocks_per_chunk: int) -> MaskArray:
    """The inverse of expand_masks; `valid` holds whole chunks."""
    bits = np.zeros((len(valid) // blocks_per_chunk, 64), dtype=np.bool_)
    bits[:, :blocks_per_chunk] = valid.reshape(-1, blocks_per_chunk)
    octets = np.packbits(bits, axis=1, bitorder="little")
    return octets.view("<u8").reshape(-1).astype(np.uint64, copy=False)
