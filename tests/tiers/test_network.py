"""A network that is slow, silent, cut or gone: loads are exact or a miss by their deadline, and all is well afterwards.

On real servers behind a proxy of our own. No test measures how quick anything is: deadlines are met when the tier has
answered although the network never did.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from stowage.cache.store import TieredStore
from stowage.core.geometry import Geometry, Group, Kind
from stowage.storage.remote import tier as tier_module
from stowage.storage.remote.tier import RemoteTier
from tests.depth import mostly_rare
from tests.tier_client import key
from tests.tiers.client import Client
from tests.tiers.proxy import Mood, Proxy, proxied
from tests.tiers.servers import BUCKET, RedisServer, wait_until

BROKEN = [Mood.SILENT, Mood.CUT, Mood.REFUSE, Mood.FAIL, Mood.SLOW]
WritePipeline = tuple[str, Proxy]


@pytest.fixture(params=["valkey", "object"])
def line(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[WritePipeline]:
    """The address of a store behind a proxy, and the proxy."""
    name = f"line-{time.monotonic_ns()}"
    if request.param == "valkey":
        server: RedisServer = request.getfixturevalue("redis")
        with proxied(server.port) as proxy:
            yield f"redis://127.0.0.1:{proxy.port}?prefix={name}", proxy
        return
    request.getfixturevalue("s3")
    with proxied(request.getfixturevalue("s3_server").port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        yield f"s3://{BUCKET}/{name}", proxy


def mend(client: Client, proxy: Proxy) -> None:
    """A good network again; wait until the tier has noticed."""
    proxy.mood = Mood.PASS
    until_s = time.monotonic() + 60
    while not client.load([0]).ok.all():
        assert time.monotonic() < until_s, "the tier does not come back"


@pytest.mark.parametrize("mood", mostly_rare(BROKEN, [Mood.SILENT, Mood.CUT]), ids=lambda mood: mood.name.lower())
def test_a_broken_network_is_a_miss(mood: Mood, line: WritePipeline, tiers: Callable[..., RemoteTier]) -> None:
    url, proxy = line
    client = Client(tiers(url, request_timeout_s=1.0))
    wait_until(lambda: client.store(range(6)).ok.all(), what="a second for an answer, on a busy machine,")
    proxy.cut_bytes = 2000
    proxy.mood = mood
    began_s = time.monotonic()
    assert not client.load(range(6), seconds=0.5).ok.any()
    kept = client.store(range(6, 9), seconds=0.5).ok.tolist()
    assert time.monotonic() - began_s < 30, "it hangs"
    assert mood in (Mood.CUT, Mood.SLOW) or not any(kept), "their answers are short enough for those"
    assert client.lookup(range(9)) == [1] * 6 + [int(one) for one in kept], "a failure says nothing about the others"
    mend(client, proxy)
    wait_until(lambda: client.store(range(6, 9)).ok.all(), what="a store that keeps again")
    wait_until(lambda: client.load(range(9)).ok.all(), what="a store that brings again")
    assert client.count("corrupt") == 0


@pytest.mark.parametrize(
    "mood", mostly_rare([Mood.SILENT, Mood.REFUSE], [Mood.REFUSE]), ids=lambda mood: mood.name.lower()
)
def test_a_probe_ends_without_an_answer(mood: Mood, line: WritePipeline, tiers: Callable[..., RemoteTier]) -> None:
    url, proxy = line
    client = Client(tiers(url, request_timeout_s=1.0))
    client.store(range(6))
    other = Client(tiers(url, request_timeout_s=0.2))
    other.probe([99])
    proxy.mood = mood
    assert other.probe(range(6)) == [0] * 6
    assert other.tier.stats()["healthy"] == 0 and other.count("probe_errors") > 0
    asked = other.count("probes")
    other.probe(range(6))
    assert other.count("probes") <= asked + 1, "it is left alone for a while"
    proxy.mood = Mood.PASS
    until_s = time.monotonic() + 60
    while other.probe(range(6)) != [1] * 6:
        assert time.monotonic() < until_s, "the tier does not come back"
        time.sleep(0.02)
    assert other.tier.stats()["healthy"] == 1


def test_deadlines_hold_however_long_an_answer_may_take(
    line: WritePipeline, tiers: Callable[..., RemoteTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a transfer, and of a probe, whose end nobody else sets."""
    monkeypatch.setattr(tier_module, "PROBE_S_MAX", 0.2)
    url, proxy = line
    client = Client(tiers(url, request_timeout_s=1000.0))
    client.store(range(3))
    proxy.mood = Mood.SILENT
    began_s = time.monotonic()
    for verb in ("load", "store"):
        client.start(verb, range(3), 4096, 1, began_s + 0.2)
    assert not any(outcome.ok.any() or outcome.refused for outcome in client.outcomes(2))
    assert client.count("timed_out") == 6 and client.tier.stats()["healthy"] == 0
    client.tier._transfers.health.succeeded()
    assert client.probe([99]) == [0] and client.tier.stats()["healthy"] == 0
    assert time.monotonic() - began_s < 30


def test_an_answer_that_was_given_up_is_not_taken_for_the_next(
    line: WritePipeline, tiers: Callable[..., RemoteTier]
) -> None:
    """A connection on which half an answer is still to come must not be used again."""
    url, proxy = line
    client = Client(tiers(url, request_timeout_s=30.0))
    length = 200_000
    assert client.store(range(8), length=length).ok.all()
    proxy.rate = 2_000_000
    for turn in range(8):
        proxy.mood = Mood.SLOW
        client.load([turn], length=length, seconds=0.02 + 0.01 * turn)
        proxy.mood = Mood.PASS
        assert client.load([7 - turn], length=length).ok.all()
    assert client.count("corrupt") == 0


def test_trouble_that_passes_is_tried_again_in_time(line: WritePipeline, tiers: Callable[..., RemoteTier]) -> None:
    url, proxy = line
    client = Client(tiers(url))
    client.store(range(3))
    proxy.mood = Mood.REFUSE
    client.start("load", range(3), 4096, 0, time.monotonic() + 30)
    until_s = time.monotonic() + 30
    while not client.count("retries"):
        assert time.monotonic() < until_s
        time.sleep(0.001)
    proxy.mood = Mood.PASS
    (outcome,) = client.outcomes(1)
    assert outcome.ok.all() or client.load(range(3)).ok.all()
    assert client.count("retries") > 0


def test_transfers_beyond_the_queue_are_refused_at_once(line: WritePipeline, tiers: Callable[..., RemoteTier]) -> None:
    url, proxy = line
    client = Client(tiers(url, transfers_max=2))
    client.store([0])
    proxy.mood = Mood.SILENT
    for _ in range(5):
        client.start("load", [0], 4096, 0, time.monotonic() + 1.0)
    refused = client.outcomes(3)
    assert all(outcome.refused and not outcome.ok.any() for outcome in refused)
    assert [outcome.refused for outcome in client.outcomes(2)] == [False, False]
    assert client.count("dropped") == 3


def test_closing_does_not_wait_for_a_silent_network(line: WritePipeline, tiers: Callable[..., RemoteTier]) -> None:
    url, proxy = line
    client = Client(tiers(url))
    client.store([0])
    proxy.mood = Mood.SILENT
    transfers = [client.start(verb, [0], 4096, 1, time.monotonic() + 60) for verb in ("load", "store", "load")]
    client.tier.close(time.monotonic() + 0.2)
    outcomes = client.outcomes(3)
    assert {outcome.id for outcome in outcomes} == {transfer.id for transfer in transfers}
    assert all(outcome.refused and not outcome.ok.any() for outcome in outcomes)
    client.start("load", [0], 4096, 0, time.monotonic() + 60)
    assert client.outcomes(1)[0].refused, "closed"
    assert client.tier.probe([]).done


def test_the_breaker_opens_and_closes_again(line: WritePipeline, tiers: Callable[..., RemoteTier]) -> None:
    """As the store sees it: loads that fail five times in a row are not begun any more, until a try goes well."""
    url, proxy = line
    now_s = [1000.0]
    tier = tiers(url, request_timeout_s=0.2, clock=lambda: now_s[0])
    store = TieredStore(Geometry([Group(0, Kind.FULL, 16, 4, 1024)]), 1 << 20, [tier], clock=lambda: now_s[0])
    keys = [key(number) for number in range(4)]

    def fetch() -> int:
        fetch = store.fetch([(0, keys)], now_s[0] + 0.5)
        while not fetch.done:
            store.wait(0.05)
            store.poll()
            now_s[0] += 0.02
        found = int((fetch.slots[0] >= 0).sum())
        store.release(fetch)
        return found

    slots = store.reserve(0, keys, np.full(4, 15, np.uint64))
    for slot in slots.tolist():
        store.payload(slot, 0)[:] = key(slot) * 128
    store.commit(slots)
    while not store.flush(0.05):
        pass
    store.drop_host()
    assert fetch() == 4
    store.drop_host()
    proxy.mood = Mood.REFUSE
    opened = 0
    until_s = time.monotonic() + 60
    while not opened:
        assert time.monotonic() < until_s, "the breaker does not open"
        tier._presence.stored(keys[0], 15)  # somebody else stored it again
        assert fetch() == 0
        opened = int(store.stats()[f"{tier.name}.breaker_opened"])
    begun = tier.stats()["retries"]
    assert store.stats()[f"{tier.name}.breaker"] == "open" and fetch() == 0
    assert tier.stats()["retries"] == begun, "left alone"
    proxy.mood = Mood.PASS
    until_s = time.monotonic() + 60
    while store.stats()[f"{tier.name}.breaker"] != "closed":
        assert time.monotonic() < until_s, "the breaker does not close"
        now_s[0] += 6.0
        for chunk in keys:
            tier._presence.stored(chunk, 15)
        fetch()
        store.drop_host()
    for chunk in keys:
        tier._presence.stored(chunk, 15)
    assert fetch() == 4
    store.check()
    store.close(0.5)


def test_no_password_key_or_name_of_an_object_is_logged(
    line: WritePipeline, tiers: Callable[..., RemoteTier], caplog: pytest.LogCaptureFixture
) -> None:
    url, proxy = line
    url = url.replace("redis://", "redis://:hush@")
    caplog.set_level("DEBUG")
    client = Client(tiers(url, request_timeout_s=0.2))
    client.store(range(3))
    for mood in (Mood.FAIL, Mood.CUT, Mood.REFUSE, Mood.PASS):
        proxy.mood = mood
        client.load(range(3), seconds=0.3)
        client.store(range(3, 6), seconds=0.3)
        client.probe(range(7))
    text = caplog.text + repr(client.tier.stats()) + repr(client.tier) + repr(vars(client.tier))
    secrets = ["hush", "test-secret", *(key(number).hex() for number in range(7))]
    assert caplog.records and not [secret for secret in secrets if secret in text]
