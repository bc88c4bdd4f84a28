"""Ctrl-C while something is closed, a step that outlasts it, or no close at all: all is given back all the same."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stowage import Engine, Memory, PrefixCache, SamplingParams
from stowage.cache.store import TieredStore
from stowage.engine import shutdown
from stowage.executor.replay.cache import ReplayCache
from stowage.models import probing
from stowage.storage.disk import DiskTier
from stowage.storage.disk.system import ThreadWorkerPool
from stowage.testing import tiny_models
from tests.library.conftest import SIZE, answer, model_of, tokens
from tests.nursery import wait_until

PROMPT = tokens(200)
WAITS = [(threading.Thread, "join"), (TieredStore, "close"), (DiskTier, "close"), (ThreadWorkerPool, "join")]


def interrupted_once(monkeypatch: pytest.MonkeyPatch, where: type, method: str) -> None:
    """The next call of ``where.method`` is interrupted."""
    real = getattr(where, method)

    def interrupted(*_: Any) -> None:
        monkeypatch.setattr(where, method, real)
        raise KeyboardInterrupt

    monkeypatch.setattr(where, method, interrupted)


def held() -> tuple[set[str], list[str]]:
    """Threads of ours and open files below a cache directory."""
    names = {thread.name for thread in threading.enumerate() if thread.name.startswith("stowage-")}
    files = []
    for fd in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{fd}"
        files += [os.readlink(path)] if os.path.lexists(path) and "/cache" in os.readlink(path) else []
    return names, files


@pytest.mark.parametrize(("where", "method"), WAITS)
def test_a_prefix_cache(where: type, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = held()
    prefixes = PrefixCache(model_of("llama"), "16MiB", f"{tmp_path / 'cache'}:64MiB")
    cache = prefixes.restore(PROMPT)
    found, _ = answer(model_of("llama"), PROMPT, cache)
    prefixes.keep(cache, found)
    close_twice(prefixes.close, monkeypatch, where, method)
    assert held() == before
    assert prefixes._background.store.arena.close(), "the arena was given back"


@pytest.mark.parametrize(("where", "method"), WAITS)
def test_an_engine(where: type, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = held()
    model = tiny_models.write("llama", tmp_path / "model", SIZE)
    memory = Memory(kv_cache_memory="8MiB", host_memory="16MiB", disk=f"{tmp_path / 'cache'}:64MiB")
    engine = Engine(str(model), memory)
    engine.generate(PROMPT.tolist(), SamplingParams(max_new_tokens=2))
    close_twice(engine.close, monkeypatch, where, method)
    assert held() == before
    engine.close()
    assert engine.store is not None and engine.store.arena.close()


def close_twice(close: Callable[[], None], monkeypatch: pytest.MonkeyPatch, where: type, method: str) -> None:
    interrupted_once(monkeypatch, where, method)
    with pytest.raises(KeyboardInterrupt):
        close()
    close()


def test_a_step_that_outlasts_the_time_to_close(tmp_path: Path) -> None:
    before = held()
    model = tiny_models.write("llama", tmp_path / "model", SIZE)
    engine = Engine(str(model), Memory(kv_cache_memory="8MiB", disk=f"{tmp_path / 'cache'}:64MiB", host_memory="16MiB"))
    real, reached, released = engine.parts.runner.run, threading.Event(), threading.Event()

    def slow(*arguments: Any) -> Any:
        reached.set()
        released.wait(60)
        return real(*arguments)

    engine.parts.runner.run = slow  # type: ignore[method-assign]
    engine.submit(PROMPT[0].tolist(), SamplingParams(max_new_tokens=2))
    assert reached.wait(60)
    engine.close(timeout_s=0.05)
    assert held() != before
    released.set()
    engine.close()
    assert held() == before


def test_a_model_of_the_users_own_is_as_it_was_after_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_models.build("llama", SIZE)
    before = [sorted(vars(module)) for module in model.modules()], model.config._attn_implementation
    engine = Engine(model, Memory(kv_cache_memory="8MiB"))
    assert before[0] != [sorted(vars(module)) for module in model.modules()]
    close_twice(engine.close, monkeypatch, ReplayCache, "close")
    assert before == ([sorted(vars(module)) for module in model.modules()], model.config._attn_implementation)


def opened(tmp_path: Path) -> Engine:
    memory = Memory(kv_cache_memory="8MiB", host_memory="16MiB", disk=f"{tmp_path / 'cache'}:64MiB")
    return Engine(model_of("llama"), memory)


def test_an_engine_that_is_dropped(tmp_path: Path) -> None:
    """As when a cell of a notebook opens another one under its name."""
    before = held()
    engine = opened(tmp_path)
    engine.generate(PROMPT.tolist(), SamplingParams(max_new_tokens=2))
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        copy.copy(engine)
    with pytest.warns(ResourceWarning, match="an Engine was dropped"):
        del engine
    assert held() == before


@pytest.mark.filterwarnings("ignore:an Engine was dropped:ResourceWarning")
def test_an_engine_that_is_collected_where_a_lock_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As while another one is being opened: garbage is collected there, too."""
    before, engines = held(), [opened(tmp_path)]
    monkeypatch.setattr(shutdown, "_DROPPED_S", 2.0)

    def collect() -> None:
        with probing._lock:
            engines.clear()

    opening = threading.Thread(target=collect, daemon=True)
    opening.start()
    opening.join(60)
    assert not opening.is_alive()
    wait_until(lambda: held() == before, "the end of an engine that was collected")


@pytest.mark.filterwarnings("ignore:an Engine was dropped:ResourceWarning")
def test_a_request_keeps_its_engine_open(tmp_path: Path) -> None:
    """Until it has ended: then the engine's own thread may be the last to know it."""
    before, came = held(), []
    request = opened(tmp_path).submit(PROMPT[0].tolist(), SamplingParams(max_new_tokens=5, ignore_eos=True))
    assert request.wait(60) and request.result().finish_reason == "length"
    del request
    assert held() == before
    opened(tmp_path).submit(PROMPT[0].tolist(), SamplingParams(max_new_tokens=5, ignore_eos=True), came.append)
    wait_until(lambda: held() == before, "the end of an engine that nobody refers to")
    assert came[-1].completion.finish_reason == "length"
