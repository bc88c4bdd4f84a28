"""A table in shared memory that tells other engines of the machine which chunk is ready in which slot of a host arena.
Read without a lock.

    changes | serials [slots + 1] | masks [slots + 1] | offsets [slots] | keys [slots, 32]        little-endian

Owns the memory, which has no name in any file system and ends with its process. The owner's ledger writes it: a slot's
mask is 0 while its bytes may change, and its serial number rises each time it is given to a chunk, before the mask is
set. So a reader that finds the same serial number, and a mask that is not 0, before and after it has copied a slot
has copied the chunk whole (x86-64 and its order of memory; a call of the system lies between any two of the steps).
"""

from __future__ import annotations

import mmap
import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stowage.core.geometry import SlabClass
from stowage.core.key import KEY_BYTES

_MAGIC = b"stowage host 1\0\0"
HEADER_BYTES = 48
"""Magic, the name of this table, and how many slots there are."""


@dataclass(frozen=True)
class Layout:
    """Where the parts of a table of so many slots begin."""

    slots: int

    @property
    def serials(self) -> int:
        return HEADER_BYTES + 8

    @property
    def masks(self) -> int:
        return self.serials + 8 * (self.slots + 1)

    @property
    def offsets(self) -> int:
        return self.masks + 8 * (self.slots + 1)

    @property
    def keys(self) -> int:
        return self.offsets + 8 * self.slots

    @property
    def nbytes(self) -> int:
        return self.keys + KEY_BYTES * self.slots


class HostTable:
    """The owner's side: arrays that a ledger uses in the place of its own."""

    def __init__(self, slabs: Sequence[SlabClass]) -> None:
        layout = Layout(sum(slab.slots for slab in slabs))
        self.name = uuid.uuid4().bytes
        self._file = os.memfd_create("stowage-table", os.MFD_CLOEXEC)
        os.ftruncate(self._file, layout.nbytes)
        self._memory = mmap.mmap(self._file, layout.nbytes, flags=mmap.MAP_SHARED)
        self.changes = np.frombuffer(self._memory, np.int64, 1, HEADER_BYTES)
        self.serials = np.frombuffer(self._memory, np.int64, layout.slots + 1, layout.serials)
        self.masks = np.frombuffer(self._memory, np.uint64, layout.slots + 1, layout.masks)
        offsets = np.frombuffer(self._memory, np.int64, layout.slots, layout.offsets)
        offsets[:] = np.concatenate([slab.slot_offsets_bytes for slab in slabs])
        keys = np.frombuffer(self._memory, np.uint8, layout.slots * KEY_BYTES, layout.keys)
        self.keys = keys.reshape(layout.slots, KEY_BYTES)
        self._memory[:HEADER_BYTES] = _MAGIC + self.name + layout.slots.to_bytes(16, "little")

    @property
    def path(self) -> str:
        """How others open it."""
        return f"/proc/{os.getpid()}/fd/{self._file}"

    def close(self) -> None:
        """Nobody finds it any more."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def read_header(file: int, name: bytes) -> Layout | None:
    """Of the table of that name; ``None`` when the file is something else."""
    header = os.pread(file, HEADER_BYTES, 0)
    if header[:32] != _MAGIC + name:
        return None
    return Layout(int.from_bytes(header[32:], "little"))


class Snapshot:
    """What a neighbour's table said when it was read: maybe torn, never believed without `confirm`."""

    def __init__(self, file: int, layout: Layout) -> None:
        self._layout = layout
        self.changes = read_changes(file)
        content = os.pread(file, layout.nbytes, 0)
        masks = np.frombuffer(content, np.uint64, layout.slots, layout.masks)
        ready = np.flatnonzero(masks)
        keys = content[layout.keys :]
        self.slots = {keys[at * KEY_BYTES : (at + 1) * KEY_BYTES]: at for at in ready.tolist()}
        self.masks = (
            dict(zip(self.slots, masks[ready].tolist(), strict=True))
            if len(self.slots) == len(ready)
            else {key: int(masks[at]) for key, at in self.slots.items()}
        )


def read_changes(file: int) -> int:
    """A number that is another one when a chunk has come since."""
    return int.from_bytes(os.pread(file, 8, HEADER_BYTES), "little")


class Reader:
    """Reads one slot of a table without a lock: `begin`, then its bytes, then `confirm`."""

    def __init__(self, file: int, layout: Layout) -> None:
        self._file = file
        self._layout = layout

    def _number(self, begin: int, slot: int) -> int:
        return int.from_bytes(os.pread(self._file, 8, begin + 8 * slot), "little")

    def begin(self, slot: int, key: bytes) -> tuple[int, int, int] | None:
        """Serial number, mask and offset, while the slot holds that chunk."""
        layout = self._layout
        serial, mask = self._number(layout.serials, slot), self._number(layout.masks, slot)
        found = os.pread(self._file, KEY_BYTES, layout.keys + KEY_BYTES * slot)
        return (serial, mask, self._number(layout.offsets, slot)) if mask and found == key else None

    def confirm(self, slot: int, serial: int) -> bool:
        """Whether it was the same chunk all the time since `begin`."""
        return self._number(self._layout.masks, slot) != 0 and self._number(self._layout.serials, slot) == serial
