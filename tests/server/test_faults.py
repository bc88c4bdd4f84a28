"""Bugs and failures behind the API: the client gets an error object, others are served, the server lives.

The server runs in this process, so that its parts can be broken.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from safetensors.torch import load_file, save_file

from stowage.config.memory import Memory
from stowage.engine.engine import Engine
from stowage.engine.prompts import Prompts
from stowage.errors import ModelError
from stowage.server import async_engine, listen
from stowage.server.async_engine import AsyncEngine
from stowage.server.auth import ApiKeys
from stowage.server.limits import Limits
from stowage.server.serve import run
from stowage.server.served_model import ServedModel
from stowage.server.supervisor import EngineSupervisor
from tests.nursery import wait_until

TEXT = "/v1/completions"
SHORT = {"model": "tiny", "prompt": "x", "max_tokens": 3, "ignore_eos": True}


class Here:
    """A server on a thread of this process."""

    def __init__(self, engine: Engine | EngineSupervisor, **limits: float) -> None:
        supervisor = engine if isinstance(engine, EngineSupervisor) else EngineSupervisor(lambda: engine)
        place = listen.bind("127.0.0.1", 0)
        self.url = place.url
        self.loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        ready = threading.Event()
        given = Limits(shutdown_timeout_s=1, **limits)  # type: ignore[arg-type]
        serving = run(supervisor, ServedModel("tiny"), place, given, ApiKeys([]), self._stop, ready.set)
        self.found: bool | None = None

        def work() -> None:
            self.found = self.loop.run_until_complete(serving)

        self._thread = threading.Thread(target=work)
        self._thread.start()
        assert ready.wait(60)

    def stop(self) -> None:
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._stop.set)
            self.ended()

    def ended(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()
        assert not asyncio.all_tasks(self.loop)
        self.loop.close()


@pytest.fixture
def engine(tiny_llama) -> Iterator[Engine]:
    with Engine(tiny_llama, Memory(kv_cache_memory="8MiB")) as opened:
        yield opened


@pytest.fixture
def here(engine: Engine) -> Iterator[Here]:
    made = Here(engine)
    yield made
    made.stop()


def internal_error(response: httpx.Response) -> None:
    assert response.status_code == 500
    error = response.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("server_error", "internal_error", None)
    assert "the secret reason" not in response.text, "what went wrong is for the log"


def test_an_engine_that_stops(here: Here, engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    """Running requests are told, and the server ends by itself, so that it is started anew."""
    assert httpx.get(here.url + "/health").status_code == 200
    real, steps = engine.parts.runner.run, []

    def broken(work):
        steps.append(len(work))
        if len(steps) > 5:
            raise ZeroDivisionError("the secret reason")
        return real(work)

    engine.parts.runner.run = broken  # type: ignore[method-assign]
    asked = SHORT | {"max_tokens": 100}
    with httpx.stream("POST", here.url + TEXT, json=asked | {"stream": True}, timeout=60) as response:
        events = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
    assert json.loads(events[-1])["error"]["code"] == "internal_error" and "the secret reason" not in events[-1]
    here.ended()
    assert here.found is False, "whoever started it learns why it ended"
    with pytest.raises(httpx.ConnectError):
        httpx.get(here.url + "/health")
    assert any("the engine stopped" in record.message for record in caplog.records)


@contextmanager
def hanging(engine: Engine, url: str) -> Iterator[tuple[threading.Thread, threading.Event]]:
    """Context: a step that hangs, until the end or the event; the thread asked for it."""
    hangs, goes_on, real = threading.Event(), threading.Event(), engine.parts.runner.run
    engine.parts.runner.run = lambda work: (hangs.set(), goes_on.wait(60), real(work))[2]  # type: ignore[method-assign]
    asking = threading.Thread(target=lambda: httpx.post(url + TEXT, json=SHORT, timeout=60))
    asking.start()
    try:
        assert hangs.wait(60)
        yield asking, goes_on
    finally:
        goes_on.set()
        asking.join(60)


def test_a_step_that_hangs(tiny_llama, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where weights are on a disk that does. Metrics are those from before it, and no thread keeps a process that is
    told to end.
    """
    monkeypatch.setattr(async_engine, "_STEP_S", 0.2)
    before = set(threading.enumerate())
    with Engine(tiny_llama, Memory(kv_cache_memory="8MiB")) as engine:
        here = Here(engine)
        with hanging(engine, here.url) as (asking, _):
            page = httpx.get(here.url + "/metrics", timeout=20)
            assert page.status_code == 200 and "stowage_tokens_computed_total 0.0" in page.text
            here.stop()
            left = set(threading.enumerate()) - before - {asking}
            wait_until(lambda: not any(thread.is_alive() and not thread.daemon for thread in left), "threads ended", 20)


@pytest.mark.slow
def test_a_step_that_hangs_longer_than_requests_may_take_is_told_by_health(
    tiny_llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said ok for as long as the disk hung. A step that is only long is none of its business."""
    monkeypatch.setattr(async_engine, "_STEP_S", 0.1)
    monkeypatch.setattr(async_engine, "_HANGS_S", 0.0)
    with Engine(tiny_llama, Memory(kv_cache_memory="8MiB")) as engine:
        here = Here(engine, request_timeout_s=3)
        with hanging(engine, here.url) as (_, goes_on):
            assert httpx.get(here.url + "/health").json() == {"status": "ok"}
            wait_until(lambda: httpx.get(here.url + "/health").status_code == 503, "that it hangs")
            told = httpx.get(here.url + "/health").json()
            assert told["status"] == "hanging" and told["reason"].endswith("s, and none may for 3 s")
            assert httpx.get(here.url + "/v1/stowage/state").json()["server"]["alive"] is True
            goes_on.set()
            wait_until(lambda: httpx.get(here.url + "/health").json() == {"status": "ok"}, "that it goes on")
        here.stop()


def test_steps_that_end_are_not_one_that_hangs() -> None:
    """Each takes the lock again before who waits for statistics has it."""

    class Busy:
        tokens_computed = 0

        def stats(self, _timeout_s: float) -> None:
            raise TimeoutError

    engine, seen = Busy(), []
    served = SimpleNamespace(supervisor=SimpleNamespace(engine=engine), _step=None, _stats={})
    for tokens in (5, 5, 6):
        engine.tokens_computed = tokens
        AsyncEngine.stats(served)  # type: ignore[arg-type]
        seen.append(served._step)
    assert seen[0] == seen[1] and seen[1][1] < seen[2][1]


def test_a_bug_of_one_request(here: Here, engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    real = Prompts.tokenize

    def broken(self, prompt, *arguments):
        if prompt == "poison":
            raise ZeroDivisionError("the secret reason")
        return real(self, prompt, *arguments)

    monkeypatch.setattr(Prompts, "tokenize", broken)
    internal_error(httpx.post(here.url + TEXT, json=SHORT | {"prompt": "poison"}))
    assert httpx.post(here.url + TEXT, json=SHORT).status_code == 200
    (record,) = [record for record in caplog.records if record.exc_info]
    assert record.name == "stowage.server" and "poison" not in record.getMessage()


def test_a_bug_in_the_middle_of_a_stream(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    from stowage.server.apis.completions import TextAnswer

    real, calls = TextAnswer._grown, []

    def broken(self, *arguments):
        calls.append(1)
        if len(calls) == 3:
            raise ZeroDivisionError("the secret reason")
        return real(self, *arguments)

    monkeypatch.setattr(TextAnswer, "_grown", broken)
    asked = SHORT | {"max_tokens": 3000, "stream": True}
    with httpx.stream("POST", here.url + TEXT, json=asked, timeout=60) as response:
        events = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
    assert json.loads(events[-1])["error"]["code"] == "internal_error"
    assert len(events) <= 3, "tokens that come quickly may share an event, even with the error"
    assert httpx.post(here.url + TEXT, json=SHORT).status_code == 200


def test_an_engine_that_is_closed_first(tiny_llama) -> None:
    """Whoever runs it may close it; the requests that it had are told."""
    engine = Engine(tiny_llama, Memory(kv_cache_memory="8MiB"))
    here = Here(engine)
    with httpx.stream(
        "POST", here.url + TEXT, json=SHORT | {"max_tokens": 3000, "stream": True}, timeout=60
    ) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        engine.close()
        last = [line[6:] for line in lines if line.startswith("data: ")][-1]
    assert json.loads(last)["error"]["code"] == "shutting_down"
    internal_error(httpx.post(here.url + TEXT, json=SHORT))
    assert httpx.get(here.url + "/health").status_code == 503
    here.stop()


def test_pieces_that_come_after_the_server_has_ended(engine: Engine) -> None:
    """The engine goes on when the event loop that asked it has gone."""
    here = Here(engine)
    with httpx.stream(
        "POST", here.url + TEXT, json=SHORT | {"max_tokens": 3000, "stream": True}, timeout=60
    ) as response:
        assert next(response.iter_lines())
        here.stop()
    (completion,) = engine.generate(["x"])
    assert completion.finish_reason in ("length", "stop")
    assert engine.alive


def test_two_servers_over_one_engine(engine: Engine) -> None:
    """Their counts do not mix."""
    one, other = Here(engine), Here(engine)
    for _ in range(3):
        assert httpx.post(one.url + TEXT, json=SHORT).status_code == 200
    counted = [httpx.get(server.url + "/metrics").text for server in (one, other)]
    assert [f'stowage_http_requests_total{{route="{TEXT}",status="200"}} 3.0' in text for text in counted] == [
        True,
        False,
    ]
    one.stop()
    assert httpx.post(other.url + TEXT, json=SHORT).status_code == 200
    other.stop()


def test_an_engine_that_is_opened_again(tiny_llama, caplog: pytest.LogCaptureFixture) -> None:
    """A bug of no request: who waits is told, others are asked to come again, then all goes on; but only once."""
    opening, go = threading.Event(), threading.Event()
    go.set()
    opened: list[weakref.ref[Engine]] = []

    def open_one() -> Engine:
        assert not [ref for ref in opened if ref() is not None], "the memory of the one that failed is free"
        opening.set()
        assert go.wait(60)
        engine = Engine(tiny_llama, Memory(kv_cache_memory="8MiB"))
        opened.append(weakref.ref(engine))
        return engine

    def broken(_work):
        raise ZeroDivisionError("the secret reason")

    supervisor = EngineSupervisor(open_one, 1)
    here = Here(supervisor)
    expected = httpx.post(here.url + TEXT, json=SHORT | {"temperature": 0}).json()["choices"]
    opening.clear()
    go.clear()
    supervisor.engine.parts.runner.run = broken  # type: ignore[method-assign,union-attr]
    internal_error(httpx.post(here.url + TEXT, json=SHORT, timeout=60))
    assert opening.wait(60)
    health = httpx.get(here.url + "/health")
    assert (health.status_code, health.json()) == (503, {"status": "reopening", "reopened": 1})
    refused = httpx.post(here.url + TEXT, json=SHORT)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "reopening")
    assert "stowage_engine_reopened 1.0" in httpx.get(here.url + "/metrics").text
    assert httpx.get(here.url + "/v1/stowage/state").json()["server"]["alive"] is False
    go.set()
    wait_until(lambda: httpx.get(here.url + "/health").status_code == 200, "opened again")
    for _ in range(3):
        assert httpx.post(here.url + TEXT, json=SHORT | {"temperature": 0}).json()["choices"] == expected
    supervisor.engine.parts.runner.run = broken  # type: ignore[method-assign,union-attr]
    internal_error(httpx.post(here.url + TEXT, json=SHORT, timeout=60))
    here.ended()
    assert here.found is False and len(opened) == 2
    supervisor.close()


def test_an_engine_that_cannot_be_opened_again(tiny_llama) -> None:
    supervisor = EngineSupervisor(lambda: Engine(tiny_llama, Memory(kv_cache_memory="8MiB")), 5)
    here = Here(supervisor)

    def refuse() -> Engine:
        raise ModelError("the checkpoint has gone")

    supervisor._open = refuse
    supervisor.engine.parts.runner.run = lambda work: 1 / 0  # type: ignore[method-assign,union-attr]
    internal_error(httpx.post(here.url + TEXT, json=SHORT, timeout=60))
    here.ended()
    assert here.found is False and supervisor.reopened == 1
    supervisor.close()


@pytest.mark.parametrize("weights", ["auto", "*=stream"])
def test_a_checkpoint_that_is_written_to_ends_the_engine(weights: str, tiny_llama: Path, tmp_path: Path) -> None:
    """Every request failed from then on, and /health said ok. Another engine computes with what is there now."""
    copied = Path(shutil.copytree(tiny_llama, tmp_path / "copied"))
    file, state = copied / "model.safetensors", load_file(tiny_llama / "model.safetensors")
    save_file({name: values.flip(0) for name, values in state.items()}, tmp_path / "other", metadata={"format": "pt"})
    supervisor = EngineSupervisor(lambda: Engine(copied, Memory(kv_cache_memory="8MiB", weights=weights)), 1)
    here, asked = Here(supervisor), SHORT | {"temperature": 0, "ignore_eos": True}
    answers = [httpx.post(here.url + TEXT, json=asked, timeout=60).json()["choices"]]
    file.write_bytes((tmp_path / "other").read_bytes())
    internal_error(httpx.post(here.url + TEXT, json=asked, timeout=60))
    wait_until(lambda: supervisor.reopened == 1, "being opened again")
    wait_until(lambda: httpx.get(here.url + "/health").status_code == 200, "opened again")
    answers.append(httpx.post(here.url + TEXT, json=asked, timeout=60).json()["choices"])
    assert answers[0] != answers[1]
    file.write_bytes((tiny_llama / "model.safetensors").read_bytes())
    internal_error(httpx.post(here.url + TEXT, json=asked, timeout=60))
    here.ended()
    assert here.found is False
    supervisor.close()
