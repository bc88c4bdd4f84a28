"""Ctrl-C while something is closed, or a step that outlasts it: closed again, it gives everything back."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stowage import Engine, Memory, PrefixCache, SamplingParams
from stowage.cache.store import TieredStore
from stowage.storage.disk import DiskTier
from stowage.storage.disk.system import ThreadWorkerPool
from stowage.testing import tiny_models
from tests.library.conftest import SIZE, answer, model_of, tokens

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
