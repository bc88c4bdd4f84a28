"""Packs chunks before they are written, and decides whether that pays.

Packed payloads are whole pages, so that direct I/O takes them from where they are. Their memory is used again and
again: a room is lent until all chunks in it are written. Whether packing pays is decided by measure, as loading
against computing is: what a reader takes to unpack has to be less than what it would take to read the bytes that
packing saved.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
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

PackAtOnce = Callable[
    [Callable[[tuple[memoryview, memoryview]], int], Sequence[tuple[memoryview, memoryview]]], Iterator[int]
]
"""`System.pack_at_once`."""


class UnpackRates:
    """What reading a byte takes here, and what unpacking one does. Any thread; what is lost between two is little.

    Reading counts for all readers together, as what they share is the disk. Unpacking counts as one of them finds it,
    by the clock: whatever takes a core from it counts, so that packing is left alone where processors are what lacks.
    """

    def __init__(self, timer: Callable[[], float]) -> None:
        self.timer = timer
        self._lock = threading.Lock()
        self._reading = 0
        self._read_s = 0.0
        self._unpack_s = 0.0

    def begin(self) -> int:
        """A reader begins to read a packed run: how many are doing that now. `end` follows."""
        with self._lock:
            self._reading += 1
            return self._reading

    def end(self) -> None:
        """It has been read."""
        with self._lock:
            self._reading -= 1

    def add(self, run: Run, readers: int, read_s: float, unpack_s: float) -> None:
        """A run was read, one of so many at that time, and unpacked."""
        if read_s <= 0 or unpack_s <= 0:
            return  # a clock that stands still
        raw = sum(buffer.nbytes for buffer, packed in zip(run.buffers, run.packed, strict=True) if packed)
        self._read_s = _mixed(self._read_s, read_s / sum(run.lengths) / max(1, readers))
        self._unpack_s = _mixed(self._unpack_s, unpack_s / raw)

    def pays(self, raw_bytes: int, packed_bytes: int) -> bool:
        """Whether a chunk is there sooner packed. Until something was measured: yes."""
        return self._unpack_s * raw_bytes <= self._read_s * (raw_bytes - packed_bytes)


def _mixed(old: float, new: float) -> float:
    return new if old == 0.0 else old + _NEW_SHARE * (new - old)


def _pack(work: tuple[memoryview, memoryview]) -> int:
    """Packs a payload into a room; the length there in whole pages, 0 where that saves none. Any thread."""
    payload, room = work
    length = payload.nbytes
    most = min(lossless.worth_bytes(length), round_up(length) - PAGE_BYTES)
    packed = lossless.pack(payload, room[:most]) if most > 0 else 0
    whole = round_up(packed)
    room[packed:whole] = bytes(whole - packed)
    return whole


class Packer:
    """Used by one thread, the tier's writer. `is_late`: stores come sooner than they are written; without `rates` that
    changes nothing.
    """

    def __init__(
        self,
        counters: TierCounters,
        rates: UnpackRates | None,
        at_once: PackAtOnce,
        is_late: Callable[[], bool] = lambda: False,
    ) -> None:
        self._counters = counters
        self._rates = rates
        self._at_once = at_once
        self._is_late = is_late
        self._free: list[memoryview] = []
        self._failed = 0

    @classmethod
    def wanted(
        cls,
        compression: Compression,
        counters: TierCounters,
        rates: UnpackRates,
        at_once: PackAtOnce,
        is_late: Callable[[], bool],
    ) -> Packer | None:
        """None: chunks are written as they are."""
        if not compression.is_wanted:
            return None
        return cls(counters, rates if compression is Compression.AUTO else None, at_once, is_late)

    def pack(self, payloads: list[memoryview]) -> tuple[memoryview | None, list[memoryview], list[bool]]:
        """What is to be written of each, and whether that is packed. The memory that packed ones lie in, to be given
        back, if there are any.
        """
        *starts, total = accumulate((round_up(payload.nbytes) for payload in payloads), initial=0)
        room = self._room(total)
        tried = [self._is_tried() for _ in payloads]
        work = [
            (payload, room[start:]) if is_tried else (payload[:0], room[:0])
            for payload, start, is_tried in zip(payloads, starts, tried, strict=True)
        ]
        lengths = list(self._at_once(_pack, work))
        paying = [self._pays(*each) for each in zip(payloads, lengths, tried, strict=True)]
        written = [
            room[start : start + length] if pays else payload
            for payload, start, length, pays in zip(payloads, starts, lengths, paying, strict=True)
        ]
        if not any(paying):
            self.give_back(room)
            return None, written, paying
        self._counters.add("packed", sum(paying))
        saved = sum(payload.nbytes for payload in payloads) - sum(part.nbytes for part in written)
        self._counters.add("packed_bytes_saved", saved)
        return room, written, paying

    def _is_tried(self) -> bool:
        """Whether the next one is worth trying."""
        if self._rates is not None and self._is_late():
            return False
        if self._failed < HOPELESS:
            return True
        self._failed += 1
        return self._failed % HOPELESS == 0

    def _pays(self, payload: memoryview, packed_bytes: int, is_tried: bool) -> bool:
        if not is_tried:
            return False
        saves = packed_bytes > 0
        pays = saves and (self._rates is None or self._rates.pays(payload.nbytes, packed_bytes))
        is_probe = saves and self._failed > HOPELESS  # packed all the same: whoever reads it measures anew
        self._failed = 0 if pays else self._failed + (self._failed < HOPELESS)
        return pays or is_probe

    def _room(self, wanted: int) -> memoryview:
        if wanted > ROOM_BYTES:
            return pages(wanted)
        return self._free.pop() if self._free else pages(ROOM_BYTES)

    def give_back(self, room: memoryview) -> None:
        """Nothing in it is needed any more."""
        if room.nbytes == ROOM_BYTES and len(self._free) < ROOMS_KEPT:
            self._free.append(room)
