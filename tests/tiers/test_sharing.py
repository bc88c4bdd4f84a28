"""What one machine stores, another finds: with how many questions, and what happens when what was found is gone."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from docs.examples.dict_tier import DictTier
from stowage.cache.store import TieredStore
from stowage.core.geometry import Geometry, Group, Kind
from stowage.core.prefix_search import Anchors
from stowage.storage.format.protection import Method, Protection, SecretKey
from stowage.storage.objects import BOUNDS, ObjectTier
from stowage.storage.protocol import Inquiry, Probe
from stowage.storage.remote.backend import Answer, Failure
from stowage.storage.remote.tier import RemoteTier
from tests.tier_client import key
from tests.tiers.client import Client
from tests.tiers.servers import RedisServer

Open = Callable[..., RemoteTier]


def test_another_machine_finds_what_one_has_stored(url: str, tiers: Open) -> None:
    one, other = Client(tiers(url)), Client(tiers(url))
    assert one.store(range(40), mask=3).ok.all()
    assert one.lookup(range(40)) == [3] * 40
    assert other.lookup(range(60)) == [0] * 60, "nobody asked"
    assert other.probe(range(60), mask=3) == [3] * 40 + [0] * 20
    outcome = other.load(range(40))
    assert outcome.ok.all() and outcome.masks.tolist() == [3] * 40
    assert other.count("corrupt") == other.count("vanished") == 0 and other.count("reads") == 40


def test_what_is_missing_is_asked_for_again_after_a_while(url: str, tiers: Open) -> None:
    now_s = [0.0]
    one, other = Client(tiers(url)), Client(tiers(url, absent_s=2.0, clock=lambda: now_s[0]))
    assert other.probe(range(8)) == [0] * 8
    one.store(range(8))
    asked = other.count("probe_keys")
    assert other.probe(range(8)) == [0] * 8 and other.count("probe_keys") == asked, "it was absent a moment ago"
    now_s[0] = 2.0
    assert other.probe(range(8)) == [1] * 8


@pytest.mark.parametrize(("kind", "cold", "warm"), [("object", 8, 64), ("valkey", 512, 1024)])
def test_a_long_prompt_costs_few_questions(kind: str, cold: int, warm: int, tiers: Open, redis: RedisServer) -> None:
    """1,000 chunks are 64,000 tokens."""
    url = "memory:///" if kind == "object" else f"{redis.url}?prefix=long"
    client = Client(tiers(url, absent_s=0.0))
    client.probe(range(1000))
    assert client.count("probe_keys") <= cold
    client.store(range(617), length=64)
    client.tier._presence._masks.clear()  # as another machine sees it
    before = client.count("probe_keys")
    assert client.probe(range(1000)) == [1] * 617 + [0] * 383
    assert client.count("probe_keys") - before <= warm


def test_snapshots_at_the_ends_of_prompts_are_found(url: str, tiers: Open) -> None:
    """Recurrent state: every eighth is kept, and the one at the end of the prompt that somebody else had."""
    one, other = Client(tiers(url)), Client(tiers(url))
    kept = [7, 15, 23, 31, 36]
    one.store(kept)
    found = other.probe(range(60), stride=8)
    assert [place for place, mask in enumerate(found) if mask] == kept


def test_what_was_taken_to_be_there_and_is_not_is_a_miss(tiers: Open, tmp_path: Path) -> None:
    """A store that has lost something in the middle costs one load, not a wrong answer."""
    url = f"file://{tmp_path}"
    one, other = Client(tiers(url)), Client(tiers(url, absent_s=1000.0))
    one.store(range(200))
    for path in tmp_path.glob(f"*/*/{key(101).hex()}"):
        path.unlink()
    assert other.probe(range(200)) == [1] * 200, "few were asked about"
    outcome = other.load(range(200))
    assert outcome.ok.tolist() == [number != 101 for number in range(200)] and other.count("vanished") == 1
    other.tier.discard([key(101)])  # as the store does with what failed to load
    assert other.probe(range(200))[101] == 0
    assert other.store([101]).ok.all() and other.lookup([101]) == [1]
    assert Client(tiers(url)).load([101]).ok.all()


def test_what_another_machine_has_stored_is_not_sent_again(url: str, tiers: Open) -> None:
    one, other = Client(tiers(url)), Client(tiers(url))
    one.store(range(10), mask=7)
    assert other.store(range(12), mask=3).ok.all()
    assert (other.count("writes"), other.count("already_there")) == (2, 10)
    assert other.lookup(range(12)) == [7] * 10 + [3] * 2, "what is there has more blocks"
    assert other.store(range(2), mask=15).ok.all() and other.count("writes") == 4, "known to gain blocks: not asked"
    assert one.load(range(12)).masks.tolist() == [15] * 2 + [7] * 8 + [3] * 2


def test_models_and_tenants_never_meet(url: str, tiers: Open) -> None:
    one, other = Client(tiers(url, b"1" * 32)), Client(tiers(url, b"2" * 32))
    one.store(range(10))
    assert other.probe(range(10)) == [0] * 10
    assert not other.load(range(10)).ok.any()
    assert other.count("corrupt") == 0, "not even their names are the same"


def test_an_encrypted_store_is_read_with_the_key_only(url: str, tiers: Open) -> None:
    key, rotated = SecretKey(b"1" * 32), SecretKey(b"2" * 32)
    sealed = Protection(Method.AES_256_GCM, (key,))
    Client(tiers(url, protection=sealed)).store(range(5))
    assert Client(tiers(url, protection=sealed)).load(range(5)).ok.all()
    assert Client(tiers(url, protection=Protection(Method.AES_256_GCM, (rotated, key)))).load(range(5)).ok.all()
    for protection in (Protection(), Protection(Method.BLAKE3, (key,)), Protection(Method.AES_256_GCM, (rotated,))):
        stranger = Client(tiers(url, protection=protection))
        assert stranger.probe(range(5)) == [0] * 5 and stranger.count("unreadable") == 5
        assert not stranger.load(range(5)).ok.any()


def test_a_store_takes_over_what_it_cannot_read(url: str, tiers: Open) -> None:
    """Left by another version or protection under the same names: written anew, not taken for present."""
    Client(tiers(url, protection=Protection(Method.BLAKE3, (SecretKey(b"1" * 32),)))).store(range(3))
    client = Client(tiers(url))
    assert client.store(range(3)).ok.all() and client.count("already_there") == 0
    assert Client(tiers(url)).load(range(3)).ok.all()


def test_objects_are_removed_to_keep_the_limit(tiers: Open, tmp_path: Path) -> None:
    limit = 10 * (4096 + 192)
    client = Client(tiers(f"file://{tmp_path}", limit_bytes=limit))
    for number in range(25):
        assert client.store([number]).ok.all()
        assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) <= limit
    assert client.lookup(range(25)) == [0] * 15 + [1] * 10
    assert client.load(range(15, 25)).ok.all() and not client.load(range(15)).ok.any()
    stats = client.tier.stats()
    assert (stats["bytes_used"], stats["bytes_limit"], stats["removed"]) == (limit, limit, 15)
    assert not client.store([99], length=limit).ok.any(), "longer than the limit"
    assert client.count("write_errors") == 1


class Counting:
    """Counts what an object tier asks of its backend."""

    def __init__(self, tier: ObjectTier) -> None:
        self.calls: Counter[str] = Counter()
        backend = tier._backend
        for name in ("head", "get", "put"):
            setattr(backend, name, self._counted(name, getattr(backend, name)))

    def _counted(self, name: str, call: Callable[..., object]) -> Callable[..., object]:
        async def counted(names: Sequence[str], *rest: object) -> Sequence[Answer | Failure]:
            self.calls[name] += len(names)
            return await call(names, *rest)  # type: ignore[misc]

        return counted


def test_the_number_of_requests_is_the_one_in_the_documentation(tiers: Open, tmp_path: Path) -> None:
    """A prompt of 100 chunks, cold, on one machine; then the same prompt on another, then with another end."""
    url = f"file://{tmp_path}"
    one = tiers(url)
    asked = Counting(one)
    client = Client(one)
    client.probe(range(100))
    assert client.store(range(100)).ok.all()
    assert asked.calls["put"] == 100 and asked.calls["get"] == 0
    assert asked.calls["head"] <= 8 + 1, "to find out that it is cold, and the one with which a tier begins"
    two = tiers(url)
    asked = Counting(two)
    client = Client(two)
    assert all(client.probe(range(100)))
    assert client.load(range(100)).ok.all()
    assert asked.calls["get"] == 100 and asked.calls["put"] == 0 and asked.calls["head"] <= 8 + 1
    before = asked.calls["head"]
    assert client.probe([*range(100), *range(200, 250)])[:100] == [1] * 100
    assert asked.calls["head"] - before <= BOUNDS.search_widths[0]
    assert asked.calls.keys() <= {"head", "get", "put"}


def test_nothing_is_listed(tiers: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import obstore

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("listed")

    for name in [name for name in dir(obstore) if name.startswith("list")]:
        monkeypatch.setattr(obstore, name, refuse)
    client = Client(tiers(f"file://{tmp_path}"))
    client.probe(range(20))
    client.store(range(20))
    assert client.load(range(20)).ok.all()


def test_the_store_asks_only_about_what_is_not_below_host_already(url: str, tiers: Open) -> None:
    """`TieredStore.probe` leaves out the beginning of a prompt that host has."""
    geometry = Geometry([Group(0, Kind.FULL, 16, 4, 1024)])
    tier = tiers(url)
    store = TieredStore(geometry, 1 << 20, [tier])
    keys = [key(number) for number in range(30)]
    mask = geometry.groups[0].full_mask

    def keep(places: range) -> None:
        slots = store.reserve(0, [keys[place] for place in places], np.full(len(places), mask, np.uint64))
        store.commit(slots)
        assert store.flush(30)

    keep(range(25))
    client = Client(tier)
    before = client.count("probe_keys")
    (probe,) = store.probe([(0, keys)])
    while not probe.done:
        client.woken.wait(1)
    assert client.count("probe_keys") - before == 5
    assert store.probe([(0, keys[:25])]) == [], "nothing to ask"
    store.close()


@pytest.mark.parametrize(("place", "mib"), [("directory", 17), ("s3", 33)])
def test_long_objects_go_in_parts(
    place: str, mib: int, tiers: Open, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Read in parts of 8 MiB, written so beyond 32: an odd length, another length, a bit flipped in the last part."""
    url = f"file://{tmp_path}" if place == "directory" else request.getfixturevalue("s3")
    length = (mib << 20) + 12_345
    client = Client(tiers(url))
    assert client.store([0], length=length).ok.all() and client.load([0], length=length).ok.all()
    assert not client.load([0], length=length - 1).ok.any() and not client.load([0], length=length + 1).ok.any()
    if place == "directory":
        (path,) = tmp_path.glob("*/*/*")
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        assert not client.load([0], length=length).ok.any() and client.count("corrupt") == 3


class Listening(DictTier):
    """Notes what it is asked."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.asked: list[Inquiry] = []

    def probe(self, inquiries: list[Inquiry]) -> Probe:
        self.asked += inquiries
        return Probe(done=True)


def test_snapshots_are_asked_about_at_their_distance() -> None:
    """Of recurrent groups only every `snapshot_tokens` is sure to be there, whatever host has."""
    geometry = Geometry([Group(0, Kind.FULL, 16, 4, 1024), Group(1, Kind.RECURRENT, 64, 1, 4096)])
    tier = Listening()
    store = TieredStore(geometry, 1 << 20, [tier], snapshot_tokens=512)
    keys = [key(number) for number in range(30)]
    store.commit(store.reserve(0, keys[:3], np.full(3, 15, np.uint64)))
    store.commit(store.reserve(1, keys[7:8], np.ones(1, np.uint64)))
    store.probe([(0, keys), (1, keys)])
    assert [(len(one.keys), one.mask, one.first, one.stride) for one in tier.asked] == [(27, 15, 3, 1), (30, 1, 0, 8)]
    store.close()


def test_of_groups_that_are_not_stored_whole_the_certain_chunks_are_asked_about() -> None:
    """All keys of the prompt, whatever host has: a window that host has says nothing about those before it."""
    tier = Listening()
    store = TieredStore(
        Geometry((Group(0, Kind.FULL, 16, 4, 1024), Group(1, Kind.SLIDING, 16, 4, 1024, 100))), 1 << 20, [tier]
    )
    keys, windows = ([key(number) for number in range(first, first + 30)] for first in (0, 100))
    store.commit(store.reserve(1, windows[:2], np.full(2, 15, np.uint64)))
    store.probe([(0, keys), (1, windows)], {1: Anchors((0, 1, 6, 7), 3)})
    assert [(len(one.keys), one.first, one.certain) for one in tier.asked] == [
        (30, 0, None),
        (30, 0, Anchors((0, 1, 6, 7), 3)),
    ]
    store.close()


def test_a_directory_that_is_removed_meanwhile_is_a_miss(tiers: Open, tmp_path: Path) -> None:
    client = Client(tiers(f"file://{tmp_path / 'objects'}"))
    client.store(range(5))
    shutil.rmtree(tmp_path / "objects")
    assert not client.load(range(5)).ok.any() and client.count("vanished") == 5
    assert client.store(range(5, 8)).ok.all(), "made again"
