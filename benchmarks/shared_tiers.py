"""What shared tiers bring on one machine: bytes per second by chunk size, and time to first token against cold.

``python -m benchmarks.shared_tiers [--rounds N] [--prefix-tokens N] [--only tier|engine]``. A directory, a redis-server
and moto's S3, all on this machine: the loopback device and the servers are measured as much as the tiers are, and moto
is a server for tests, which answers about a hundred requests a second. So the numbers compare chunk sizes, and show
that a hit is worth its price; a real network has other ones. The rate of bare TCP over loopback is measured beside.

Every round stores 64 MiB of new chunks with one tier and loads them with another, as another machine would; then one
engine computes a prompt, and another, which knows nothing of it, is asked for the same.
"""

from __future__ import annotations

import argparse
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import models
from benchmarks._report import median_spread, write_result
from stowage.config.memory import Memory
from stowage.engine.engine import Engine
from stowage.engine.sampling_params import SamplingParams
from stowage.storage.objects import ObjectTier
from stowage.storage.protocol import Inquiry, Probe, Transfer
from stowage.storage.remote.tier import RemoteTier
from stowage.storage.valkey import ValkeyTier
from tests.tiers.servers import BUCKET, RedisServer, S3Server, credentials

MIB = 1 << 20
TOTAL_BYTES = 64 * MIB
CHUNK_BYTES = {"64 KiB": 64 << 10, "1 MiB": MIB, "8 MiB": 8 * MIB}
QUESTION_TOKENS = 32
ONE_TOKEN = SamplingParams(max_new_tokens=1, ignore_eos=True)


@contextmanager
def stores(directory: Path) -> Iterator[dict[str, str]]:
    """Addresses by name."""
    with ExitStack() as stack:
        redis, s3 = RedisServer(), S3Server()
        stack.callback(redis.stop)
        stack.callback(s3.stop)
        os.environ.update(credentials(s3.port))
        yield {"directory": f"file://{directory / 'objects'}", "redis": redis.url, "s3 (moto)": f"s3://{BUCKET}"}


def placed(url: str, number: int) -> str:
    """A place in the store for one round."""
    return f"{url}?prefix=round-{number}" if url.startswith("redis") else f"{url}/round-{number}"


def open_tier(url: str) -> RemoteTier:
    return (ValkeyTier if url.startswith("redis") else ObjectTier)(url, bytes(range(32)))


def move(tier: RemoteTier, begin: Callable[[Transfer], None], keys: list[bytes], memory: bytearray) -> float:
    """Seconds for one transfer of all the memory."""
    length = len(memory) // len(keys)
    buffers = [memoryview(memory)[at : at + length] for at in range(0, len(memory), length)]
    transfer = Transfer(1, keys, buffers, np.ones(len(keys), np.uint64), time.monotonic() + 120)
    reported = threading.Event()
    tier.wake = reported.set
    began_s = time.perf_counter()
    begin(transfer)
    assert reported.wait(120)
    elapsed_s = time.perf_counter() - began_s
    (outcome,) = tier.poll()
    assert outcome.ok.all(), outcome.error
    return elapsed_s


def wait_for(tier: RemoteTier, probe: Probe) -> None:
    woken = threading.Event()
    tier.wake = woken.set
    while not probe.done:
        woken.wait(0.01)


def loopback_bytes_per_s() -> float:
    """One connection, 64 MiB."""
    listener = socket.create_server(("127.0.0.1", 0))

    def send() -> None:
        with listener.accept()[0] as far:
            for _ in range(64):
                far.sendall(bytes(MIB))

    thread = threading.Thread(target=send)
    thread.start()
    buffer = bytearray(MIB)
    with socket.create_connection(listener.getsockname()) as near:
        began_s = time.perf_counter()
        while near.recv_into(buffer):
            pass
        elapsed_s = time.perf_counter() - began_s
    thread.join()
    listener.close()
    return 64 * MIB / elapsed_s


def measure_tiers(addresses: dict[str, str], rounds: int) -> dict[str, Any]:
    """Bytes per second by store, chunk size and direction; seconds of a probe of a chain that is there."""
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    source, target = bytearray(os.urandom(TOTAL_BYTES)), bytearray(TOTAL_BYTES)
    loopback = [loopback_bytes_per_s() for _ in range(rounds)]
    for round_ in range(rounds):
        for name, url in addresses.items():
            for size, length in CHUNK_BYTES.items():
                place = placed(url, 1000 * round_ + length // 1024)
                writer, reader = open_tier(place), open_tier(place)
                keys = [os.urandom(32) for _ in range(TOTAL_BYTES // length)]
                kept = found.setdefault(name, {}).setdefault(size, {"store": [], "load": [], "probe_s": []})
                kept["store"].append(TOTAL_BYTES / move(writer, writer.store, keys, source))
                began_s = time.perf_counter()
                wait_for(reader, reader.probe([Inquiry(keys, 1)]))
                kept["probe_s"].append(time.perf_counter() - began_s)
                assert reader.lookup(keys).all()
                kept["load"].append(TOTAL_BYTES / move(reader, reader.load, keys, target))
                assert source == target
                target[:] = bytes(TOTAL_BYTES)
                for tier in (writer, reader):
                    tier.close(time.monotonic() + 5)
    return {"tiers": found, "loopback_bytes_per_s": loopback}


def measure_engines(addresses: dict[str, str], prefix_tokens: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds to the first token, cold on one engine and then from each store on another."""
    model = models.half_billion("float32")
    seconds: dict[str, dict[str, list[float]]] = {}
    for round_ in range(rounds):
        for number, (name, url) in enumerate(addresses.items()):
            place = placed(url, 10**6 + round_)
            shared = {"valkey" if url.startswith("redis") else "object": place}
            memory = Memory(kv_cache_memory="512MiB", host_memory="512MiB", **shared)  # type: ignore[arg-type]
            prompt = models.random_tokens(prefix_tokens + QUESTION_TOKENS, seed=100 * round_ + number)
            kept = seconds.setdefault(name, {"cold": [], "hit": []})
            for way in kept:
                with Engine(model, memory) as engine:
                    engine.generate([models.random_tokens(64, seed=10**6)], ONE_TOKEN)
                    (completion,) = engine.generate([prompt], ONE_TOKEN)
                    assert engine.flush(120)
                    reused = sum(completion.reused_tokens.values())
                    assert (reused > prefix_tokens - 128) == (way == "hit"), (name, way, completion.reused_tokens)
                    kept[way].append(completion.ttft_s)
    return seconds


def report_tiers(found: dict[str, Any], show: Callable[[str], None] = print) -> dict[str, Any]:
    loopback = median_spread(found["loopback_bytes_per_s"])
    show(f"bare TCP over loopback: {loopback.median / 1e9:.2f} GB/s")
    kept: dict[str, Any] = {"loopback_bytes_per_s": loopback}
    for name, sizes in found["tiers"].items():
        for size, values in sizes.items():
            kept.setdefault(name, {})[size] = {what: median_spread(numbers) for what, numbers in values.items()}
            store, load, probe = (median_spread(values[what]).median for what in ("store", "load", "probe_s"))
            show(
                f"{name:<10} {size:>7}  store {store / 1e6:7.0f} MB/s  load {load / 1e6:7.0f} MB/s  "
                f"probe of {TOTAL_BYTES // CHUNK_BYTES[size]:4} chunks {probe * 1000:6.1f} ms"
            )
    return kept


def report_engines(found: dict[str, dict[str, list[float]]], show: Callable[[str], None] = print) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, ways in found.items():
        cold, hit = median_spread(ways["cold"]), median_spread(ways["hit"])
        kept[name] = {"cold": cold, "hit": hit}
        show(f"{name:<10} TTFT cold {cold.median:6.2f} s, hit {hit.median:6.2f} s: {hit.median / cold.median:.1%}")
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prefix-tokens", type=int, default=2048)
    parser.add_argument("--only", choices=["tier", "engine"])
    options = parser.parse_args()
    kept: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="stowage-bench-") as directory, stores(Path(directory)) as addresses:
        if options.only != "engine":
            kept["tiers"] = report_tiers(measure_tiers(addresses, options.rounds))
        if options.only != "tier":
            found = measure_engines(addresses, options.prefix_tokens, options.rounds)
            kept["ttft_s"] = report_engines(found)
    write_result("shared_tiers", kept | vars(options))


if __name__ == "__main__":
    main()
