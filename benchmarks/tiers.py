"""The KV tiers side by side: host memory and disk of Stowage, LMCache and vLLM, each against its physical limit.

    python -m benchmarks.tiers [--quick] [--case 64x4096 ...] [--rounds 5] [--total-mib 1024]

Chunks of 64 KiB, 1 MiB and 4 MiB, 256 and 4,096 of them; where that is more than `--total-mib`, fewer, and the table
says how many. Host: device memory to host memory and back. Disk: host memory to disk (`store`), disk to host memory
(`load`), verified on every load. In the order of the prefix and in random order, by one client and by four at once,
with the page cache dropped (`posix_fadvise` for each file after `sync`) and as it is after storing (`warm`).

Every contender does one round, then the next one begins: all see the same disk and the same neighbours. Memory and disk
begin with their limits: `memmove` of the same bytes by one thread and by two, and writing and reading one file of that
size with direct I/O, with the block and the number of requests in flight that were the best ones of a first trial.
Buffered peers store into the page cache and load from it where it was not dropped; no disk is in that, so `warm` loads
are compared apart. Stowage's process waits and collects garbage as its commands do. Without the peers' environment
(`make bench-env`) only ours is measured.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks._peer import PYTHON, Peer
from benchmarks._report import describe_machine, median_spread, read_result, write_result
from stowage import openmp

PEERS_ENVIRONMENT = dict(os.environ)
openmp.wait_briefly()  # as `stowage run` and `stowage serve`, before torch is loaded; peers wait as they would alone

import torch  # noqa: E402

from benchmarks._tiers import Stowage  # noqa: E402

KIB, MIB = 1 << 10, 1 << 20
CASES = tuple((kib, count) for kib in (64, 1024, 4096) for count in (256, 4096))
QUICK = ((64, 1024), (1024, 64), (4096, 16))
SCRIPT = Path(__file__).parent / "peers" / "tiers.py"
HOST_PEERS = ("lmcache_cpu",)
DISK_PEERS = (
    "lmcache_disk",
    "lmcache_disk_direct",
    "lmcache_fs",
    "lmcache_fs_direct",
    "lmcache_fs_native",
    "lmcache_fs_native_direct",
    "vllm_fs",
)
HOST_LOADS = (("in order", 1), ("random", 1), ("in order", 4))
COLD_LOADS = (("in order", 1), ("random", 1), ("in order", 4), ("random", 4))
WARM_LOADS = (("in order", 1), ("random", 4))
ACCESSES = ((MIB, 4), (MIB, 8), (MIB, 16), (4 * MIB, 1), (4 * MIB, 2), (4 * MIB, 4), (4 * MIB, 8))
"""Bytes per request and requests in flight, of which a first trial chooses the best."""
GOALS = {"host": 0.9, "load": 0.9, "store": 0.8, "peer": 1.3, "peer, 64 KiB": 3.0}
Seconds = dict[str, dict[str, list[float]]]


class Limits:
    """What the machine gives, by the same memory that the contender moves."""

    def __init__(self, ours: Stowage, directory: Path) -> None:
        self._source, self._target = ours.device.data_ptr(), ours.target.data_ptr()
        self._view = memoryview(ours.target.view(-1).numpy())
        self._path = directory / "limit"
        nbytes = len(self._view)
        self._bytes = nbytes
        trial: dict[tuple[int, int], list[float]] = {}
        writes: dict[tuple[int, int], list[float]] = {}
        for access in ACCESSES * 2:
            writes.setdefault(access, []).append(self._write(access))
            trial.setdefault(access, []).append(self._read(access))
        self.read_access = min(ACCESSES, key=lambda access: min(trial[access]))
        self.write_access = min(ACCESSES, key=lambda access: min(writes[access]))

    def of_memory(self) -> dict[str, float]:
        """Seconds for all bytes, by limit: the better of two, since peers have just pressed the memory."""
        return {"memcpy": min(self._copy(1), self._copy(1)), "memcpy, 2 threads": min(self._copy(2), self._copy(2))}

    def of_disk(self) -> dict[str, float]:
        """Seconds for all bytes, by limit."""
        return {"write": self._write(self.write_access), "read": self._read(self.read_access)}

    def close(self) -> None:
        self._path.unlink()

    def _copy(self, threads: int) -> float:
        piece = min(MIB, self._bytes)
        places = iter(range(0, self._bytes, piece))

        def copy(at: int) -> None:
            ctypes.memmove(self._target + at, self._source + at, min(piece, self._bytes - at))

        return in_threads(copy, places, threads)

    def _write(self, access: tuple[int, int]) -> float:
        self._path.unlink(missing_ok=True)
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        os.posix_fallocate(descriptor, 0, self._bytes)
        return self._access(descriptor, os.pwritev, *access)

    def _read(self, access: tuple[int, int]) -> float:
        return self._access(os.open(self._path, os.O_RDONLY | os.O_DIRECT), os.preadv, *access)

    def _access(self, descriptor: int, call: Callable[..., int], block: int, depth: int) -> float:
        def work(at: int) -> None:
            buffer = self._view[at : at + block]
            assert call(descriptor, [buffer], at) == len(buffer)

        try:
            return in_threads(work, iter(range(0, self._bytes, block)), depth)
        finally:
            os.close(descriptor)


def in_threads(work: Callable[[int], None], places: Iterator[int], threads: int) -> float:
    """Seconds until all is done."""
    lock = threading.Lock()

    def run() -> None:
        while True:
            with lock:
                at = next(places, None)
            if at is None:
                return
            work(at)

    others = [threading.Thread(target=run) for _ in range(threads - 1)]
    began_s = time.perf_counter()
    for thread in others:
        thread.start()
    run()
    for thread in others:
        thread.join()
    return time.perf_counter() - began_s


def drop_page_cache(directory: Path) -> None:
    """Write out what is dirty, then forget the pages of every file below."""
    os.sync()
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


class Contender:
    """Ours or one of the peers', by the same four verbs."""

    def __init__(self, name: str, ours: Stowage, peer: Peer | None) -> None:
        self.name = name
        self._ours = ours
        self._peer = peer

    def open(self, directory: Path | None) -> None:
        if self._peer is None:
            self._ours.open(directory)
        else:
            self._peer.ask(do="open", name=self.name, directory=str(directory))

    def store(self, parts: list[list[int]]) -> float:
        return self._ours.store(parts) if self._peer is None else self._peer.ask(do="store", parts=parts)["seconds"]

    def load(self, parts: list[list[int]]) -> float:
        return self._ours.load(parts) if self._peer is None else self._peer.ask(do="load", parts=parts)["seconds"]

    def close(self) -> None:
        if self._peer is None:
            self._ours.close()
        else:
            self._peer.ask(do="close")


def parts_of(count: int, order: str, clients: int) -> list[list[int]]:
    """The chunks of each client, in the order in which it asks."""
    numbers = list(range(count))
    if order == "random":
        random.Random(count).shuffle(numbers)
    return [numbers[client * count // clients : (client + 1) * count // clients] for client in range(clients)]


def title(verb: str, order: str, clients: int) -> str:
    return f"{verb}, {order}, {clients} client{'s' if clients > 1 else ''}"


def measure_case(chunk_bytes: int, count: int, rounds: int, peer: Peer | None, directory: Path) -> dict[str, Any]:
    """Seconds by tier, by what is done and by contender; and the limits' seconds."""
    ours = Stowage(chunk_bytes, count)
    if peer is not None:
        peer.ask(do="start", chunk_bytes=chunk_bytes, count=count)
    limits = Limits(ours, directory)
    gc.freeze()  # as `stowage run` and `stowage serve`
    found: dict[str, Seconds] = {"host": {}, "disk": {}}
    bounds: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        kept = number > 0  # the first round warms up

        def bound(measured: dict[str, float], kept: bool = kept) -> None:
            for name, seconds in measured.items():
                if kept:
                    bounds.setdefault(name, []).append(seconds)

        def note(tier: str, what: str, name: str, seconds: float, kept: bool = kept) -> None:
            if kept:
                found[tier].setdefault(what, {}).setdefault(name, []).append(seconds)

        bound(limits.of_memory())
        for name in ("stowage", *(HOST_PEERS if peer else ())):
            contender = Contender(name, ours, None if name == "stowage" else peer)
            run_host(contender, count, note)
        bound(limits.of_disk())
        for name in ("stowage", *(DISK_PEERS if peer else ())):
            contender = Contender(name, ours, None if name == "stowage" else peer)
            run_disk(contender, count, directory / "chunks", note)
    access = {"read": limits.read_access, "write": limits.write_access}
    limits.close()
    return {"seconds": found, "limits": bounds, "access": access}


Note = Callable[[str, str, str, float], None]


def run_host(contender: Contender, count: int, note: Note) -> None:
    contender.open(None)
    contender.store(parts_of(count, "in order", 1))
    contender.close()
    contender.open(None)
    note("host", title("store", "in order", 1), contender.name, contender.store(parts_of(count, "in order", 1)))
    for order, clients in HOST_LOADS:
        note("host", title("load", order, clients), contender.name, contender.load(parts_of(count, order, clients)))
    contender.close()


def run_disk(contender: Contender, count: int, directory: Path, note: Note) -> None:
    for clients in (4, 1):
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(mode=0o700)
        contender.open(directory)
        what = title("store", "in order", clients)
        note("disk", what, contender.name, contender.store(parts_of(count, "in order", clients)))
        if clients == 1:
            for order, callers in WARM_LOADS:
                seconds = contender.load(parts_of(count, order, callers))
                note("disk", title("load", order, callers) + ", warm", contender.name, seconds)
            for order, callers in COLD_LOADS:
                drop_page_cache(directory)
                seconds = contender.load(parts_of(count, order, callers))
                note("disk", title("load", order, callers), contender.name, seconds)
        contender.close()
    shutil.rmtree(directory)


def limit_of(tier: str, what: str) -> tuple[str, float]:
    """The name of the limit, and the share of it that is the goal."""
    if tier == "host":
        return "memcpy", GOALS["host"]
    return ("write", GOALS["store"]) if what.startswith("store") else ("read", GOALS["load"])


def report(chunk_bytes: int, count: int, measured: dict[str, Any]) -> dict[str, Any]:
    nbytes = chunk_bytes * count
    kept: dict[str, Any] = {"chunks": count, "chunk_kib": chunk_bytes // KIB, "mib": nbytes // MIB, "limits": {}}
    kept["access"] = measured["access"]
    print(f"\n{count} chunks of {chunk_bytes // KIB} KiB ({nbytes // MIB} MiB), GB/s:")
    for name, seconds in measured["limits"].items():
        kept["limits"][name] = rate = median_spread([nbytes / s / 1e9 for s in seconds])
        print(f"  limit: {name:<20} {rate.median:6.2f} ({rate.least:.2f} to {rate.largest:.2f})")
    for tier, by_what in measured["seconds"].items():
        kept[tier] = {}
        for what, by_name in by_what.items():
            kept[tier][what] = report_line(tier, what, by_name, measured["limits"], nbytes, chunk_bytes)
    return kept


def report_line(
    tier: str, what: str, by_name: dict[str, list[float]], limits: dict[str, list[float]], nbytes: int, chunk_bytes: int
) -> dict[str, Any]:
    limit, goal = limit_of(tier, what)
    mine = by_name["stowage"]
    share = median_spread([bound / s for bound, s in zip(limits[limit], mine, strict=True)])
    rates = {name: median_spread([nbytes / s / 1e9 for s in seconds]) for name, seconds in by_name.items()}
    kept: dict[str, Any] = {"gb_per_s": rates, "limit": limit, "share_of_limit": share, "goal": goal}
    verdict = "met" if share.median >= goal else "MISSED"
    print(f"  {tier}: {what}: {share.median:.0%} of {limit} (goal {goal:.0%}: {verdict})")
    peers = {name: rate for name, rate in rates.items() if name != "stowage"}
    if peers:
        best = max(peers, key=lambda name: peers[name].median)
        ratio = median_spread([theirs / s for theirs, s in zip(by_name[best], mine, strict=True)])
        kept |= {"best_peer": best, "of_best_peer": ratio}
        words = f"    {ratio.median:.2f} times {best}"
        if tier == "disk" and what.startswith("load") and not what.endswith("warm"):
            wanted = GOALS["peer, 64 KiB"] if chunk_bytes <= 64 * KIB else GOALS["peer"]
            kept["peer_goal"] = wanted
            words += f" (goal {wanted}: {'met' if ratio.median >= wanted else 'MISSED'})"
        print(words)
    print("    " + ", ".join(f"{name} {rate.median:.2f}" for name, rate in rates.items()), flush=True)
    return kept


def cases_from(options: argparse.Namespace) -> list[tuple[int, int]]:
    """Chunk bytes and count; not more bytes than asked for, and no case twice."""
    wanted = [tuple(map(int, case.split("x"))) for case in options.case] or (QUICK if options.quick else CASES)
    cases = [(kib * KIB, min(count, options.total_mib * KIB // kib)) for kib, count in wanted]
    return list(dict.fromkeys(cases))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small cases, two rounds, no result file")
    parser.add_argument("--case", action="append", default=[], metavar="KIBxCOUNT", help="only these, again and again")
    parser.add_argument("--rounds", type=int, help="of each case (5; 2 with --quick)")
    parser.add_argument("--total-mib", type=int, default=1024, help="bound on a case's bytes")
    parser.add_argument("--directory", type=Path, help="where the disk to be measured is mounted")
    options = parser.parse_args()
    rounds = options.rounds or (2 if options.quick else 5)
    peer = Peer([PYTHON, SCRIPT], PEERS_ENVIRONMENT) if PYTHON.exists() else None
    kept: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="stowage-bench-", dir=options.directory) as directory:
        for chunk_bytes, count in cases_from(options):
            measured = measure_case(chunk_bytes, count, rounds, peer, Path(directory))
            kept[f"{chunk_bytes // KIB} KiB x {count}"] = report(chunk_bytes, count, measured) | {
                "rounds": rounds,
                "machine": describe_machine(),
            }
    if peer is not None:
        peer.end()
    if not options.quick:
        cases = read_result("tiers").get("cases", {})
        write_result("tiers", {"goals": GOALS, "torch_threads": torch.get_num_threads(), "cases": cases | kept})


if __name__ == "__main__":
    main()
