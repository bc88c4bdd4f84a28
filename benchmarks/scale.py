"""Ten thousand to ten million chunks: memory, opening, and what a look-up, an insertion and an eviction cost then.

    python -m benchmarks.scale [--chunks 10000 100000 1000000 10000000] [--directory DIR] [--json]

Disk: sealed segments with chunks of 64 KiB, which nobody reads, so their payloads are holes and ten million chunks take
1.4 GB. `DiskTier` opens them; then look-ups go through the tier, and everything else through its index, as the tier
itself calls it. Host: a ledger with so many slots, filled, looked up in and then made to evict, in batches of 256.

CPU time of the thread that works, so that neighbours count little; but opening is in seconds on the clock, beside the
CPU seconds of all threads. A call is what others wait for: eviction releases a segment in many. Python's garbage
collector is off meanwhile: its pauses are as long as the process has objects, whosever they are. Each size, disk and
host, in a fresh interpreter. Memory is the growth of the resident set from an empty store; that of the host is what
the ledger and the policy take, with the chunks' keys, beside the memory that the chunks themselves are in.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._report import RESULTS, write_result
from stowage import svg
from stowage.cache.ledger import Ledger
from stowage.cache.policy import POLICIES, POLICY_DEFAULT
from stowage.core.geometry import PAGE_BYTES
from stowage.storage.disk import DiskTier
from stowage.storage.disk.index import Columns
from stowage.storage.format import envelope, segment
from stowage.storage.format.segment import SegmentName

SIZES = (10_000, 100_000, 1_000_000, 10_000_000)
NAMESPACE = bytes(range(32))
PAYLOAD_BYTES = 64 << 10
PER_SEGMENT = 4000
"""Of such chunks in a segment of 256 MiB."""
BATCH = 256
CALLS = 1000
LIMIT_BYTES = 1 << 50
COLOURS = {"look-up": "#2c6fbb", "miss": "#5fa8d3", "insert": "#c0392b", "remove": "#b8860b", "evict": "#2e8b57"}


def keys_of(number: int, count: int) -> bytes:
    """The keys of a segment, joined: the same ones each time, so that nobody has to remember them."""
    return np.random.default_rng(number).bytes(count * 32)


def cut(joined: bytes) -> list[bytes]:
    return [joined[at : at + 32] for at in range(0, len(joined), 32)]


def entries_of(number: int, count: int) -> segment.Entries:
    """What the footer of such a segment lists."""
    header = envelope.pack_fields(bytes(32), NAMESPACE, 0b1111, PAYLOAD_BYTES) + bytes(range(16))
    entries = np.frombuffer(bytearray((header + bytes(8)) * count), segment._ENTRY)
    entries["key"] = np.frombuffer(keys_of(number, count), "V32")
    order = np.arange(count, dtype=np.uint64)
    batches = order // np.uint64(segment.BATCH_CHUNKS_MAX) + np.uint64(2)
    entries["offset"] = order * np.uint64(PAYLOAD_BYTES) + batches * np.uint64(PAGE_BYTES)
    return entries


def write_segments(directory: Path, chunks: int) -> None:
    for number, first in enumerate(range(0, chunks, PER_SEGMENT)):
        entries = entries_of(number, min(PER_SEGMENT, chunks - first))
        name = SegmentName(number + 1, number.to_bytes(8, "little"))
        end = int(entries["offset"][-1]) + PAYLOAD_BYTES
        footer = segment.pack_footer([entries], name.id, end)
        descriptor = os.open(directory / str(name), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.pwrite(descriptor, segment.pack_segment_header(name, end + len(footer), NAMESPACE), 0)
        os.pwrite(descriptor, footer, end)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Stopwatch:
    """Stands before an object, and times the calls of its methods: (nanoseconds, keys) of each, by method."""

    def __init__(self, watched: Any) -> None:
        self._watched = watched
        self.calls: dict[str, list[int]] = {}

    def __len__(self) -> int:
        return len(self._watched)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._watched, name)
        calls = self.calls.setdefault(name, [])

        def timed(*arguments: Any) -> Any:
            began_ns = time.thread_time_ns()
            answer = method(*arguments)
            calls.append(time.thread_time_ns() - began_ns)
            return answer

        self.__dict__[name] = timed
        return timed


def summary(calls: Iterable[int], keys: int) -> dict[str, float]:
    """Of so many keys in each call: per key, and the longest calls as they were."""
    spent = np.array(list(calls), np.float64)
    return {
        "ns_per_key": round(float(spent.mean()) / keys, 1),
        "call_us_median": round(float(np.median(spent)) / 1e3, 1),
        "call_us_p999": round(float(np.quantile(spent, 0.999)) / 1e3, 1),
        "call_us_max": round(float(spent.max()) / 1e3, 1),
    }


def timed(work: Callable[[Any], object], batches: Iterable[Any]) -> list[int]:
    spent = []
    for batch in batches:
        began_ns = time.thread_time_ns()
        work(batch)
        spent.append(time.thread_time_ns() - began_ns)
    return spent


def known_batches(chunks: int, count: int, seed: int) -> Iterable[list[bytes]]:
    """Prompts: chunks that were stored one after another, somewhere. The keys are new objects each time."""
    chance = random.Random(seed)
    segments = (chunks + PER_SEGMENT - 1) // PER_SEGMENT
    held: dict[int, bytes] = {}
    for _ in range(count):
        number = chance.randrange(segments)
        here = min(PER_SEGMENT, chunks - number * PER_SEGMENT)
        if number not in held:
            if len(held) > 256:
                held.clear()
            held[number] = keys_of(number, here)
        first = chance.randrange(max(1, here - BATCH))
        yield cut(held[number][first * 32 : (first + BATCH) * 32])


def scattered_batches(chunks: int, count: int) -> Iterable[list[bytes]]:
    """Chunks from all over the store: the worst case for the processor's caches."""
    chance = random.Random(7)
    segments = (chunks + PER_SEGMENT - 1) // PER_SEGMENT
    some = [cut(keys_of(number, min(PER_SEGMENT, chunks - number * PER_SEGMENT)))
            for number in chance.sample(range(segments), min(segments, 64))]  # fmt: skip
    every = [key for keys in some for key in keys]
    for _ in range(count):
        yield [bytes(bytearray(key)) for key in chance.choices(every, k=BATCH)]


def run_disk(chunks: int, directory: Path) -> dict[str, Any]:
    """One size, in a directory that is removed afterwards."""
    path = directory / f"scale-{chunks}"
    DiskTier(path, LIMIT_BYTES, NAMESPACE).close(time.monotonic() + 60)
    empty = DiskTier(path, LIMIT_BYTES, NAMESPACE)
    before = resident_bytes()
    empty.close(time.monotonic() + 60)
    del empty
    try:
        write_segments(path, chunks)
        began_s, began_cpu_s = time.monotonic(), time.process_time()
        tier = DiskTier(path, LIMIT_BYTES, NAMESPACE, refresh_s=3600)
        opened_s, opened_cpu_s = time.monotonic() - began_s, time.process_time() - began_cpu_s
        after = resident_bytes()
        stats = tier.stats()
        assert stats["chunks"] == chunks, f"{stats['chunks']} chunks of {chunks}"
        result = {
            "open_s": round(opened_s, 3),
            "open_cpu_s": round(opened_cpu_s, 3),
            "segments": stats["segments"],
            "bytes_per_chunk": round((after - before) / chunks, 1),
            "resident_mb": round((after - before) / 1e6, 1),
            **_operations(tier, chunks),
        }
        tier._index.check()
        tier.close(time.monotonic() + 60)
    finally:
        shutil.rmtree(path)
    return result


def _operations(tier: DiskTier, chunks: int) -> dict[str, Any]:
    index = tier._index
    tier.lookup(cut(keys_of(0, BATCH)))
    assert all(tier.lookup(keys).all() for keys in known_batches(chunks, 20, 1)), "a chunk is missing"
    result = {
        "look-up": summary(timed(tier.lookup, known_batches(chunks, CALLS, 2)), BATCH),
        "look-up, scattered": summary(timed(tier.lookup, scattered_batches(chunks, CALLS)), BATCH),
        "miss": summary(timed(tier.lookup, (cut(os.urandom(32 * BATCH)) for _ in range(CALLS))), BATCH),
        "hit": summary(timed(index.mark_hits, known_batches(chunks, CALLS, 3)), BATCH),
    }
    first = 1 << 40
    new = ((first + number, entries_of(first + number, segment.BATCH_CHUNKS_MAX)) for number in range(CALLS))
    result["insert"] = summary(timed(lambda one: index.insert(first + one[0] // 128, Columns.of(one[1])), new), 31)
    result["remove"] = summary(timed(tier.discard, known_batches(chunks, min(CALLS, chunks // BATCH // 4), 4)), BATCH)
    watch = Stopwatch(index._rows)
    index._rows = watch
    segments = (chunks + PER_SEGMENT - 1) // PER_SEGMENT
    victims = random.Random(5).sample(range(segments), min(segments // 2, 100))
    spent_ns, rows = sum(timed(index.drop_segment, victims)), PER_SEGMENT * len(victims)
    result["evict"] = {**summary(watch.calls["release"], 1), "ns_per_key": round(spent_ns / rows, 1)}
    index._rows = watch._watched
    return result


def run_host(chunks: int) -> dict[str, Any]:
    """One size of a ledger, with the default policy."""
    before = resident_bytes()
    ledger = Ledger([chunks], POLICIES[POLICY_DEFAULT])
    masks = np.full(BATCH, 0b1111, np.uint64)
    chance = np.random.default_rng(1)

    def store(keys: list[bytes]) -> None:
        ledger.commit(ledger.reserve(0, keys, masks))

    stored = []
    filled: list[int] = []
    every = max(1, chunks // BATCH // CALLS)
    for number in range(chunks // BATCH):
        keys = cut(chance.bytes(32 * BATCH))
        filled += timed(store, [keys])
        if number % every == 0:
            stored.append(b"".join(keys))
    taken = resident_bytes() - before - sum(map(len, stored))
    chance.shuffle(stored)
    found = timed(ledger.lookup, (cut(joined) for joined in stored))
    evicting = timed(store, (cut(chance.bytes(32 * BATCH)) for _ in range(CALLS)))
    return {
        "bytes_per_chunk": round(taken / chunks, 1),
        "resident_mb": round(taken / 1e6, 1),
        "store": summary(filled, BATCH),
        "look-up": summary(found, BATCH),
        "evicting store": summary(evicting, BATCH),
    }


def picture(result: dict[str, Any]) -> str:
    """Nanoseconds per key by the number of chunks, as SVG."""
    sizes = result["disk"]
    colours = {name: colour for name, colour in COLOURS.items() if name in next(iter(sizes.values()))}
    top = max(of[name]["ns_per_key"] for of in sizes.values() for name in colours)
    step = 130
    xs = [70 + step * place for place in range(len(sizes))]
    parts = [f'<path class="axis" d="M50 270H{60 + step * len(sizes)}"/>']
    for name, colour in colours.items():
        ys = [270 - 200 * of[name]["ns_per_key"] / top for of in sizes.values()]
        points = " ".join(f"{x},{y:.1f}" for x, y in zip(xs, ys, strict=True))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for x, y, of in zip(xs, ys, sizes.values(), strict=True):
            parts.append(svg.label(x + 5, y - 4, f"{of[name]['ns_per_key']:.0f}", color=colour))
    for x, (size, of) in zip(xs, sizes.items(), strict=True):
        parts.append(svg.label(x, 288, f"{int(size):,}", middle=True))
        parts.append(svg.label(x, 302, f"{of['bytes_per_chunk']:.0f} B, {of['open_s']:.2f} s", middle=True))
    title = "Disk tier: ns per key by chunks in the index; bytes, opening"
    body = "".join(parts) + svg.legend(50, 326, colours, 90)
    return svg.page(110 + step * len(sizes), 340, title, title, body)


def show(result: dict[str, Any]) -> None:
    for place, sizes in (("disk", result["disk"]), ("host", result["host"])):
        for size, of in sizes.items():
            opened = f"; opened in {of['open_s']} s" if "open_s" in of else ""
            print(f"{place}, {int(size):,} chunks; {of['bytes_per_chunk']} bytes per chunk{opened}")
            for name, value in of.items():
                if isinstance(value, dict):
                    print(f"  {name:20} {value['ns_per_key']:8} ns per key; a call of {value['call_us_median']:8} us, "
                          f"p99.9 {value['call_us_p999']:8}, longest {value['call_us_max']:8}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", nargs="+", type=int, default=SIZES)
    parser.add_argument("--directory", type=Path, help="where the segments are written (default: a temporary one)")
    parser.add_argument("--json", action="store_true", help="print the result file instead of a table")
    parser.add_argument("--once", choices=("disk", "host"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        if options.once:
            size = options.chunks[0]
            gc.disable()
            print(json.dumps(run_disk(size, Path(name)) if options.once == "disk" else run_host(size)))
            return
    result: dict[str, Any] = {"payload_bytes": PAYLOAD_BYTES, "batch": BATCH, "policy": POLICY_DEFAULT}
    for place in ("disk", "host"):
        result[place] = {}
        for size in options.chunks:
            print(f"{place}, {size:,} chunks", file=sys.stderr, flush=True)
            command = [sys.executable, "-m", "benchmarks.scale", "--once", place, "--chunks", str(size)]
            if options.directory:
                command += ["--directory", str(options.directory)]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            result[place][str(size)] = json.loads(output)
    path = write_result("scale", result)
    (RESULTS / "scale.svg").write_text(picture(result), encoding="utf-8")
    if options.json:
        print(path.read_text(encoding="utf-8"), end="")
    else:
        show(result)


if __name__ == "__main__":
    main()
