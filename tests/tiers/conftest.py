"""One Redis and one S3 server per run, shared by tests that each use a place of their own in it."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stowage.storage.objects import ObjectTier
from stowage.storage.remote.tier import RemoteTier
from stowage.storage.valkey import ValkeyTier
from tests.tiers.servers import BUCKET, RedisServer, S3Server, credentials, redis_server


@pytest.fixture(scope="session")
def redis() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    server = S3Server()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture
def s3(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of a place of one's own in a bucket."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in credentials(s3_server.port).items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/{uuid.uuid4().hex}"


@pytest.fixture(params=["valkey", "object"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of a place of one's own in each kind of shared store."""
    if request.param == "valkey":
        server: RedisServer = request.getfixturevalue("redis")
        return f"{server.url}?prefix={uuid.uuid4().hex}"
    return f"file://{tmp_path / 'objects'}"


@pytest.fixture
def tiers() -> Iterator[Callable[..., RemoteTier]]:
    """Opens tiers on an address; closed, and their invariants checked, at the test's end."""
    opened: list[RemoteTier] = []

    def tier(url: str, namespace: bytes = bytes(range(32)), **options: object) -> RemoteTier:
        make = ValkeyTier if url.startswith(("redis", "valkey")) else ObjectTier
        opened.append(make(url, namespace, **options))  # type: ignore[arg-type]
        return opened[-1]

    yield tier
    for one in opened:
        one.check()
        one.close(0.0)
        assert not one.stats()["faults"]
