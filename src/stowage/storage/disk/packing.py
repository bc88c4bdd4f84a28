"""Packs chunks before they are written, and decides whether that pays.

Packed payloads are whole pages, so that direct I/O takes them from where they are. They lie one behind the other in
memory that is used again and again: a buffer is lent until all chunks in it are written. Some threads pack what comes
next while what was packed is written. Whether packing pays is decided before it is begun, by measure, as loading
against computing is: chunks that pack as those before them did have to be loaded sooner than others, and where stores
queue up, packing has to keep up with the disk. What was packed and takes fewer bytes is written so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import accumulate
from typing import Final

from stowage.core import lossless
from stowage.storage.counters import TierCounters
from stowage.storage.disk.files import pages
from stowage.storage.disk.read_plan import Run
from stowage.storage.format.compression import Compression
from stowage.storage.format.segment import PAGE_BYTES, round_up

__all__ = ["GROUP_BYTES", "Packer", "Packing", "PackingRates"]

GROUP_BYTES: Final = 8 << 20
"""Chunks of so many bytes, or a longer one, are packed together."""
MEMORY_BYTES: Final = 96 << 20
"""That packed chunks lie in until they are written. It is used again: new memory is slow."""
PROBED: Final = 32
"""Where packing does not pay, one chunk in so many is packed all the same: bytes and rates may be others by now."""
USUAL_SHARE: Final = 0.7
"""Of their bytes that keys and values take packed (docs/benchmarks.md, "Lossless compression")."""
_NEW_SHARE: Final = 0.1
"""How much a new measurement counts."""
_NEW_CHUNK_MAX: Final = 0.5
"""How much a long chunk counts at most for what the next one is taken to be."""
_MEASURED_BYTES: Final = 1 << 20
"""Packing less at a time says little."""
_UNPACKING_OF_PACKING: Final = 0.6
"""Of the time that packing takes (docs/benchmarks.md, "Lossless compression")."""


class PackingRates:
    """What a byte takes here that is read, unpacked, packed or written. Any thread; what is lost between two is little.

    By the clock, so whatever takes a core from packing counts: it is left alone where processors are what lacks. All
    that do the same at a time share the disk, or the cores.
    """

    def __init__(self, timer: Callable[[], float]) -> None:
        self.timer = timer
        self._lock = threading.Lock()
        self._reading = self._unpacking = self._writing = self._packing = 0
        self._raw_s = self._read_s = self._unpack_s = self._pack_s = self._write_s = 0.0

    def begin_read(self) -> int:
        """A reader begins with a run: how many read now. `end_read` follows."""
        with self._lock:
            self._reading += 1
            return self._reading

    def end_read(self, at_once: int, run: Run, seconds: float) -> None:
        """It was read. One with packed chunks and others says nothing of either."""
        with self._lock:
            self._reading -= 1
        each_s = seconds / sum(run.lengths) / at_once
        if seconds <= 0:
            return  # a clock that stands still
        if all(run.packed):
            self._read_s = _mixed(self._read_s, each_s)
        elif not any(run.packed):
            self._raw_s = _mixed(self._raw_s, each_s)

    def begin_unpack(self) -> int:
        """A reader begins to verify and unpack a run: how many do now. `end_unpack` follows."""
        with self._lock:
            self._unpacking += 1
            return self._unpacking

    def end_unpack(self, at_once: int, run: Run, seconds: float) -> None:
        """Its chunks are in their buffers."""
        with self._lock:
            self._unpacking -= 1
        if seconds > 0 and all(run.packed):
            nbytes = sum(buffer.nbytes for buffer in run.buffers)
            self._unpack_s = _mixed(self._unpack_s, seconds / nbytes / at_once)

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

    def begin_pack(self) -> int:
        """A thread begins to pack: how many do now. `end_pack` follows."""
        with self._lock:
            self._packing += 1
            return self._packing

    def end_pack(self, at_once: int, raw_bytes: int, seconds: float) -> None:
        """It has packed so many bytes, or tried to."""
        with self._lock:
            self._packing -= 1
        if seconds > 0 and raw_bytes >= _MEASURED_BYTES:
            self._pack_s = _mixed(self._pack_s, seconds / raw_bytes / at_once)

    def keeps_up(self) -> bool:
        """Whether bytes are packed as quickly as the disk would write them. Until something was measured: yes."""
        return not self._write_s or self._pack_s <= self._write_s

    def pays(self, raw_bytes: int, packed_bytes: int) -> bool:
        """Whether a chunk is there sooner packed: while one is unpacked, the next one is read. Before anything was
        loaded, what storing takes stands for it; before anything was measured: yes.
        """
        # Neither is measured while all chunks are in the other form: the smaller one is the careful guess.
        read_s, unpack_s = self._read_s, self._unpack_s
        if not unpack_s:
            read_s, unpack_s = self._write_s, _UNPACKING_OF_PACKING * self._pack_s
        raw_s = min(self._raw_s or read_s, read_s)
        return not read_s or max(read_s * packed_bytes, unpack_s * raw_bytes) <= raw_s * raw_bytes


def _mixed(old: float, new: float) -> float:
    return new if old == 0.0 else old + _NEW_SHARE * (new - old)


class Packing:
    """Payloads that are packed into a buffer, one behind the other, by whichever thread is the first to call `work`."""

    def __init__(self, payloads: list[memoryview], tried: list[bool], buffer: memoryview, rates: PackingRates) -> None:
        self.payloads = payloads
        self.tried = tried
        self.buffer = buffer
        self._rates = rates
        self._begun = threading.Lock()
        self._ended = threading.Event()
        self._packed: list[memoryview] = []
        self._failure: BaseException | None = None

    def work(self) -> None:
        """Packs, unless another thread does or did. Any thread; most of it without the interpreter's lock."""
        if not self._begun.acquire(blocking=False):
            return
        at_once, began_s = self._rates.begin_pack(), self._rates.timer()
        try:
            self._pack()
        except BaseException as failure:  # noqa: BLE001 - raised where the result is asked for
            self._failure = failure
        finally:
            raw_bytes = sum(
                payload.nbytes for payload, is_tried in zip(self.payloads, self.tried, strict=True) if is_tried
            )
            self._rates.end_pack(at_once, raw_bytes, self._rates.timer() - began_s)
            self._ended.set()

    def _pack(self) -> None:
        most = [
            _most(payload.nbytes) if is_tried else 0
            for payload, is_tried in zip(self.payloads, self.tried, strict=True)
        ]
        lengths = lossless.pack_frames(self.payloads, most, PAGE_BYTES, self.buffer)
        ends = accumulate(lengths)
        self._packed = [self.buffer[end - length : end] for length, end in zip(lengths, ends, strict=True)]

    def packed(self) -> list[memoryview]:
        """Each payload packed, whole pages; empty where that saves none, or was not tried. Waits for it."""
        self.work()
        self._ended.wait()
        if self._failure is not None:
            raise self._failure
        return self._packed


def _most(length: int) -> int:
    """The most bytes that a payload of that length may take packed: in whole pages that saves one. 0: it cannot."""
    return max(0, min(lossless.worth_bytes(length), round_up(length) - PAGE_BYTES))


class Packer:
    """Used by one thread, the tier's writer. `is_late`: stores queue up; without `is_auto` neither that nor `rates`
    changes anything.
    """

    def __init__(
        self,
        counters: TierCounters,
        rates: PackingRates,
        is_late: Callable[[], bool] = lambda: False,
        is_auto: bool = True,
        worth_a_thread_bytes: int = 1 << 20,
    ) -> None:
        self.worth_a_thread_bytes = worth_a_thread_bytes
        self._counters = counters
        self._rates = rates
        self._is_late = is_late
        self._is_auto = is_auto
        self._free: list[memoryview] = []
        self._lent_bytes = 0
        self._share = USUAL_SHARE
        self._left_alone = 0

    @classmethod
    def wanted(
        cls,
        compression: Compression,
        counters: TierCounters,
        rates: PackingRates,
        is_late: Callable[[], bool],
        worth_a_thread_bytes: int,
    ) -> Packer | None:
        """None: chunks are written as they are."""
        if not compression.is_wanted:
            return None
        return cls(counters, rates, is_late, compression is Compression.AUTO, worth_a_thread_bytes)

    def begin(self, payloads: list[memoryview]) -> Packing:
        """Payloads to be packed together: by `finish`, or by another thread before that."""
        buffer = self._buffer(sum(round_up(payload.nbytes) for payload in payloads))
        return Packing(payloads, [self._is_tried(payload.nbytes) for payload in payloads], buffer, self._rates)

    def finish(self, packing: Packing) -> tuple[memoryview | None, list[memoryview], list[bool]]:
        """What is to be written of each payload, and whether that is packed. The memory that packed ones lie in, to be
        given back, if there are any.
        """
        payloads, packed = packing.payloads, packing.packed()
        for payload, part, is_tried in zip(payloads, packed, packing.tried, strict=True):
            if is_tried:  # counts by its bytes, as trying it costs: a group of noise, and hardly another chunk is tried
                share = part.nbytes / payload.nbytes if part.nbytes else 1.0
                self._share += min(_NEW_CHUNK_MAX, payload.nbytes / GROUP_BYTES) * (share - self._share)
        is_packed = [part.nbytes > 0 for part in packed]
        if not any(is_packed):
            self.give_back(packing.buffer)
            return None, payloads, is_packed
        written = [part if part.nbytes else payload for payload, part in zip(payloads, packed, strict=True)]
        self._counters.add("packed", sum(is_packed))
        saved = sum(payload.nbytes for payload in payloads) - sum(part.nbytes for part in written)
        self._counters.add("packed_bytes_saved", saved)
        return packing.buffer, written, is_packed

    def _is_tried(self, raw_bytes: int) -> bool:
        """Whether the next one is worth packing, or is one of the few that are packed to see whether it is now."""
        if not _most(raw_bytes):
            return False
        if self._pays(raw_bytes):
            self._left_alone = 0
            return True
        self._left_alone += 1
        return self._left_alone % PROBED == 0

    def _pays(self, raw_bytes: int) -> bool:
        """As far as chunks before it tell."""
        packed_bytes = round(raw_bytes * self._share)
        if packed_bytes > lossless.worth_bytes(raw_bytes):
            return False
        if not self._is_auto:
            return True
        return self._rates.pays(raw_bytes, packed_bytes) and (not self._is_late() or self._rates.keeps_up())

    @property
    def is_full(self) -> bool:
        """Whether something has to be given back before more is packed."""
        return self._lent_bytes >= MEMORY_BYTES

    def _buffer(self, wanted: int) -> memoryview:
        """The one that was used last of those that are large enough."""
        fitting = [at for at, free in enumerate(self._free) if free.nbytes >= wanted]
        buffer = self._free.pop(fitting[-1]) if fitting else pages(max(wanted, GROUP_BYTES))
        self._lent_bytes += buffer.nbytes
        return buffer

    def give_back(self, buffer: memoryview) -> None:
        """Nothing in it is needed any more."""
        self._lent_bytes -= buffer.nbytes
        self._free.append(buffer)
        while sum(free.nbytes for free in self._free) > MEMORY_BYTES:
            self._free.pop(0)
