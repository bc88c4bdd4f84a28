"""What protection at rest costs: no verification at all, XXH3 (the default), keyed BLAKE3, AES-256-GCM.

``python -m benchmarks.integrity [--rounds N] [--hits N] [--prefix-tokens N] [--only tier|engine]``. First the disk tier
alone: 256 chunks of 1 MiB and 4,096 of 64 KiB are stored and loaded by each variant in turn, in an order that rotates.
They are loaded as quickly as this machine does it, and from a device that is slowed down to 2 GB/s: on a virtual
machine, what was written lately comes from the host's memory at 5 GB/s and more, and the host's copying takes the same
processors and the same memory that hashing takes. The slow device shows what a disk would.

Then an engine with a float32 model of 0.48 B parameters: time to first token of a prompt whose prefix comes from disk.
Overheads are medians over rounds of a variant's time against that of no verification in the same round. The engine's
own computing moves by more than two percent on a shared machine, so the CPU time inside the hash is measured as well:
it bounds what a hit can lose to verification.

No setting switches verification off: `Nothing` below is handed to the tier by this benchmark only.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from benchmarks import limits, models
from benchmarks._report import median_spread, write_result
from stowage.cache import opening
from stowage.config.memory import Memory
from stowage.core.key import DIGEST_BYTES
from stowage.engine.engine import Engine
from stowage.engine.sampling_params import SamplingParams
from stowage.native.memory import pages
from stowage.storage.disk import DiskTier
from stowage.storage.disk.files import RealFileSystem
from stowage.storage.disk.system import System
from stowage.storage.format.batch import Digests, Fields
from stowage.storage.format.protection import Cipher, Guard, Hash, Mark, Method, Protection, SecretKey
from stowage.storage.protocol import Outcome, Transfer

MIB = 1 << 20
TOTAL_BYTES = 256 * MIB
CHUNK_BYTES = {"1 MiB": MIB, "64 KiB": 64 << 10}
LOADS_PER_STORE = 3
SLOW_BYTES_PER_S = 2e9
QUESTION_TOKENS = 32
ONE_TOKEN = SamplingParams(max_new_tokens=1, ignore_eos=True)
GOALS = {"load": 0.05, "ttft": 0.02}
KEY = SecretKey(bytes(range(32)))
MEASURED = ("store", "load", "load, 2 GB/s")


class Nothing:
    """A guard that guards nothing."""

    method = Method.CHECKSUM

    def digest(self, fields: bytes, offset: int, payload: memoryview) -> bytes:
        return bytes(16)

    def verify(self, fields: bytes, offset: int, payload: memoryview, digest: bytes) -> bool:
        return True

    def digest_all(self, fields: Fields, offsets: Sequence[int], payloads: list[memoryview]) -> Digests:
        return np.zeros((len(payloads), 2), np.uint64)

    def verify_all(
        self, fields: Fields, offsets: Sequence[int], payloads: list[memoryview], digests: Digests
    ) -> NDArray[np.bool_]:
        return np.ones(len(payloads), np.bool_)


class Unverified(Protection):
    """Segments that look as if they had checksums, and are read whatever comes."""

    def guard(self, segment_id: bytes, mark: Mark) -> Guard | None:
        return Nothing()


class Clocked:
    """A guard that adds up the CPU time of verifying."""

    def __init__(self, guard: Hash, spent_s: list[float]) -> None:
        self.method, self.digest, self.digest_all = guard.method, guard.digest, guard.digest_all
        self.verify, self._verify_all, self._spent_s = guard.verify, guard.verify_all, spent_s

    def verify_all(
        self, fields: Fields, offsets: Sequence[int], payloads: list[memoryview], digests: Digests
    ) -> NDArray[np.bool_]:
        began_s = time.thread_time()
        exact = self._verify_all(fields, offsets, payloads, digests)
        self._spent_s.append(time.thread_time() - began_s)
        return exact


class ClockedProtection(Protection):
    """Another one's guards, clocked where they are hashes. `spent_s` has an entry per run of chunks."""

    def __init__(self, inner: Protection) -> None:
        self.method, self.new_mark, self._guard = inner.method, inner.new_mark, inner.guard
        self.spent_s: list[float] = []

    def guard(self, segment_id: bytes, mark: Mark) -> Guard | None:
        found = self._guard(segment_id, mark)
        return found if found is None or isinstance(found, Cipher) else Clocked(found, self.spent_s)


VARIANTS: dict[str, Protection] = {
    "off": Unverified(),
    "xxh3": Protection(),
    "blake3": Protection(Method.BLAKE3, [KEY]),
    "aes-256-gcm": Protection(Method.AES_256_GCM, [KEY]),
}


class SlowFiles(RealFileSystem):
    """A disk that reads no faster than that, one request after the other, however many are waiting."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at_s = 0.0

    def preadv(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        asked_s = time.perf_counter()
        done = super().preadv(fd, buffers, offset)
        with self._lock:
            self._free_at_s = until_s = max(self._free_at_s, asked_s) + done / self.bytes_per_s
        time.sleep(max(0.0, until_s - time.perf_counter()))
        return done


def in_turn(rounds: int) -> Iterator[tuple[int, list[str]]]:
    """The variants' order of each round: every one is first, second, third and last equally often."""
    names = list(VARIANTS)
    for number in range(rounds):
        at = number % len(names)
        yield number, names[at:] + names[:at]


class Caller:
    """Chunks in memory as the arena has them, and a tier to move them to and from, one transfer at a time."""

    def __init__(self, chunk_bytes: int) -> None:
        self.memory = pages(TOTAL_BYTES)
        filler = np.random.default_rng(0).bytes(MIB)
        for at in range(0, TOTAL_BYTES, MIB):
            self.memory[at : at + MIB] = filler
        self.keys = [number.to_bytes(DIGEST_BYTES, "little") for number in range(TOTAL_BYTES // chunk_bytes)]
        self.buffers = [self.memory[at : at + chunk_bytes] for at in range(0, TOTAL_BYTES, chunk_bytes)]
        self._woken = threading.Event()

    def open(self, directory: Path, protection: Protection, slow: bool = False) -> DiskTier:
        options: dict[str, Any] = {"segment_bytes": TOTAL_BYTES // 2, "protection": protection}
        if slow:
            options["system"] = System(files=SlowFiles(SLOW_BYTES_PER_S))
        tier = DiskTier(directory, 2 * TOTAL_BYTES, bytes(32), **options)
        tier.wake = self._woken.set
        return tier

    def move(self, tier: DiskTier, verb: str) -> tuple[float, float]:
        """Wall and CPU seconds of storing or loading all of it."""
        masks = np.ones(len(self.keys), np.uint64)
        transfer = Transfer(0, self.keys, self.buffers, masks, float("inf"))
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        getattr(tier, verb)(transfer)
        outcome: Outcome | None = None
        while outcome is None:
            self._woken.wait(1.0)
            self._woken.clear()
            outcome = next(iter(tier.poll()), None)
        elapsed_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
        assert outcome.ok.all(), outcome.error
        return elapsed_s, cpu_s


Times = dict[str, dict[str, list[float]]]


def measure_tier(chunk_bytes: int, rounds: int, directory: Path) -> tuple[Times, Times]:
    """Wall seconds and CPU seconds by what is measured and by variant."""
    wall: Times = {what: {name: [] for name in VARIANTS} for what in MEASURED}
    cpu: Times = {what: {name: [] for name in VARIANTS} for what in MEASURED}
    caller = Caller(chunk_bytes)

    def timed(what: str, name: str) -> None:
        tier = caller.open(directory / name, VARIANTS[name], slow=what == "load, 2 GB/s")
        try:
            wall_s, cpu_s = caller.move(tier, what.partition(",")[0])
        finally:
            tier.close(time.monotonic() + 60)
        wall[what][name].append(wall_s)
        cpu[what][name].append(cpu_s)

    for _, names in in_turn(rounds):
        for name in names:
            shutil.rmtree(directory / name, ignore_errors=True)
            timed("store", name)
        for what in MEASURED[1:] * LOADS_PER_STORE:
            limits.drop_page_cache()
            for name in names:
                timed(what, name)
    for name in VARIANTS:
        shutil.rmtree(directory / name)
    return wall, cpu


def report_tier(size: str, wall: Times, cpu: Times) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for what in MEASURED:
        print(f"\n{what}, {TOTAL_BYTES >> 20} MiB in chunks of {size}:")
        kept[what] = {}
        for name in VARIANTS:
            rate = median_spread([TOTAL_BYTES / wall_s / 1e9 for wall_s in wall[what][name]])
            overhead = overhead_of(wall[what], name)
            cpu_ms = median_spread([1000 * cpu_s for cpu_s in cpu[what][name]])
            kept[what][name] = {"gb_per_s": rate, "overhead": overhead, "cpu_ms": cpu_ms}
            spread = f"{rate.median:6.2f} GB/s ({rate.least:.2f} to {rate.largest:.2f}), CPU {cpu_ms.median:4.0f} ms"
            goal = against(overhead.median, GOALS["load"]) if name == "xxh3" and what != "store" else ""
            print(f"  {name:<12} {spread}, {overhead.median:+.1%}{goal}")
    return kept


def overhead_of(seconds: dict[str, list[float]], name: str) -> Any:
    """Against no verification, in pairs of one round."""
    return median_spread([mine / off - 1 for mine, off in zip(seconds[name], seconds["off"], strict=True)])


def against(share: float, goal: float) -> str:
    return f" (goal at most {goal:.0%}: {'met' if share <= goal else 'MISSED'})"


@contextmanager
def protected(protection: Protection) -> Iterator[None]:
    """Engines that are made inside have disk tiers with that protection."""
    with mock.patch.object(opening.key_file, "protection", lambda *_: protection):
        yield


def measure_engine(
    prefix_tokens: int, hits: int, directory: Path
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds to first token of disk hits by variant, and CPU seconds of hashing in each of them.

    One engine each over one model, and one works at a time.
    """
    model = models.half_billion("float32")
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    hashing: dict[str, list[float]] = {name: [] for name in VARIANTS}
    clocked = {name: ClockedProtection(protection) for name, protection in VARIANTS.items()}
    prefix = models.random_tokens(prefix_tokens, seed=0)
    with ExitStack() as stack:
        engines: dict[str, Engine] = {}
        for name, protection in clocked.items():
            memory = Memory(kv_cache_memory="256MiB", host_memory="256MiB", disk=f"{directory / name}:1GiB")
            with protected(protection):
                engines[name] = stack.enter_context(Engine(model, memory))
            engines[name].generate([prefix], ONE_TOKEN)
            assert engines[name].flush(120)
        for number, names in in_turn(hits + 1):
            question = models.random_tokens(QUESTION_TOKENS, seed=10**7 + number)
            limits.drop_page_cache()
            for name in names:
                engine = engines[name]
                engine.drop_device_cache()
                engine.drop_host()
                clocked[name].spent_s.clear()
                (completion,) = engine.generate([prefix + question], ONE_TOKEN)
                group = engine.parts.layout.groups[0]
                assert completion.reused_tokens["disk"] >= prefix_tokens - group.chunk_tokens, completion.reused_tokens
                if number:  # the first one warms up
                    seconds[name].append(completion.ttft_s)
                    hashing[name].append(sum(clocked[name].spent_s))
                assert engine.flush(120)
    return seconds, hashing


def report_engine(
    prefix_tokens: int, seconds: dict[str, list[float]], hashing: dict[str, list[float]]
) -> dict[str, Any]:
    print(f"\ntime to first token, {prefix_tokens} tokens from disk and {QUESTION_TOKENS} computed:")
    kept = {}
    for name in VARIANTS:
        ttft_ms = median_spread([1000 * ttft_s for ttft_s in seconds[name]])
        overhead = overhead_of(seconds, name)
        share = median_spread([cpu_s / ttft_s for cpu_s, ttft_s in zip(hashing[name], seconds[name], strict=True)])
        kept[name] = {"ttft_ms": ttft_ms, "overhead": overhead, "hashing_share": share}
        hashed = f"; CPU time of hashing {share.median:.2%}" if share.median else ""
        print(f"  {name:<12} {ttft_ms} ms, {overhead.median:+.1%}{hashed}")
        if name == "xxh3":
            goal = GOALS["ttft"]
            print(f"    measured{against(overhead.median, goal)}; by hashing alone{against(share.median, goal)}")
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12, help="of the disk tier alone")
    parser.add_argument("--hits", type=int, default=40, help="of each engine")
    parser.add_argument("--prefix-tokens", type=int, default=2048)
    parser.add_argument("--only", choices=["tier", "engine"])
    options = parser.parse_args()
    kept: dict[str, Any] = {"goals": GOALS}
    with tempfile.TemporaryDirectory(prefix="stowage-bench-") as directory:
        if options.only != "engine":
            kept["tier"] = {
                size: report_tier(size, *measure_tier(chunk_bytes, options.rounds, Path(directory)))
                for size, chunk_bytes in CHUNK_BYTES.items()
            }
        if options.only != "tier":
            found = measure_engine(options.prefix_tokens, options.hits, Path(directory))
            kept["engine"] = report_engine(options.prefix_tokens, *found)
    if options.only is None:
        write_result("integrity", kept | vars(options))


if __name__ == "__main__":
    main()
