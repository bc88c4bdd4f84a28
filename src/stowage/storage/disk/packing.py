"""Packs chunks before they are written, and decides whether that pays.

Packed payloads are whole pages, so that direct I/O takes them from where they are. Their memory is used again and
again: a room is lent until all chunks in it are written. Whether packing pays is decided by measure, as loading
against computing is: what a reader takes to unpack has to be less than what it would take to read the bytes that
packing saved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from stowage.core import lossless
from stowage.storage.counters import TierCounters
from stowage.storage.disk.files import pages
from stowage.storage.disk.read_plan import Run
from stowage.storage.format.compression import Compression
from stowage.storage.format.segment import PAGE_BYTES, round_up

__all__ = ["ROOM_BYTES", "Packer", "UnpackRates"]

ROOM_BYTES: Final = 8 << 20
"""Chunks of so many bytes, or a longer one, are packed together."""
ROOMS_KEPT: Final = 8
HOPELESS: Final = 32
"""So many chunks in a row that did not pay, and only one in as many is tried."""
_NEW_SHARE: Final = 0.1
"""How much a new measurement counts."""


class UnpackRates:
    """What reading a byte takes here, and what unpacking one does. Any thread; what is lost between two is little.

    Both as one reader finds them while the others read: what takes a core from it counts.
    """

    def __init__(self, timer: Callable[[], float]) -> None:
        self.timer = timer
        self._read_s = 0.0
        self._unpack_s = 0.0

    def add(self, run: Run, read_s: float, unpack_s: float) -> None:
        """A run was read, and unpacked."""
        if read_s <= 0 or unpack_s <= 0:
            return  # a clock that stands still
        raw = sum(buffer.nbytes for buffer, packed in zip(run.buffers, run.packed, strict=True) if packed)
        self._read_s = _mixed(self._read_s, read_s / sum(run.lengths))
        self._unpack_s = _mixed(self._unpack_s, unpack_s / raw)

    def pays(self, raw_bytes: int, packed_bytes: int) -> bool:
        """Whether a chunk is there sooner packed. Until something was measured: yes."""
        return self._unpack_s * raw_bytes <= self._read_s * (raw_bytes - packed_bytes)


def _mixed(old: float, new: float) -> float:
    return new if old == 0.0 else old + _NEW_SHARE * (new - old)


class Packer:
    """Used by one thread, the tier's writer."""

    def __init__(self, counters: TierCounters, rates: UnpackRates | None) -> None:
        self._counters = counters
        self._rates = rates
        self._free: list[memoryview] = []
        self._failed = 0

    @classmethod
    def wanted(cls, compression: Compression, counters: TierCounters, rates: UnpackRates) -> Packer | None:
        """None: chunks are written as they are."""
        if not compression.is_wanted:
            return None
        return cls(counters, rates if compression is Compression.AUTO else None)

    def pack(self, payloads: list[memoryview]) -> tuple[memoryview | None, list[memoryview], list[bool]]:
        """What is to be written of each, and whether that is packed. The memory that packed ones lie in, to be given
        back, if there are any.
        """
        room = self._room(sum(round_up(payload.nbytes) for payload in payloads))
        at, saved = 0, 0
        written, packed = [], []
        for payload in payloads:
            length = self._pack(payload, room[at:])
            packed.append(length > 0)
            written.append(room[at : at + length] if length else payload)
            at += length
            saved += payload.nbytes - length if length else 0
        if not at:
            self.give_back(room)
            return None, written, packed
        self._counters.add("packed", sum(packed))
        self._counters.add("packed_bytes_saved", saved)
        return room, written, packed

    def _pack(self, payload: memoryview, room: memoryview) -> int:
        """The length in whole pages; 0: it does not pay."""
        if self._failed >= HOPELESS and self._failed % HOPELESS:
            self._failed += 1
            return 0
        length = payload.nbytes
        most = min(lossless.worth_bytes(length), round_up(length) - PAGE_BYTES)
        packed = lossless.pack(payload, room[:most]) if most > 0 else 0
        whole = round_up(packed)
        if not packed or (self._rates is not None and not self._rates.pays(length, whole)):
            self._failed += 1
            return 0
        self._failed = 0
        room[packed:whole] = bytes(whole - packed)
        return whole

    def _room(self, wanted: int) -> memoryview:
        if wanted > ROOM_BYTES:
            return pages(wanted)
        return self._free.pop() if self._free else pages(ROOM_BYTES)

    def give_back(self, room: memoryview) -> None:
        """Nothing in it is needed any more."""
        if room.nbytes == ROOM_BYTES and len(self._free) < ROOMS_KEPT:
            self._free.append(room)
