"""Physical limits of this machine, measured beside the benchmark that is held against them."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import numpy as np
import torch

from stowage.native.memory import pages

MIB = 1 << 20


def memcpy_bytes_per_s(nbytes: int = 192 * MIB, rounds: int = 4) -> float:
    """Best rate of copying ``nbytes`` between two warm buffers, in pieces of 192 KiB, 4 MiB, or as a whole."""
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
    best_s = float("inf")
    for _ in range(rounds):
        for piece_bytes in (192 * 1024, 4 * MIB, nbytes):
            began_s = time.perf_counter()
            for begin in range(0, nbytes, piece_bytes):
                target[begin : begin + piece_bytes].copy_(source[begin : begin + piece_bytes])
            best_s = min(best_s, time.perf_counter() - began_s)
    return nbytes / best_s


def direct_read_bytes_per_s(directory: Path, nbytes: int = 128 * MIB, depth: int = 8) -> float:
    """Rate of reading a file once with ``O_DIRECT``, ``depth`` reads of 1 MiB in flight, page cache not involved."""
    path = directory / "read-limit.bin"
    path.write_bytes(np.random.default_rng(0).bytes(nbytes))
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        os.fsync(descriptor)
        drop_page_cache()
        return _read_all(descriptor, nbytes, depth)
    finally:
        os.close(descriptor)
        path.unlink()


def direct_reread_bytes_per_s(path: Path, depth: int = 4, block: int = 4 * MIB, into_bytes: int = 384 * MIB) -> float:
    """Rate of reading a file that was read before with ``O_DIRECT``, ``depth`` reads of ``block`` in flight: a machine
    that is virtual has its disk's answers from its host's memory by then. They go to ``into_bytes`` of memory in turn,
    as weights do: a few buffers that stay in the processor's cache are filled up to a fifth sooner.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        nbytes = os.fstat(descriptor).st_size // block * block
        _read_all(descriptor, nbytes, depth, block, into_bytes)
        return _read_all(descriptor, nbytes, depth, block, into_bytes)
    finally:
        os.close(descriptor)


def _read_all(descriptor: int, nbytes: int, depth: int, block: int = MIB, into_bytes: int = 0) -> float:
    buffer = huge_pages(max(into_bytes // (depth * block), 1) * depth * block)

    def read(worker: int) -> None:
        for place in range(worker * block, nbytes, depth * block):
            at = place % len(buffer)
            os.preadv(descriptor, [buffer[at : at + block]], place)

    threads = [threading.Thread(target=read, args=(worker,)) for worker in range(depth)]
    began_s = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return nbytes / (time.perf_counter() - began_s)


def huge_pages(nbytes: int) -> memoryview:
    """Memory as the tiers and the ring have it: in huge pages where the system has them, and touched once. A request of
    1 MiB into small pages is one of 256 parts, and can take more than twice as long.
    """
    memory = pages(nbytes)
    np.frombuffer(memory, np.uint8)[:] = 0
    return memory


def drop_page_cache() -> bool:
    """Write dirty pages out and forget the clean ones; False where this user may not."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3\n", encoding="ascii")
    except OSError:
        return False
    return True
