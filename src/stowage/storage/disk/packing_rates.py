"""Whether chunks are packed before they are written, by what was measured here: packing must never cost time.

    packed --- loads of packed chunks take longer than of raw ones -----> left raw
       ^                                                                     |
       '--- those that lie packed, or are packed to see, take no longer -----'

Chunks are packed until enough of them have been loaded to judge that. Each state lasts until as much has been measured
since the last judgement, and says otherwise. While chunks are left raw, one stretch in 32 of their bytes is packed all
the same: long enough to be packed by all threads that do, and to be read and unpacked as if everything were packed.

Where stores queue up the same is asked of packing itself: it has to keep up with the disk.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

PROBED_BYTES: Final = 1 << 30
PROBE_BYTES: Final = PROBED_BYTES // 32
"""Of so many bytes that are to be left raw, the last ones are packed."""
JUDGED_BYTES: Final = 128 << 20
"""Chunks are packed until so many raw bytes, packed and loaded, or packed and stored, are judged."""
JUDGED_PROBE_BYTES: Final = PROBE_BYTES // 2
"""While they are left raw, so many are enough: what is packed to see is not loaded in one piece."""


class Meter:
    """What a byte takes of something that all share who use it at a time: a disk, or the processor's cores. By the
    clock, so whatever takes a core from packing counts.

    While N bytes are in flight, each of them has 1/N of every second. So a short read that waits for a batch of long
    ones takes no longer than these, byte by byte. Any thread.
    """

    def __init__(self, timer: Callable[[], float]) -> None:
        self._timer = timer
        self._lock = threading.Lock()
        self._now_s = 0.0
        self._in_flight_bytes = 0
        self._byte_s = 0.0  # of one byte that had been in flight all the time
        self._sums = {True: (0.0, 0), False: (0.0, 0)}

    def begin(self, nbytes: int) -> float:
        """So many bytes are in flight from now on. `end` takes what it returns."""
        with self._lock:
            self._go_on()
            self._in_flight_bytes += nbytes
            return self._byte_s

    def end(self, begun: float, nbytes: int, packed: bool | None = True) -> None:
        """They are not any more. `packed`: whether they are, or were; None: they say nothing of either."""
        with self._lock:
            self._go_on()
            self._in_flight_bytes -= nbytes
            byte_s = self._byte_s - begun
            if packed is not None and byte_s > 0:  # the clock does not stand still
                seconds, measured = self._sums[packed]
                self._sums[packed] = seconds + nbytes * byte_s, measured + nbytes

    def _go_on(self) -> None:
        now_s = self._timer()
        if self._in_flight_bytes:
            self._byte_s += (now_s - self._now_s) / self._in_flight_bytes
        self._now_s = now_s

    def measured_bytes(self, packed: bool = True) -> int:
        """That were measured since `forget`."""
        return self._sums[packed][1]

    def seconds(self, packed: bool = True) -> float:
        """For one of these. 0: there are none."""
        seconds, measured = self._sums[packed]
        return seconds / measured if measured else 0.0

    def forget(self) -> None:
        """What was measured until now does not count any more."""
        with self._lock:
            self._sums = dict.fromkeys(self._sums, (0.0, 0))


class _Choice:
    """Whether chunks are packed: yes, until meters judge, when the first has measured enough. For one thread."""

    def __init__(self, *meters: Meter) -> None:
        self._meters = meters
        self._is_packed = True
        self._left_bytes = 0

    def asks(self) -> bool:
        """Whether enough was measured: then `judge` follows."""
        return self._meters[0].measured_bytes() >= (JUDGED_BYTES if self._is_packed else JUDGED_PROBE_BYTES)

    def judge(self, is_packed: bool) -> None:
        """From now on so; what was measured is used up."""
        if is_packed != self._is_packed:
            self._is_packed, self._left_bytes = is_packed, 0
        for meter in self._meters:
            meter.forget()

    def next(self, raw_bytes: int) -> bool:
        """Whether the next so many bytes are packed."""
        if not self._is_packed:
            self._left_bytes += raw_bytes
        return self._is_packed or (self._left_bytes - 1) % PROBED_BYTES >= PROBED_BYTES - PROBE_BYTES


class PackingRates:
    """Measured rates of one disk tier, and whether it packs. `reading` and `writing` count bytes as they lie,
    `unpacking` and `packing` raw ones. Whoever does one of these tells its meter, in any thread; `wants` is for one.
    """

    def __init__(self, timer: Callable[[], float]) -> None:
        self.reading, self.unpacking, self.writing, self.packing = (Meter(timer) for _ in range(4))
        self._loads = _Choice(self.unpacking, self.reading)
        self._stores = _Choice(self.packing, self.writing)

    def wants(self, raw_bytes: int, packed_bytes: int, is_late: bool) -> bool:
        """Whether the next chunk is packed, which would take so many bytes then. `is_late`: stores queue up."""
        if self._loads.asks():
            self._loads.judge(self._pays(packed_bytes / raw_bytes))
        if self._stores.asks():
            self._stores.judge(self._keeps_up())
        return self._loads.next(raw_bytes) and (not is_late or self._stores.next(raw_bytes))

    def _pays(self, share: float) -> bool:
        """Whether chunks are there sooner packed: while one is unpacked, the next one is read."""
        read_s = self.reading.seconds(True) or self.reading.seconds(False)
        # No raw one may have been read, or at another time: the smaller one is the careful guess.
        raw_s = min(self.reading.seconds(False) or read_s, read_s)
        return max(read_s * share, self.unpacking.seconds()) <= raw_s

    def _keeps_up(self) -> bool:
        """Whether bytes are packed as quickly as the disk writes them."""
        return not self.writing.measured_bytes() or self.packing.seconds() <= self.writing.seconds()
