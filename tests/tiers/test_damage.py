"""Whatever lies in a shared store: a load brings exactly what was stored under the key, or nothing; it is mended."""

from __future__ import annotations

import os
import random
import resource
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import obstore
import pytest

from stowage.storage.format.object_envelope import HEAD_BYTES
from tests.tier_client import key
from tests.tiers.client import Client
from tests.tiers.servers import RedisServer
from tests.tiers.test_sharing import Open

LENGTH = 2000
Raw = Callable[[int, bytes | None], bytes]


@pytest.fixture(params=["valkey", "object"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Raw]:
    """An address, and a way to what lies under a number's name: replaces it when given something, returns what was."""
    if request.param == "valkey":
        server: RedisServer = request.getfixturevalue("redis")
        prefix = tmp_path.name

        def raw(number: int, value: bytes | None = None) -> bytes:
            (name,) = server.client.scan_iter(f"{prefix}:*:{key(number).hex()}", count=10_000)
            found: bytes = server.client.get(name)
            if value is not None:
                server.client.set(name, value)
            return found

        return f"{server.url}?prefix={prefix}", raw  # type: ignore[return-value]

    def file(number: int, value: bytes | None = None) -> bytes:
        (path,) = tmp_path.glob(f"objects/*/*/{key(number).hex()}")
        found = path.read_bytes()
        if value is not None:
            path.write_bytes(value)
        return found

    return f"file://{tmp_path / 'objects'}", file  # type: ignore[return-value]


def damaged(value: bytes, other: bytes) -> dict[str, bytes]:
    """Many ways in which a value can be wrong."""
    chance = random.Random(5)
    ways = {
        "empty": b"",
        "one byte": value[:1],
        "head only": value[:HEAD_BYTES],
        "no head": value[HEAD_BYTES:],
        "cut": value[:-1],
        "longer": value + b"\0",
        "much longer": value * 300,
        "zeros": bytes(len(value)),
        "text": b"<Error>no such thing</Error>" * 90,
        "another chunk": other,
        "another payload": value[:HEAD_BYTES] + other[HEAD_BYTES:],
        "another head": other[:HEAD_BYTES] + value[HEAD_BYTES:],
    }
    for _ in range(30):
        place, bit = chance.randrange(len(value)), chance.randrange(8)
        flipped = bytearray(value)
        flipped[place] ^= 1 << bit
        ways[f"bit {bit} of byte {place}"] = bytes(flipped)
    return ways


def test_every_damage_is_a_miss_that_is_counted_and_repaired(store: tuple[str, Raw], tiers: Open) -> None:
    url, raw = store
    client = Client(tiers(url, absent_s=0.0))
    assert client.store(range(3), length=LENGTH).ok.all()
    good, other = raw(0, None), raw(1, None)
    for number, (what, bad) in enumerate(damaged(good, other).items()):
        raw(0, bad)
        before = client.count("corrupt") + client.count("unreadable") + client.count("vanished")
        outcome = client.load(range(3), length=LENGTH)
        assert outcome.ok.tolist() == [False, True, True], what
        assert client.count("corrupt") + client.count("unreadable") + client.count("vanished") == before + 1, what
        client.tier.discard([key(0)])
        assert client.lookup([0]) == [0]
        if number % 2:
            client.probe([0])  # a head may be good, and its payload not: that must not keep it from being repaired
        assert client.store([0], length=LENGTH).ok.all()
        assert raw(0, None) == good, f"not repaired: {what}"
        assert client.load([0], length=LENGTH).ok.all()
    assert client.count("already_there") == 0


def test_a_newcomer_is_not_misled(store: tuple[str, Raw], tiers: Open) -> None:
    """It knows nothing of a key, and whatever is there, its look-up is followed by a load that is right or none."""
    url, raw = store
    Client(tiers(url)).store(range(2), length=LENGTH)
    good, other = raw(0, None), raw(1, None)
    for what, bad in damaged(good, other).items():
        raw(0, bad)
        client = Client(tiers(url))
        client.probe([0])
        assert not client.load([0], length=LENGTH).ok.any(), what
        client.tier.close(0.0)


def test_a_value_that_is_far_too_long_is_not_fetched(
    store: tuple[str, Raw], tiers: Open, tmp_path: Path, redis: RedisServer
) -> None:
    """Memory stays bounded, whoever writes there."""
    url, _ = store
    client = Client(tiers(url))
    client.store([0], length=LENGTH)
    if url.startswith("file"):
        (path,) = tmp_path.glob(f"objects/*/*/{key(0).hex()}")
        os.truncate(path, 8 << 30)  # takes no space
    else:
        (name,) = redis.client.scan_iter(f"{tmp_path.name}:*", count=10_000)
        redis.client.setrange(name, 200 << 20, b"x")
    tracemalloc.start()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert not client.load([0], length=LENGTH).ok.any()
    Client(tiers(url)).probe([0])
    assert tracemalloc.get_traced_memory()[1] < 20 << 20
    tracemalloc.stop()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10


def test_a_name_of_another_type_is_a_miss(redis: RedisServer, tiers: Open, tmp_path: Path) -> None:
    prefix = tmp_path.name
    client = Client(tiers(f"{redis.url}?prefix={prefix}"))
    client.store(range(2))
    (name,) = redis.client.scan_iter(f"{prefix}:*:{key(0).hex()}", count=10_000)
    redis.client.delete(name)
    redis.client.rpush(name, "a", "b")
    assert client.load(range(2)).ok.tolist() == [False, True] and client.count("corrupt") == 1
    client.tier.discard([key(0)])
    assert client.store([0]).ok.all() and client.load([0]).ok.all()


@pytest.mark.parametrize("place", ["directory", "s3"])
def test_an_object_that_is_replaced_while_it_is_read(
    place: str, tiers: Open, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long ones come in parts. Another machine has stored it anew between two of them: it is no damage, and comes."""
    url = f"file://{tmp_path}" if place == "directory" else request.getfixturevalue("s3")
    client, other = Client(tiers(url)), Client(tiers(url))
    length = 13 << 20
    assert client.store([0], length=length).ok.all() and other.probe([0]) == [1]
    get, turns = obstore.get_async, []

    async def replaced_after_the_first(store: Any, name: str, *, options: Any = None) -> Any:
        found = await get(store, name, options=options)
        if not turns:
            turns.append(name)
            assert other.store([0], length=length, mask=3).ok.all()
        return found

    monkeypatch.setattr(obstore, "get_async", replaced_after_the_first)
    outcome = client.load([0], length=length)
    assert outcome.ok.all() and outcome.masks.tolist() == [3]
    assert client.count("corrupt") == 0 and client.count("retries") >= 1
