"""Tenants of one engine: requests with different salts share nothing on any tier, and timing tells them nothing.

A tenant's keys come from a namespace of its own, so there is no check that could be forgotten: another tenant's chunks
are simply never found. What both share is room: one tenant's chunks may push out another's (docs/security.md).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from stowage.cache.store import TieredStore
from stowage.config.memory import Memory
from stowage.core.geometry import Geometry, Group, Kind
from stowage.core.key import Chain, group_keys, tenant_namespace
from stowage.engine.engine import Engine
from stowage.engine.sampling_params import SamplingParams
from stowage.errors import RequestError
from stowage.storage.disk import DiskTier
from stowage.testing import tiny_models
from tests.depth import few_or_all, mostly_rare
from tests.disk_client import NAMESPACE
from tests.engine.conftest import assert_same, greedy, random_prompt, small_pool

PROMPT = random_prompt(300)
TIMINGS = 2000
AUC_MAX = 0.55


@pytest.mark.parametrize("family", mostly_rare(["llama", "gemma3", "nemotron_h"], ["llama", "nemotron_h"]))
def test_same_prompt_two_salts_no_cross_hit_on_any_tier(family, engines, references, tmp_path):
    memory = {"host_memory": "32MiB", "disk": f"{tmp_path / 'cache'}:64MiB", "snapshot_tokens": 128}
    engine = engines(family, **memory)
    expected = references(family).answer(PROMPT, 6)

    def reused(salt):
        (completion,) = engine.generate([PROMPT], greedy(6), salt=salt)
        assert_same(completion, expected)
        return dict(completion.reused_tokens)

    def tier_that_served(salt):
        found = {tier for tier, tokens in reused(salt).items() if tokens}
        assert len(found) <= 1
        return found.pop() if found else None

    strangers = iter(range(100))
    assert tier_that_served("acme") is None
    assert tier_that_served(f"other {next(strangers)}") is None and tier_that_served("acme") == "device"
    engine.drop_device_cache()
    assert tier_that_served(f"other {next(strangers)}") is None and tier_that_served("acme") == "host"
    assert engine.flush()
    engine.drop_device_cache()
    engine.drop_host()
    assert tier_that_served(f"other {next(strangers)}") is None and tier_that_served("acme") == "disk"
    assert tier_that_served("") is None, "no salt is a tenant too"
    assert engine.flush()
    engine.close()
    engine = engines(family, **memory)
    assert tier_that_served(f"other {next(strangers)}") is None and tier_that_served(b"acme") == "disk"


def test_tenants_that_take_turns_for_the_device(engines, references):
    """Preempted and in one batch: private state comes back to its own sequence, and nobody finds another's."""
    engine = small_pool(engines, "llama", host_memory="32MiB")
    prompt = random_prompt(70)
    requests = [engine.submit(prompt, greedy(80), salt=f"tenant {n}") for n in range(5)]
    for request in requests:
        assert request.wait(60)
        assert_same(request.result(), references("llama").answer(prompt, 80))
        assert not any(request.result().reused_tokens.values())
    assert engine.stats()["engine"]["preemptions"] > 0
    (again,) = engine.generate([prompt], greedy(80), salt="tenant 3")
    assert any(again.reused_tokens.values())


def test_every_way_to_ask_takes_a_salt(engines):
    engine = engines("llama", host_memory=0)

    async def streamed(salt):
        return [delta.completion async for delta in engine.stream(PROMPT, greedy(2), salt=salt)][-1]

    def waited(salt):
        request = engine.submit(PROMPT, greedy(2), salt=salt)
        assert request.wait(60)
        return request.result()

    ways: dict[str, Callable] = {
        "generate": lambda salt: engine.generate([PROMPT], greedy(2), salt=salt)[0],
        "iterate": lambda salt: list(engine.iterate(PROMPT, greedy(2), salt=salt))[-1].completion,
        "stream": lambda salt: asyncio.run(streamed(salt)),
        "submit": waited,
    }
    for name, ask in ways.items():
        assert not any(ask(name).reused_tokens.values()), name
        assert any(ask(name).reused_tokens.values()), name


@pytest.mark.parametrize("salt", [None, 5, ["a"], "\ud800"])
def test_what_is_no_salt_is_refused(salt, engines):
    """A number would otherwise be so many zero bytes, and None the same as no salt."""
    with pytest.raises(RequestError, match="salt"):
        engines("llama", host_memory=0).submit(PROMPT, greedy(2), salt=salt)


# timing


def separability(one: Sequence[float], other: Sequence[float]) -> float:
    """How well a threshold tells two samples apart: area under the ROC curve, folded; 0.5 is not at all, 1 is always.

    It is the Mann-Whitney statistic: a rank, so a few samples that the machine delayed weigh no more than others.
    """
    values = np.concatenate([one, other])
    ranks = np.empty(len(values))
    ranks[np.argsort(values, kind="stable")] = np.arange(1, len(values) + 1)
    area = (ranks[: len(one)].sum() - len(one) * (len(one) + 1) / 2) / (len(one) * len(other))
    return 0.5 + abs(area - 0.5)


def compare(stored: Sequence, fresh: Sequence, measure: Callable[[object], float], seed: int) -> float:
    """Separability of two kinds of probe that are made in one random order, so that what drifts hits both alike."""
    order = [(which, item) for which, items in enumerate((stored, fresh)) for item in items]
    random.Random(seed).shuffle(order)
    seconds: tuple[list[float], list[float]] = ([], [])
    for which, item in order:
        seconds[which].append(measure(item))
    return separability(*seconds)


def assert_tells_nothing(attempt: Callable[[int], float]) -> None:
    """By chance alone a thousand against a thousand pass the bound once in 10,000 runs; a leak passes it every time.
    Neighbours on the machine may slow one half of an attempt or two: so there are some.
    """
    found = [attempt(0)]
    while found[-1] > AUC_MAX and len(found) < 5:
        found.append(attempt(len(found)))
    assert min(found) <= AUC_MAX, f"timing tells tenants apart: {found}"


def test_separability() -> None:
    generator = np.random.default_rng(0)
    noise = generator.standard_normal((2, TIMINGS // 2))
    assert separability(*noise) < AUC_MAX
    assert separability(noise[0], noise[1] + 0.5) > 0.6 < separability(noise[0] + 0.5, noise[1])
    assert separability([1, 2], [3, 4]) == separability([3, 4], [1, 2]) == 1


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.hurried
def test_time_to_first_token_tells_nothing_of_another_tenant():
    """2,000 probes: prompts that another tenant has had computed, and prompts that nobody has."""
    model = tiny_models.build("llama", tiny_models.TinySize(hidden=128, layers=1, heads=2, kv_heads=1))
    first = SamplingParams(max_new_tokens=1, ignore_eos=True)
    count = few_or_all(TIMINGS // 5, TIMINGS // 2)
    with Engine(model, Memory(kv_cache_memory="64MiB", host_memory="256MiB")) as engine:

        def probe(salt: str) -> Callable[[object], float]:
            return lambda prompt: engine.generate([prompt], first, salt=salt)[0].ttft_s

        def prompts(seed: int) -> list[list[int]]:
            return np.random.default_rng(seed).integers(5, 500, (count, 129)).tolist()

        def attempt(number: int) -> float:
            known, unknown = prompts(2 * number), prompts(2 * number + 1)
            engine.generate(known, first, salt="victim")
            found = compare(known, unknown, probe("prober"), seed=number)
            assert any(engine.generate([known[-1]], first, salt="victim")[0].reused_tokens.values()), "still there"
            return found

        assert_tells_nothing(attempt)
        own, foreign = prompts(100)[:100], prompts(101)[:100]
        engine.generate(own, first, salt="prober")
        assert compare(own, foreign, probe("prober"), seed=2) > 0.65, "the same probe does tell a hit from a miss"


@pytest.mark.rare
def test_the_store_tells_nothing_of_another_tenant(tmp_path):
    """The same below the engine, where nothing is computed that could drown the difference: 2,000 look-ups, each with
    a fetch, for prompts that another tenant has in host memory and on disk, and for prompts that nobody has.
    """
    geometry = Geometry((Group(0, Kind.FULL, 16, 4, 1024, layers=(0,)),))
    tier = DiskTier(tmp_path / "cache", 128 << 20, NAMESPACE)
    store = TieredStore(geometry, 16 << 20, [tier])
    count = TIMINGS // 2

    def keys(salt: str, seed: int) -> list[list[bytes]]:
        prompts = np.random.default_rng(seed).integers(0, 500, (count, 256))
        return [group_keys(Chain(tenant_namespace(NAMESPACE, salt), 64).extend(prompt), 0) for prompt in prompts]

    def remember(wanted: list[list[bytes]]) -> None:
        for some in wanted:
            store.commit(store.reserve(0, some, np.full(len(some), 15, np.uint64)))
            store.flush(5.0)
        assert tier.lookup(wanted[0]).all() and (store.sources(wanted[-1]) == 0).all()

    def probe(some: object) -> float:
        began_s = time.perf_counter()
        fetch = store.fetch([(0, some)], began_s + 5.0) if store.locate(some)[0].any() else None
        while fetch is not None and not fetch.done:
            store.wait(0.1)
            store.poll()
        seconds = time.perf_counter() - began_s
        if fetch is not None:
            store.release(fetch)
        return seconds

    tried = []

    def attempt(number: int) -> float:
        tried.append(number)
        remember(keys("victim", 2 * number))
        return compare(keys("prober", 2 * number), keys("prober", 2 * number + 1), probe, seed=number)

    try:
        assert_tells_nothing(attempt)
        store.drop_host()  # from there a hit comes as soon as a miss, from disk it does not
        own, foreign = keys("victim", 2 * tried[-1])[:200], keys("victim", 2 * tried[-1] + 1)[:200]
        assert compare(own, foreign, probe, seed=3) > 0.65, "its own it does tell"
    finally:
        store.close()
