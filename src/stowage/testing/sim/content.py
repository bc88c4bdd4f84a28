"""The bytes that each key must have, and a simulated device whose blocks are checked against them.

The bytes of block j of a chunk follow from the chunk's key, so whoever holds bytes under a key can be told whether they
are the right ones. Blocks that a mask leaves out may hold anything: the device fills them with noise.
"""

from __future__ import annotations

import hashlib
import random
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stowage.core.copy_plan import CopyPlan
from stowage.core.geometry import Geometry, Group, Kind, SlabClass, slab_of_groups
from stowage.errors import TransferError
from stowage.testing.sim.fault_profile import FaultProfile

CACHED_MAX: Final = 1 << 16
_known: dict[tuple[bytes, int, int], bytes] = {}


class Violation(AssertionError):
    """A promise was broken. The simulator's only way to fail."""


def block_bytes(key: bytes, block: int, length: int) -> bytes:
    """The only bytes that block `block` of the chunk `key` may ever have: bfloat16 of few exponents, and noise."""
    wanted = (key, block, length)
    found = _known.get(wanted)
    if found is None:
        if len(_known) >= CACHED_MAX:
            _known.clear()
        drawn = np.frombuffer(hashlib.shake_128(key + block.to_bytes(2, "little")).digest(length), np.uint8).copy()
        drawn[1::2] = drawn[1::2] % 8 // 2 + 0x3C
        found = _known[wanted] = drawn.tobytes()
    return found


def draw_geometry(chance: random.Random) -> Geometry:
    """Full attention always; a sliding, a chunked and a recurrent group each in some worlds. Boundaries every 16."""
    shapes: list[tuple[Kind, int, int, int]] = [(Kind.FULL, 8, chance.choice((1, 2, 4)), 0)]
    if chance.random() < 0.5:
        shapes.append((Kind.SLIDING, 4, chance.choice((2, 4)), chance.choice((6, 20, 40))))
    if chance.random() < 0.2:
        shapes.append((Kind.CHUNKED, 8, 2, 32))
    if chance.random() < 0.5:
        shapes.append((Kind.RECURRENT, 16, 1, 0))
    sizes = [chance.choice((64, 1000, 1024, 2048, 4096, 5000)) for _ in shapes]
    return Geometry(
        tuple(
            Group(number, kind, tokens, blocks, size, window)
            for number, ((kind, tokens, blocks, window), size) in enumerate(zip(shapes, sizes, strict=True))
        )
    )


class Device:
    """Blocks of every group, row 0 being the null block, and copies to and from the arena that may fail."""

    def __init__(
        self,
        geometry: Geometry,
        slabs: tuple[SlabClass, ...],
        arena: NDArray[np.uint8],
        fault_profile: FaultProfile,
        rows: int,
    ) -> None:
        self._geometry = geometry
        self._slab_of = slab_of_groups(slabs)
        self._arena = arena
        self._fault_profile = fault_profile
        self._storage = [np.empty((rows, group.bytes_per_block), np.uint8) for group in geometry.groups]
        self._free = [list(range(rows - 1, 0, -1)) for _ in geometry.groups]

    def take(self, group: int, count: int) -> list[int]:
        """Rows with noise in them, as a device's fresh blocks have."""
        rows = [self._free[group].pop() for _ in range(count)]
        self._storage[group][rows] = 0xAA
        return rows

    def give(self, group: int, rows: list[int]) -> None:
        """Rows that nobody needs any more."""
        self._free[group].extend(rows)

    def rows_taken(self) -> int:
        """Rows that somebody holds."""
        return sum(len(rows) - 1 - len(free) for rows, free in zip(self._storage, self._free, strict=True))

    def compute(self, group: int, row: int, key: bytes, block: int) -> None:
        """What a forward pass leaves in a block."""
        size = self._geometry.groups[group].bytes_per_block
        self._storage[group][row] = np.frombuffer(block_bytes(key, block, size), np.uint8)

    def verify(self, group: int, row: int, key: bytes, block: int) -> None:
        """Raises Violation unless the block holds exactly what it must."""
        size = self._geometry.groups[group].bytes_per_block
        if self._storage[group][row].tobytes() != block_bytes(key, block, size):
            raise Violation(f"block {block} of chunk {key.hex()[:12]} (group {group}) came back with other bytes")

    def store(self, plan: CopyPlan) -> None:
        """Device to arena. Raises TransferError, half-way through, when the copy fails."""
        self._copy(plan, "copy_out_fails", True)

    def load(self, plan: CopyPlan) -> None:
        """Arena to device. Raises TransferError, half-way through, when the copy fails."""
        self._copy(plan, "copy_in_fails", False)

    def _copy(self, plan: CopyPlan, fault: str, out: bool) -> None:
        fails = self._fault_profile.strikes(fault)
        slab, storage = self._slab_of[plan.group], self._storage[plan.group]
        size = storage.shape[1]
        copies = list(zip(plan.blocks.tolist(), plan.slots.tolist(), plan.offsets.tolist(), strict=True))
        for row, slot, offset in copies[: len(copies) // 2] if fails else copies:
            begin = slab.slot_offset_bytes(slot) + offset * size
            if out:
                self._arena[begin : begin + size] = storage[row]
            else:
                storage[row] = self._arena[begin : begin + size]
        if fails:
            raise TransferError("the copy failed")
