"""The shared stores of a network, each of one kind, as machines reach them and as tests look into them."""

from __future__ import annotations

import contextlib
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.machines.network import STORES, Network
from tests.tiers.servers import BUCKET, RedisServer, S3Server, credentials

KINDS = ("valkey", "s3", "directory")


class Store:
    """One place of its own in a store. `tier`: how an engine calls it."""

    def __init__(self, network: Network, kind: str, server: RedisServer | S3Server | Path) -> None:
        self._network = network
        self.kind = kind
        self.tier = "valkey" if kind == "valkey" else "object"
        self._server = server
        self._place = uuid.uuid4().hex

    def memory(self, machine: str) -> dict[str, Any]:
        """What that machine's `Memory` needs."""
        if isinstance(self._server, Path):
            return {"object": f"file://{self._server / self._place}"}
        if isinstance(self._server, S3Server):
            return {"object": f"s3://{BUCKET}/{self._place}"}
        host, port = self._network.address(machine, self._server.port)
        return {"valkey": f"redis://{host}:{port}?prefix={self._place}"}

    def environ(self, machine: str) -> dict[str, str]:
        if not isinstance(self._server, S3Server):
            return {}
        host, port = self._network.address(machine, self._server.port)
        return credentials(port) | {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "NO_PROXY": host}

    def flags(self, machine: str) -> list[str]:
        """The same for the command."""
        return [word for name, value in self.memory(machine).items() for word in (f"--{name}", value)]

    def count(self) -> int:
        """Chunks that are there."""
        return len(self._names())

    def _names(self) -> list[str]:
        if isinstance(self._server, Path):
            files = (self._server / self._place).rglob("*")
            return [str(path) for path in files if path.is_file() and "#" not in path.name]
        with self._network.inside(STORES):
            if isinstance(self._server, S3Server):
                listed = self._server.get(f"/{BUCKET}?list-type=2&prefix={self._place}").decode()
                assert "<IsTruncated>true" not in listed
                return re.findall(r"<Key>(.*?)</Key>", listed)
            return [name.decode() for name in self._server.client.scan_iter(f"{self._place}:*", count=10_000)]

    def lose_everything(self) -> None:
        """The server is there, and has nothing any more."""
        if isinstance(self._server, Path):
            shutil.rmtree(self._server / self._place)
            return
        with self._network.inside(STORES):
            if isinstance(self._server, RedisServer):
                self._server.client.flushall()
            else:
                self._server.get("/moto-api/reset", method="POST")
                self._server.get(f"/{BUCKET}", method="PUT")


@contextlib.contextmanager
def opened(network: Network, kind: str, directory: Path) -> Iterator[RedisServer | S3Server | Path]:
    """The server of one kind, which listens to all machines; for a directory, the directory."""
    if kind == "directory":
        yield directory
        return
    with network.inside(STORES):
        if kind == "valkey":
            server: RedisServer | S3Server = RedisServer("--bind", "0.0.0.0", "--protected-mode", "no")
        else:
            server = S3Server(host="0.0.0.0")
    try:
        yield server
    finally:
        if isinstance(server, RedisServer):
            server.client.close()
        server.stop()
