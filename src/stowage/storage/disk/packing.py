"""Packs chunks before they are written, where that pays.

Packed payloads are whole pages, so that direct I/O takes them from where they are. They lie one behind the other in
memory that is used again and again: a buffer is lent until all chunks in it are written. Some threads pack what comes
next while what was packed is written. Whether packing pays is decided before it is begun, by what chunks before took
packed and by measured rates (`packing_rates`). What was packed and takes fewer bytes is written so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import accumulate
from typing import Final

from stowage.core import lossless
from stowage.core.geometry import PAGE_BYTES, round_up
from stowage.native.memory import pages
from stowage.storage.counters import TierCounters
from stowage.storage.disk.packing_rates import Meter, PackingRates
from stowage.storage.format.compression import Compression

GROUP_BYTES: Final = 8 << 20
"""Chunks of so many bytes, or a longer one, are packed together."""
MEMORY_BYTES: Final = 96 << 20
"""That packed chunks lie in until they are written. It is used again: new memory is slow."""
PROBED: Final = 32
"""Where chunks take too many bytes packed, one in so many is packed all the same: others may come."""
USUAL_SHARE: Final = 0.7
"""Of their bytes that keys and values take packed (docs/benchmarks.md, "Lossless compression")."""
_NEW_CHUNK_MAX: Final = 0.5
"""How much a long chunk counts at most for what the next one is taken to be."""


class Packing:
    """Payloads to pack into a buffer, end to end, by the first thread to call `work`. `meter`, if any, is told."""

    def __init__(self, payloads: list[memoryview], tried: list[bool], buffer: memoryview, meter: Meter | None) -> None:
        self.payloads = payloads
        self.tried = tried
        self.buffer = buffer
        self._meter = meter
        self._begun = threading.Lock()
        self._ended = threading.Event()
        self._packed: list[memoryview] = []
        self._failure: BaseException | None = None

    def work(self) -> None:
        """Packs, unless another thread does or did. Any thread; most of it without the interpreter's lock."""
        if not self._begun.acquire(blocking=False):
            return
        raw_bytes = sum(payload.nbytes for payload, is_tried in zip(self.payloads, self.tried, strict=True) if is_tried)
        begun = self._meter.begin(raw_bytes) if self._meter is not None else 0.0
        try:
            self._pack()
        except BaseException as failure:  # noqa: BLE001 - raised where the result is asked for
            self._failure = failure
        finally:
            if self._meter is not None:
                self._meter.end(begun, raw_bytes)
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
    """For one thread, the tier's writer. `is_late`: stores queue up; it and `rates` count with `is_auto` alone."""

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
        tried = [self._is_tried(payload.nbytes) for payload in payloads]
        buffer, is_new = self._buffer(sum(round_up(payload.nbytes) for payload in payloads))
        # New memory costs more than packing into it does, and only once.
        return Packing(payloads, tried, buffer, None if is_new else self._rates.packing)

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
        packed_bytes = round(raw_bytes * self._share)  # as far as chunks before it tell
        if packed_bytes > lossless.worth_bytes(raw_bytes):
            self._left_alone += 1
            return self._left_alone % PROBED == 0
        self._left_alone = 0
        return not self._is_auto or self._rates.wants(raw_bytes, packed_bytes, self._is_late())

    @property
    def is_full(self) -> bool:
        """Whether something has to be given back before more is packed."""
        return self._lent_bytes >= MEMORY_BYTES

    def _buffer(self, wanted: int) -> tuple[memoryview, bool]:
        """The one that was used last of those that are large enough. Whether it is new."""
        fitting = [at for at, free in enumerate(self._free) if free.nbytes >= wanted]
        buffer = self._free.pop(fitting[-1]) if fitting else pages(max(wanted, GROUP_BYTES))
        self._lent_bytes += buffer.nbytes
        return buffer, not fitting

    def give_back(self, buffer: memoryview) -> None:
        """Nothing in it is needed any more."""
        self._lent_bytes -= buffer.nbytes
        self._free.append(buffer)
        while sum(free.nbytes for free in self._free) > MEMORY_BYTES:
            self._free.pop(0)
