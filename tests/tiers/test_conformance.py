"""The shared tiers pass the conformance suite, on real servers; also as others see them: closed, and asked again."""

from __future__ import annotations

import uuid
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from stowage.storage.format.protection import Method, Protection, SecretKey
from stowage.storage.objects import ObjectTier
from stowage.storage.remote.backend import Bounds
from stowage.storage.remote.tier import RemoteTier
from stowage.storage.valkey import ValkeyTier
from stowage.testing import TierConformance
from tests.depth import few_or_all
from tests.tiers.client import Client
from tests.tiers.proxy import Mood, proxied
from tests.tiers.servers import BUCKET, RedisServer, S3Server

MIB = 1 << 20
NAMESPACE = bytes(range(32))
CROWDED = Bounds(batch_keys=2, batch_bytes=6000, reads_max=2, writes_max=1, probes_max=1, search_widths=(1, 2))


class Asked:
    """A tier whose every look-up asks first, as the engine does. Else only what this process stored would be found."""

    def __init__(self, tier: RemoteTier) -> None:
        self._tier = tier
        self.name = tier.name
        self.store, self.load, self.discard, self.close = tier.store, tier.load, tier.discard, tier.close
        self.poll, self.stats, self.check = tier.poll, tier.stats, tier.check
        self._fresh = True
        self.wake = lambda: None

    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)
        if name == "wake" and "_tier" in self.__dict__:
            self._tier.wake = value  # type: ignore[assignment]

    def lookup(self, keys: list[bytes]) -> NDArray[np.uint64]:
        if self._fresh:
            wake, client = self._tier.wake, Client(self._tier)
            for number in range(len(keys)):
                client.ask([keys[number]])
            self._tier.wake = wake
            wake()  # a transfer may have ended meanwhile, and told the client
            self._fresh = False
        return self._tier.lookup(keys)


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL", "stowage")


@pytest.mark.exhaustive
@pytest.mark.slow
class TestMemory(TierConformance):
    keeps_bytes = 8 * MIB
    examples = few_or_all(20, 80)

    def make_tier(self, directory: Path) -> RemoteTier:
        return ObjectTier("memory:///", NAMESPACE)


@pytest.mark.slow
class TestCrowdedDirectory(TierConformance):
    """Small batches, few at a time, a short queue, encrypted."""

    keeps_bytes = 8 * MIB
    examples = 12

    def make_tier(self, directory: Path) -> RemoteTier:
        protection = Protection(Method.AES_256_GCM, (SecretKey(b"k" * 32),))
        return ObjectTier(f"file://{directory}", NAMESPACE, protection=protection, bounds=CROWDED, transfers_max=2)


class TestLimitedDirectory(TierConformance):
    """Objects are removed all the time."""

    examples = 12

    def make_tier(self, directory: Path) -> RemoteTier:
        return ObjectTier(f"file://{directory}", NAMESPACE, limit_bytes=60_000)


@pytest.mark.slow
class TestS3(TierConformance):
    keeps_bytes = 8 * MIB
    examples = 6

    @pytest.fixture(autouse=True)
    def address(self, s3: str) -> None:
        type(self).url = s3

    def make_tier(self, directory: Path) -> RemoteTier:
        return ObjectTier(f"{self.url}/{uuid.uuid4().hex}", NAMESPACE)


class OnValkey(TierConformance):
    @pytest.fixture(autouse=True)
    def address(self, redis: RedisServer) -> None:
        type(self).url = redis.url


@pytest.mark.exhaustive
@pytest.mark.slow
class TestValkey(OnValkey):
    keeps_bytes = 8 * MIB
    examples = few_or_all(20, 80)

    def make_tier(self, directory: Path) -> RemoteTier:
        return ValkeyTier(f"{self.url}?prefix={uuid.uuid4().hex}", NAMESPACE)


@pytest.mark.slow
class TestCrowdedValkey(OnValkey):
    examples = 12

    def make_tier(self, directory: Path) -> RemoteTier:
        return ValkeyTier(f"{self.url}?prefix={uuid.uuid4().hex}", NAMESPACE, bounds=CROWDED, transfers_max=2)


@pytest.mark.slow
class TestAskedDirectory(TierConformance):
    """Another process finds what one has stored."""

    keeps_bytes = 8 * MIB
    persistent = True
    examples = 12

    def make_tier(self, directory: Path) -> Asked:
        return Asked(ObjectTier(f"file://{directory}", NAMESPACE))


@pytest.mark.slow
class TestAskedValkey(OnValkey):
    keeps_bytes = 8 * MIB
    persistent = True
    examples = 12

    def make_tier(self, directory: Path) -> Asked:
        return Asked(ValkeyTier(f"{self.url}?prefix={directory.name}", NAMESPACE))


class Trouble(TierConformance):
    """Over a network that is bad from the beginning: less is kept, nothing wrong is brought, and everything ends."""

    examples = 3

    def test_it_keeps_something(self) -> None:
        """Not here."""


@pytest.mark.slow
@pytest.mark.parametrize("mood", [Mood.REFUSE, Mood.CUT, Mood.FAIL])
def test_conformance_without_a_network_to_speak_of(
    mood: Mood, redis: RedisServer, s3_server: S3Server, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with proxied(redis.port) as near_redis, proxied(s3_server.port) as near_s3:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{near_s3.port}")
        for proxy in (near_redis, near_s3):
            proxy.cut_bytes = 9000
            proxy.mood = mood

        class Valkey(Trouble):
            def make_tier(self, directory: Path) -> RemoteTier:
                url = f"redis://127.0.0.1:{near_redis.port}?prefix={directory.name}"
                return ValkeyTier(url, NAMESPACE, request_timeout_s=0.3)

        class Objects(Trouble):
            def make_tier(self, directory: Path) -> RemoteTier:
                return ObjectTier(f"s3://{BUCKET}/{directory.name}", NAMESPACE, request_timeout_s=0.3)

        Valkey().test_it_keeps_its_word_through_random_steps()
        Objects().test_it_keeps_its_word_through_random_steps()
