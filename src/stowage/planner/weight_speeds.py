"""Measures streaming weights from disk, how much that slows computing, and computing from a mapped file.

Runs in the process of ``compute``. A file is read repeatedly through the engine's own ring, in units of some matrices;
each unit is multiplied with not at all, or so often that computing takes about as long as reading. Then the same
weights are multiplied with in the page cache, and in memory.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stowage.native.memory import anonymous, in_huge_pages
from stowage.planner.storage import forget

_OUT, _IN, _MATRICES = 2048, 2048, 4
_UNIT_BYTES = _OUT * _IN * _MATRICES * 2
_SLOTS, _ROUNDS = 3, 3
_TIMEOUT_S = 60.0
ROWS = (1, 8, 128)
"""Rows of decoding steps, the smallest of which are bound by memory as reading is, and of a part of a prompt."""
_TIMES_MOST = 64
_FILLING_TIMES = 32
"""Multiplications that take long enough for the rest of the ring to be filled."""


def measure(path: Path, linear: Callable[[Any, Any], Any]) -> dict[str, Any]:
    """``stream_bytes_per_s``, ``overlap_loss`` and ``mapped_byte_s`` of ``Machine``. ``linear``: rows by a matrix."""
    import torch

    from stowage.weights.file import File
    from stowage.weights.reader import Read, Readers
    from stowage.weights.ring import Ring

    file, readers = File.open(path), Readers()
    units = file.length // _UNIT_BYTES
    ring = Ring(
        units,
        _SLOTS,
        _UNIT_BYTES,
        lambda unit, memory: [Read(file, unit * _UNIT_BYTES, memory[:_UNIT_BYTES])],
        readers,
        _TIMEOUT_S,
    )

    def multiply(memory: memoryview, rows: Any, times: int) -> None:
        matrices = torch.frombuffer(memory, dtype=torch.bfloat16).view(_MATRICES, _OUT, _IN)
        for at in range(times * _MATRICES):
            linear(rows, matrices[at % _MATRICES])

    def forward_s(rows: Any, times: int) -> float:
        """Seconds of a forward that reads each unit from disk and multiplies with it ``times`` times. The file is
        dropped from the page cache first, from which reads would be copied.
        """
        forget(file.fd)
        began_s = time.perf_counter()
        for unit in range(units):
            slot = ring.take(unit)
            multiply(slot.memory, rows, times)
            ring.give_back(unit)
        return time.perf_counter() - began_s

    def computing_s(rows: Any, times: int) -> float:
        """Seconds of the same when nothing is read because the ring is full: of one unit, scaled to all."""
        slot = ring.take(0)
        multiply(slot.memory, rows, _FILLING_TIMES)
        began_s = time.perf_counter()
        multiply(slot.memory, rows, times)
        elapsed_s = time.perf_counter() - began_s
        ring.give_back(0)
        return elapsed_s * units

    def loss(rows: Any) -> float:
        computing_s(rows, 1)
        once_s = statistics.median(computing_s(rows, 4) for _ in range(_ROUNDS)) / 4
        times = max(1, min(_TIMES_MOST, round(read_s / once_s)))
        both_s = statistics.median(forward_s(rows, times) for _ in range(_ROUNDS))
        alone_s = statistics.median(computing_s(rows, times) for _ in range(_ROUNDS))
        return min(max((both_s - alone_s) / read_s, 0.0), 1.0)

    try:
        forward_s(None, 0)
        read_s = statistics.median(forward_s(None, 0) for _ in range(_ROUNDS))
        losses = {count: loss(torch.full((count, _IN), 0.5, dtype=torch.bfloat16)) for count in ROWS}
        one = torch.full((1, _IN), 0.5, dtype=torch.bfloat16)
        mapped_byte_s = _mapped_byte_s(memoryview(file.view()), units, lambda memory: multiply(memory, one, 1))
    finally:
        if readers.close():
            ring.close()
        file.close()
    return {"stream_bytes_per_s": units * _UNIT_BYTES / read_s, "overlap_loss": losses, "mapped_byte_s": mapped_byte_s}


def _mapped_byte_s(mapped: memoryview, units: int, multiply: Callable[[memoryview], None]) -> float:
    """Extra seconds per byte of ``mapped``, compared with memory in huge pages."""
    with contextlib.closing(anonymous(units * _UNIT_BYTES)) as memory:
        in_huge_pages(memory)
        memory[:] = mapped[: units * _UNIT_BYTES]

        def seconds(where: memoryview) -> float:
            began_s = time.perf_counter()
            for unit in range(units):
                multiply(where[unit * _UNIT_BYTES : (unit + 1) * _UNIT_BYTES])
            return time.perf_counter() - began_s

        with memoryview(memory) as copied:
            pairs = [(seconds(mapped), seconds(copied)) for _ in range(2 * _ROUNDS)][1:]
        longer_s = statistics.median(there_s for there_s, _ in pairs) - statistics.median(here_s for _, here_s in pairs)
    return max(longer_s, 0.0) / (units * _UNIT_BYTES)
