"""Whole engines on shared stores: a prefix comes back after a restart and on another machine, and changes no answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from stowage.cache import cost_model
from stowage.config.memory import Memory
from stowage.engine.engine import Engine
from stowage.errors import ConfigError
from stowage.storage import key_file as keys
from tests.depth import mostly_rare
from tests.engine.conftest import Reference, assert_same, check_and_close, greedy, random_prompt
from tests.engine.conftest import references as references
from tests.threads import together
from tests.tiers.proxy import Mood, proxied
from tests.tiers.servers import RedisServer

PROMPT_TOKENS = 690
MEMORY = {"kv_cache_memory": "16MiB", "host_memory": "32MiB", "snapshot_tokens": 128, "lookup_timeout_s": 30.0}
References = Callable[..., Reference]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are waited for, however quick the tiny model computes: these tests are not about time."""
    monkeypatch.setattr(cost_model, "LOOKUP_LEAST_S", 30.0)


@pytest.fixture
def engines(checkpoints: Callable[..., Path]) -> Iterator[Callable[..., Engine]]:
    opened: list[Engine] = []

    def engine(family: str, url: str, **memory: Any) -> Engine:
        shared = {"valkey" if "redis" in url else "object": url}
        made = Engine(checkpoints(family), Memory(**(MEMORY | shared | memory)))
        opened.append(made)
        return made

    yield engine
    check_and_close(opened)


def tier_of(url: str) -> str:
    return "valkey" if "redis" in url else "object"


def ask(engine: Engine, prompt: list[int], expected: Any, new_tokens: int = 12) -> dict[str, int]:
    engine.forget_costs()
    (completion,) = engine.generate([prompt], greedy(new_tokens))
    assert_same(completion, expected)
    return dict(completion.reused_tokens)


@pytest.mark.slow
@pytest.mark.parametrize("family", mostly_rare(["llama", "gemma3", "llama4", "qwen3_next"], ["llama", "gemma3"]))
def test_a_prefix_comes_back(family: str, url: str, engines: Callable[..., Engine], references: References) -> None:
    """From host dropped, after a restart, and with another end; of full, sliding, chunked and recurrent groups."""
    tier, prompt = tier_of(url), random_prompt(PROMPT_TOKENS)
    expected = references(family).answer(prompt, 12)
    engine = engines(family, url)
    assert sum(ask(engine, prompt, expected).values()) == 0
    assert engine.flush()
    engine.drop_device_cache()
    engine.drop_host()
    found = ask(engine, prompt, expected)
    assert found[tier] == sum(found.values()) >= PROMPT_TOKENS - 64
    engine.close()
    engine = engines(family, url)
    found = ask(engine, prompt, expected)
    assert found[tier] == sum(found.values()) >= PROMPT_TOKENS - 64, "after a restart"
    engine.close()
    other = prompt[:450] + random_prompt(200, seed=3)
    engine = engines(family, url)
    found = ask(engine, other, references(family).answer(other, 12))
    assert found[tier] == sum(found.values()) >= 450 - 128 - 64, "the middle of what somebody else had"
    stats = engine.stats()["store"]
    assert stats[f"{tier}.corrupt"] == 0 and stats[f"{tier}.healthy"] == 1 and stats[f"hits.{tier}"] > 0


def test_two_engines_share_a_store(url: str, engines: Callable[..., Engine], references: References) -> None:
    """The second hits what the first has stored a moment ago; each of two prompts is computed once."""
    tier = tier_of(url)
    one, other = engines("llama", url), engines("llama", url)
    for seed, (first, second) in enumerate(((one, other), (other, one))):
        prompt = random_prompt(PROMPT_TOKENS, seed=seed)
        expected = references("llama").answer(prompt, 12)
        assert sum(ask(first, prompt, expected).values()) == 0
        assert first.flush()
        assert ask(second, prompt, expected)[tier] >= PROMPT_TOKENS - 64
    assert one.stats()["store"][f"{tier}.already_there"] == other.stats()["store"][f"{tier}.already_there"] == 0


def test_the_order_is_disk_valkey_object(
    redis: RedisServer, tmp_path: Path, engines: Callable[..., Engine], references: References
) -> None:
    """What the disk has is not fetched from afar; what only the store has is fetched once, and kept on disk."""
    prompt = random_prompt(PROMPT_TOKENS)
    expected = references("llama").answer(prompt, 12)
    url, prefix = f"file://{tmp_path / 'objects'}", f"{redis.url}?prefix=order-{time.monotonic_ns()}"

    def engine(disk: str) -> Engine:
        return engines("llama", url, valkey=prefix, disk=f"{tmp_path / disk}:64MiB")

    with engine("a") as first:
        assert first.store is not None
        assert [tier.name for tier in first.store.tiers] == ["disk", "valkey", "object"]
        ask(first, prompt, expected)
        assert first.flush()
    with engine("a") as same:
        assert ask(same, prompt, expected)["disk"] >= PROMPT_TOKENS - 64
        assert same.flush()
        stats = same.stats()["store"]
        assert stats["object.writes"] == stats["valkey.writes"] == 0, "both have it already"
        assert stats["object.reads"] == stats["valkey.reads"] == 0
    with engine("b") as elsewhere:
        assert ask(elsewhere, prompt, expected)["valkey"] >= PROMPT_TOKENS - 64
        assert elsewhere.flush()
    with engine("b") as elsewhere:
        assert ask(elsewhere, prompt, expected)["disk"] >= PROMPT_TOKENS - 64


def test_tenants_and_models_share_nothing(url: str, checkpoints: Callable[..., Path], engines: Any) -> None:
    prompt = random_prompt(PROMPT_TOKENS)
    engine = engines("llama", url)
    engine.generate([prompt], greedy(1), salt="a")
    assert engine.flush()
    engine.drop_device_cache()
    engine.drop_host()
    for salt in ("b", ""):
        (completion,) = engine.generate([prompt], greedy(1), salt=salt)
        assert not sum(completion.reused_tokens.values())
    memory = Memory(**MEMORY, **{tier_of(url): url})  # type: ignore[arg-type]
    with Engine(checkpoints("llama"), memory, salt="other") as other:
        (completion,) = other.generate([prompt], greedy(1), salt="a")
        assert not sum(completion.reused_tokens.values())
    (completion,) = engines("qwen3", url).generate([prompt], greedy(1), salt="a")
    assert not sum(completion.reused_tokens.values())


def test_what_is_shared_is_sealed_as_on_disk(url: str, engines: Any, references: References, tmp_path: Path) -> None:
    key_file = tmp_path / "keys"
    keys.make(key_file)
    sealed = {"disk_protection": "aes-256-gcm", "disk_key_file": str(key_file)}
    prompt = random_prompt(PROMPT_TOKENS)
    expected = references("llama").answer(prompt, 12)
    with engines("llama", url, **sealed) as engine:
        ask(engine, prompt, expected)
        assert engine.flush()
    with engines("llama", url, **sealed) as engine:
        assert ask(engine, prompt, expected)[tier_of(url)] >= PROMPT_TOKENS - 64
    with engines("llama", url) as engine:
        assert sum(ask(engine, prompt, expected).values()) == 0
        assert engine.stats()["store"][f"{tier_of(url)}.unreadable"] > 0


def test_requests_do_not_wait_for_a_store_that_is_silent(
    redis: RedisServer, engines: Any, references: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And fail by no means: they are computed. Afterwards the store is used again."""
    monkeypatch.setattr(cost_model, "LOOKUP_LEAST_S", 0.02)
    with proxied(redis.port) as proxy:
        url = f"redis://127.0.0.1:{proxy.port}?prefix=silent-{time.monotonic_ns()}"
        engine = engines("llama", url, lookup_timeout_s=0.1)
        prompts = [random_prompt(PROMPT_TOKENS, seed=seed) for seed in range(6)]
        proxy.mood = Mood.SILENT
        for prompt in prompts:
            assert sum(ask(engine, prompt, references("llama").answer(prompt, 12)).values()) == 0
        proxy.mood = Mood.PASS
        monkeypatch.setattr(cost_model, "LOOKUP_LEAST_S", 30.0)
        until_s = time.monotonic() + 60
        while not engine.stats()["store"]["valkey.healthy"]:
            assert time.monotonic() < until_s
            engine.generate([random_prompt(80, seed=int(time.monotonic_ns()) % 1000)], greedy(1))
        assert engine.flush(60)


def test_many_requests_at_once(url: str, engines: Any, references: References) -> None:
    """Two engines, eight prompts with a common beginning, four threads each: right answers, and nothing left over."""
    prompts = [random_prompt(400) + random_prompt(60, seed=seed) for seed in range(8)]
    expected = [references("llama").answer(prompt, 6) for prompt in prompts]
    both = [engines("llama", url, kv_cache_memory="4MiB", host_memory="2MiB") for _ in range(2)]
    errors: list[BaseException] = []

    def client(engine: Engine, first: int) -> None:
        try:
            for turn in range(6):
                number = (first + turn) % len(prompts)
                (completion,) = engine.generate([prompts[number]], greedy(6))
                assert_same(completion, expected[number])
                engine.drop_device_cache()
        except BaseException as error:  # noqa: BLE001 - handed over to the test
            errors.append(error)

    together(partial(client, engine, n) for n in range(4) for engine in both)
    assert not errors
    for engine in both:
        assert engine.flush(60)
        stats = engine.stats()["store"]
        assert stats[f"{tier_of(url)}.faults"] == stats[f"{tier_of(url)}.corrupt"] == 0


def test_a_request_that_is_cancelled_while_it_waits_for_answers(redis: RedisServer, engines: Any) -> None:
    with proxied(redis.port) as proxy:
        engine = engines("llama", f"redis://127.0.0.1:{proxy.port}?prefix=cancel")
        engine.generate([random_prompt(100)], greedy(1))
        proxy.mood = Mood.SILENT
        request = engine.submit(random_prompt(PROMPT_TOKENS), greedy(4))
        until_s = time.monotonic() + 60
        while not engine._scheduler.loading:
            assert time.monotonic() < until_s, "it does not wait for answers"
            time.sleep(0.001)
        engine.cancel(request)
        while not request.wait(0.1):
            assert time.monotonic() < until_s
        assert request.result().finish_reason == "cancelled"
        engine.check()


@pytest.mark.parametrize(
    ("memory", "words"),
    [
        ({"object": "file:///proc/nothing"}, "cannot be made"),
        ({"valkey": "redis://h", "valkey_password_file": "/none"}, "does not exist"),
        ({"object": "file:///tmp/x", "object_limit": 100}, "holds no chunk"),
    ],
)
def test_what_cannot_be_used_stops_the_start(memory: Any, words: str, checkpoints: Any, tmp_path: Path) -> None:
    from stowage.errors import StowageError

    with pytest.raises(StowageError, match=words):
        Engine(checkpoints("llama"), Memory(**(MEMORY | {"disk": f"{tmp_path / 'kv'}:64MiB"} | memory)))
    assert not [
        thread for thread in threading.enumerate() if thread.name.startswith(("stowage-disk", "stowage-valkey"))
    ]


def test_a_password_from_the_environment_and_from_a_file(
    checkpoints: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.tiers.servers import redis_server

    with redis_server("--requirepass", "hush", password="hush") as server:
        path = tmp_path / "password"
        path.write_text("hush\n")
        path.chmod(0o600)
        for given in ("environment", "file"):
            if given == "environment":
                monkeypatch.setenv("STOWAGE_VALKEY_PASSWORD", "hush")
            else:
                monkeypatch.setenv("STOWAGE_VALKEY_PASSWORD", "wrong")
            memory = MEMORY | {"valkey": server.url} | ({"valkey_password_file": str(path)} if given == "file" else {})
            with Engine(checkpoints("llama"), Memory(**memory)) as engine:
                engine.generate([random_prompt(300)], greedy(1))
                assert engine.flush()
                assert engine.stats()["store"]["valkey.healthy"] == 1
        assert server.client.dbsize() > 0


@pytest.mark.parametrize(
    ("package", "memory", "extra"),
    [("obstore", {"object": "memory:///"}, "object"), ("redis.asyncio", {"valkey": "redis://h"}, "valkey")],
)
def test_a_missing_package_names_the_extra(
    package: str, memory: Any, extra: str, checkpoints: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    for name in [name for name in sys.modules if name == package or name.startswith(package + ".")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"pip install 'stowage\[{extra}\]'"):
        Engine(checkpoints("llama"), Memory(**(MEMORY | memory)))
