"""Packs chunks before they are written, and decides whether that pays.

Packed payloads are whole pages, so that direct I/O takes them from where they are. Their memory is used again and
again: a buffer is lent until all chunks in it are written. Whether packing pays is decided by measure, as loading
against computing is: packed chunks have to be loaded sooner than others, and where stores queue up, packing has to keep
up with the disk.
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

__all__ = ["BUFFER_BYTES", "Packer", "PackingRates"]

BUFFER_BYTES: Final = 8 << 20
"""Chunks of so many bytes, or a longer one, are packed together."""
BUFFERS_KEPT: Final = 12
HOPELESS: Final = 32
"""So many chunks in a row that did not pay, and only one in as many is tried."""
_NEW_SHARE: Final = 0.1
"""How much a new measurement counts."""
_MEASURED_BYTES: Final = 1 << 20
"""Packing less at a time is mostly waiting for threads."""
_UNPACKING_OF_PACKING: Final = 0.6
"""Of the time that packing takes (docs/benchmarks.md, "Lossless compression")."""

PackAtOnce = Callable[
    [Callable[[tuple[memoryview, memoryview]], int], Sequence[tuple[memoryview, memoryview]]], Iterator[int]
]
"""`System.pack_at_once`."""


class PackingRates:
    """What a byte takes here that is read, unpacked, packed or written. Any thread; what is lost between two is little.

    By the clock, so whatever takes a core from packing counts: it is left alone where processors are what lacks.
    Reading and unpacking count for all readers together, since they share the disk and the cores; writing for all
    requests that are in flight.
    """

    def __init__(self, timer: Callable[[], float]) -> None:
        self.timer = timer
        self._lock = threading.Lock()
        self._active = self._reading = self._writing = 0
        self._raw_s = self._alone_s = self._read_s = self._unpack_s = self._pack_s = self._write_s = 0.0

    def begin_load(self) -> tuple[int, int]:
        """A reader begins with a run: how many have one now, and how many of those are reading. `read` and `end_load`
        follow.
        """
        with self._lock:
            self._active += 1
            self._reading += 1
            return self._active, self._reading

    def read(self) -> None:
        """A run was read."""
        with self._lock:
            self._reading -= 1

    def end_load(self) -> None:
        """It is in its buffers."""
        with self._lock:
            self._active -= 1

    def add_load(self, run: Run, at_once: tuple[int, int], read_s: float, unpack_s: float) -> None:
        """What the run took, one of so many at that time. One with packed chunks and others says nothing of either."""
        if read_s <= 0 or any(run.packed) != all(run.packed):
            return  # a clock that stands still, or both kinds
        active, reading = (max(1, count) for count in at_once)
        each_s = read_s / sum(run.lengths)
        if not any(run.packed):
            self._raw_s = _mixed(self._raw_s, each_s / active)
        elif unpack_s > 0:
            self._alone_s = _mixed(self._alone_s, each_s / reading)
            self._read_s = _mixed(self._read_s, each_s / active)
            self._unpack_s = _mixed(self._unpack_s, unpack_s / sum(buffer.nbytes for buffer in run.buffers) / active)

    def begin_write(self) -> int:
        """A request begins: how many are in flight now. `end_write` follows."""
        with self._lock:
            self._writing += 1
            return self._writing

    def end_write(self, at_once: int, nbytes: int, seconds: float) -> None:
        """It has ended."""
        with self._lock:
            self._writing -= 1
        if seconds > 0:
            self._write_s = _mixed(self._write_s, seconds / nbytes / at_once)

    def add_pack(self, raw_bytes: int, seconds: float) -> None:
        """So many bytes were packed, or tried."""
        if seconds > 0 and raw_bytes >= _MEASURED_BYTES:
            self._pack_s = _mixed(self._pack_s, seconds / raw_bytes)

    def keeps_up(self) -> bool:
        """Whether bytes are packed as quickly as the disk would write them. Until something was measured: yes."""
        return not self._write_s or self._pack_s <= self._write_s

    def pays(self, raw_bytes: int, packed_bytes: int) -> bool:
        """Whether a chunk is there sooner packed. Before anything was loaded, what storing takes stands for it; before
        anything was measured: yes.
        """
        if not self._read_s:
            unpack_s = _UNPACKING_OF_PACKING * self._pack_s
            return unpack_s * raw_bytes <= self._write_s * (raw_bytes - packed_bytes) if self._write_s else True
        # Neither is measured while all chunks are in the other form: the smaller one is the careful guess.
        raw_s = min(self._raw_s or self._alone_s, self._alone_s)
        return self._read_s * packed_bytes + self._unpack_s * raw_bytes <= raw_s * raw_bytes


def _mixed(old: float, new: float) -> float:
    return new if old == 0.0 else old + _NEW_SHARE * (new - old)


def _pack(work: tuple[memoryview, memoryview]) -> int:
    """Packs a payload into a buffer; the length there in whole pages, 0 where that saves none. Any thread."""
    payload, buffer = work
    length = payload.nbytes
    most = min(lossless.worth_bytes(length), round_up(length) - PAGE_BYTES)
    packed = lossless.pack(payload, buffer[:most]) if most > 0 else 0
    whole = round_up(packed)
    buffer[packed:whole] = bytes(whole - packed)
    return whole


class Packer:
    """Used by one thread, the tier's writer. `is_late`: stores queue up; without `rates` that changes nothing."""

    def __init__(
        self,
        counters: TierCounters,
        rates: PackingRates | None,
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
        rates: PackingRates,
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
        buffer = self._buffer(total)
        tried = [self._is_tried() for _ in payloads]
        work = [
            (payload, buffer[start:]) if is_tried else (payload[:0], buffer[:0])
            for payload, start, is_tried in zip(payloads, starts, tried, strict=True)
        ]
        lengths = self._packed_lengths(work)
        paying = [self._pays(*each) for each in zip(payloads, lengths, tried, strict=True)]
        written = [
            buffer[start : start + length] if pays else payload
            for payload, start, length, pays in zip(payloads, starts, lengths, paying, strict=True)
        ]
        if not any(paying):
            self.give_back(buffer)
            return None, written, paying
        self._counters.add("packed", sum(paying))
        saved = sum(payload.nbytes for payload in payloads) - sum(part.nbytes for part in written)
        self._counters.add("packed_bytes_saved", saved)
        return buffer, written, paying

    def _is_tried(self) -> bool:
        """Whether the next one is worth trying."""
        holds_up = self._rates is not None and self._is_late() and not self._rates.keeps_up()
        if not holds_up and self._failed < HOPELESS:
            return True
        self._failed += 1
        return self._failed % HOPELESS == 0

    def _packed_lengths(self, work: list[tuple[memoryview, memoryview]]) -> list[int]:
        """What each payload takes packed, in whole pages; 0: it is not."""
        if self._rates is None:
            return list(self._at_once(_pack, work))
        began_s = self._rates.timer()
        lengths = list(self._at_once(_pack, work))
        self._rates.add_pack(sum(payload.nbytes for payload, _ in work), self._rates.timer() - began_s)
        return lengths

    def _pays(self, payload: memoryview, packed_bytes: int, is_tried: bool) -> bool:
        if not is_tried:
            return False
        saves = packed_bytes > 0
        pays = saves and (self._rates is None or self._rates.pays(payload.nbytes, packed_bytes))
        is_probe = saves and self._failed > HOPELESS  # packed all the same: whoever reads it measures anew
        self._failed = 0 if pays else self._failed + (self._failed < HOPELESS)
        return pays or is_probe

    def _buffer(self, wanted: int) -> memoryview:
        if wanted > BUFFER_BYTES:
            return pages(wanted)
        return self._free.pop() if self._free else pages(BUFFER_BYTES)

    def give_back(self, buffer: memoryview) -> None:
        """Nothing in it is needed any more."""
        if buffer.nbytes == BUFFER_BYTES and len(self._free) < BUFFERS_KEPT:
            self._free.append(buffer)
