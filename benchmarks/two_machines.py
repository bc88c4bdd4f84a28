"""Time to first token on one machine for a prompt that another has computed, through each shared tier, against cold.

``python -m benchmarks.two_machines [--rounds N] [--prefix-tokens N] [--dtype D] [--link-mb N]``. Two processes with an
engine each, in network namespaces of their own, and the stores in a third: nothing is shared but those. Where
namespaces cannot be made, all is on one network; the result says so. `--link-mb` bounds the link of both machines, in
megabytes a second; without it the link is memory, and the servers (moto is one for tests) are the limit.

Every round, for each store: A computes a new prompt, B answers it from the store, B computes another one, A answers
that from the store. Beside each round the store's bandwidth is measured with plain clients on the same link: as many
bytes as the prefix has, in values of 8 MiB, over four connections. No hit can be quicker than that.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import boto3
import botocore.config
import redis

from benchmarks import models
from benchmarks._report import median_spread, write_result
from tests.machines.machine import Machine, talk
from tests.machines.network import Loopback, Namespaces, Network, enter, obstacle
from tests.machines.stores import KINDS, Store, opened
from tests.tiers.servers import BUCKET, RedisServer, S3Server

MIB = 1 << 20
VALUE_BYTES = 8 * MIB
CONNECTIONS = 4
QUESTION_TOKENS = 32
TRIES_MAX = 4
MEMORY = {"kv_cache_memory": "512MiB", "host_memory": "512MiB"}


class OneNetwork(Loopback):
    """No link in between."""

    def address(self, machine: str, port: int) -> tuple[str, int]:
        return "127.0.0.1", port


class Started:
    """A process that was started from here."""

    def __init__(self, *told: object) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.two_machines", "--machine", json.dumps(told)]
        )

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def wait(self) -> int:
        return self._process.wait()


def live(place: str, socket: str, dtype: str, memory: dict[str, Any], environ: dict[str, str]) -> None:
    """What runs in such a process."""
    enter(place)
    import os

    os.environ.update(environ)
    from stowage.config.memory import Memory
    from stowage.engine.engine import Engine

    with Engine(models.half_billion(dtype), Memory(**memory)) as engine:
        talk(socket, engine)


@contextmanager
def machines(network: Network, store: Store, dtype: str, directory: Path) -> Iterator[dict[str, Machine]]:
    """A and B, warm."""
    started: dict[str, Machine] = {}
    try:
        for name in ("a", "b"):
            told = (dtype, MEMORY | store.memory(name), store.environ(name))
            path = network.path(name)
            started[name] = Machine(directory, lambda socket, path=path, told=told: Started(path, socket, *told))  # type: ignore[misc]
            for seed in (1, 2):
                started[name].ask(models.random_tokens(600, seed=10**6 + seed), 1, load_always=False)
        yield started
        for machine in started.values():
            machine.close()
    finally:
        for machine in started.values():
            machine.drop()


class Bandwidth:
    """What plain clients get out of a store, on the link of machine B."""

    def __init__(self, network: Network, server: RedisServer | S3Server | Path, values: int) -> None:
        self._network, self._server = network, server
        self._names = [f"bandwidth-{number}" for number in range(values)]

    def bytes_per_s(self) -> float:
        """Puts the values there, and reads them all. What clients need to get ready does not count."""
        clients = [self._client() for _ in range(CONNECTIONS)]
        shares = [self._names[number::CONNECTIONS] for number in range(CONNECTIONS)]
        with self._network.inside("b"):
            value = bytes(range(256)) * (VALUE_BYTES // 256)
            for name in self._names:
                self._put(clients[0], name, value)
            for client in clients:
                self._read(client, self._names[:1])
            threads = [threading.Thread(target=self._read, args=pair) for pair in zip(clients, shares, strict=True)]
            began_s = time.perf_counter()
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return len(self._names) * VALUE_BYTES / (time.perf_counter() - began_s)

    def _client(self) -> Any:
        if isinstance(self._server, Path):
            return None
        host, port = self._network.address("b", self._server.port)
        if isinstance(self._server, RedisServer):
            return redis.Redis(host=host, port=port)
        session = boto3.session.Session("test-id", "test-secret", region_name="us-east-1")
        config = botocore.config.Config(proxies={}, s3={"addressing_style": "path"})
        return session.client("s3", endpoint_url=f"http://{host}:{port}", config=config)

    def _put(self, client: Any, name: str, value: bytes) -> None:
        if isinstance(self._server, Path):
            (self._server / name).write_bytes(value)
        elif isinstance(self._server, RedisServer):
            client.set(name, value, px=60_000)
        else:
            client.put_object(Bucket=BUCKET, Key=name, Body=value)

    def _read(self, client: Any, names: list[str]) -> None:
        buffer = bytearray(VALUE_BYTES)
        for name in names:
            if isinstance(self._server, Path):
                with (self._server / name).open("rb", buffering=0) as file:
                    assert file.readinto(buffer) == VALUE_BYTES
            elif isinstance(self._server, RedisServer):
                assert len(client.get(name)) == VALUE_BYTES
            else:
                assert len(client.get_object(Bucket=BUCKET, Key=name)["Body"].read()) == VALUE_BYTES


def one_turn(first: Machine, second: Machine, tier: str, prefix_tokens: int, seed: int) -> tuple[float, float]:
    """Seconds to the first token, cold on one and then from the store on the other.

    An engine does not wait for a store that takes too long to say what it has: on a busy machine that may happen, and
    the turn is taken again with another prompt.
    """
    for attempt in range(TRIES_MAX):
        prompt = models.random_tokens(prefix_tokens + QUESTION_TOKENS, seed=seed + 1000 * attempt)
        cold = first.ask(prompt, 1, load_always=False)
        assert not cold.reused
        first.flush()
        hit = second.ask(prompt, 1, load_always=False)
        if hit.reused.get(tier, 0) >= prefix_tokens - 128:
            return cold.ttft_s, hit.ttft_s
        print(f"not from the store: {hit.reused or 'computed'}; once more", file=sys.stderr)
    raise SystemExit(f"{TRIES_MAX} prompts in a row did not come from the store: this machine is too busy for it")


def measure(
    network: Network, kind: str, options: argparse.Namespace, directory: Path, show: Callable[[str], None] = print
) -> dict[str, list[float]]:
    """Seconds to the first token by way, and the store's bytes per second, of each round."""
    prefix = options.prefix_tokens
    found: dict[str, list[float]] = {"cold": [], "hit": [], "bytes_per_s": []}
    with ExitStack() as stack:
        shared = directory / f"shared-{kind}"
        shared.mkdir()
        server = stack.enter_context(opened(network, kind, shared))
        store = Store(network, kind, server)
        running = stack.enter_context(machines(network, store, options.dtype, directory))
        for name in running:
            if options.link_mb:
                network.slow(name, round(options.link_mb * 1e6))
        bandwidth = Bandwidth(
            network,
            server,
            max(CONNECTIONS, prefix * models.half_billion_bytes_per_token(options.dtype) // VALUE_BYTES),
        )
        seeds = itertools.count(10_000 * KINDS.index(kind))
        for round_ in range(options.rounds):
            for first, second in (("a", "b"), ("b", "a")):
                cold_s, hit_s = one_turn(running[first], running[second], store.tier, prefix, next(seeds))
                found["cold"].append(cold_s)
                found["hit"].append(hit_s)
            found["bytes_per_s"].append(bandwidth.bytes_per_s())
            show(f"{kind:<10} round {round_ + 1}: cold {found['cold'][-1]:.2f} s, hit {found['hit'][-1]:.2f} s")
    return found


def report(
    kind: str, found: dict[str, list[float]], nbytes: int, show: Callable[[str], None] = print
) -> dict[str, Any]:
    """Print medians, spread, ratio and limit; the numbers to keep."""
    cold, hit, rate = (median_spread(found[what]) for what in ("cold", "hit", "bytes_per_s"))
    limit_s = nbytes / rate.median
    show(
        f"{kind:<10} TTFT cold {cold.median:6.2f} s ({cold.least:.2f} to {cold.largest:.2f}), on the other machine "
        f"{hit.median:6.3f} s ({hit.least:.3f} to {hit.largest:.3f}): {hit.median / cold.median:.1%} of cold; "
        f"{nbytes / MIB:.0f} MiB at {rate.median / 1e6:,.0f} MB/s take {limit_s:.3f} s at least"
    )
    return {
        "ttft_s": {"cold": cold, "hit": hit},
        "of_cold": hit.median / cold.median,
        "store_bytes_per_s": rate,
        "limit_s": limit_s,
        "times_the_limit": hit.median / limit_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prefix-tokens", type=int, default=4096)
    parser.add_argument("--dtype", default=models.native_dtype(), choices=["bfloat16", "float32"])
    parser.add_argument("--link-mb", type=float, default=0.0, help="megabytes a second; 0: as quick as it goes")
    parser.add_argument("--only", choices=KINDS)
    parser.add_argument("--machine", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.machine:
        live(*json.loads(options.machine))
        return
    why_not = obstacle()
    network: Network = OneNetwork() if why_not else Namespaces()
    nbytes = options.prefix_tokens * models.half_billion_bytes_per_token(options.dtype)
    kept: dict[str, Any] = {"network": why_not or "namespaces", "prefix_bytes": nbytes}
    try:
        with tempfile.TemporaryDirectory(prefix="stowage-bench-") as directory:
            for kind in [options.only] if options.only else KINDS:
                kept[kind] = report(kind, measure(network, kind, options, Path(directory)), nbytes)
    finally:
        network.close()
    del options.machine
    write_result("two_machines", kept | vars(options))


if __name__ == "__main__":
    main()
