"""What the dashboard is told of a server is bounded, and a busy engine keeps nobody waiting for it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from stowage.engine.engine import Engine
from stowage.engine.request import Progress
from stowage.server.async_engine import AsyncEngine
from stowage.server.auth import Tenant
from stowage.server.limits import Limits
from stowage.server.metrics import ServerMetrics
from stowage.server.middleware import RequestContext
from stowage.server.monitor import EVERY_S, KEPT_S, History, Monitor
from stowage.server.request_history import KEPT_MAX, SHOWN_MAX, RequestHistory
from stowage.server.served_model import ServedModel
from stowage.server.supervisor import EngineSupervisor

TEXT = "/v1/completions"


def test_the_history_is_a_ring() -> None:
    history = History(["a", "b"])
    kept = int(KEPT_S / EVERY_S)
    for n in range(3 * kept):
        history.add(n * EVERY_S, {"a": n, "other": 1.0})
    assert len(history) == kept == len(history.after(0))
    assert history.after(0)[0] == [2 * kept * EVERY_S, 2 * kept, None]
    assert [sample[1] for sample in history.after((3 * kept - 2) * EVERY_S)] == [3 * kept - 2, 3 * kept - 1]


def visit_of(tenant: Tenant, number: int) -> RequestContext:
    return RequestContext(TEXT, f"req-{number}", tenant, time.monotonic(), status=200)


def exchange_of(number: int) -> SimpleNamespace:
    """What a journal reads of an exchange."""
    progress = Progress("computing", 9, {"device": 4}, 5, number, 0, 0.2, 0.1, None, None, None)
    request = SimpleNamespace(completion=None, progress=lambda: progress)
    asked = SimpleNamespace(prompts=[None], prompt_tokens=9, stream=False, choices=1, silent=False)
    return SimpleNamespace(request=asked, requests=[request])


def test_the_journal_is_bounded() -> None:
    """Of all clients together so many are kept, and of one so many shown; those of others are in nobody's way."""
    alice, bob = Tenant(b"a"), Tenant(b"b")
    request_history = RequestHistory(time.monotonic())
    for number in range(KEPT_MAX + 10):
        context = visit_of(bob if number == 20 else alice, number)
        request_history.begin(context, exchange_of(number))
        context.on_end()  # type: ignore[misc]
    told = request_history.described(alice, 0)["ended"]
    assert [one["id"] for one in told] == [f"req-{KEPT_MAX + 9 - n}" for n in range(SHOWN_MAX)]
    assert [one["id"] for one in request_history.described(bob, 0)["ended"]] == ["req-20"]
    for number in range(KEPT_MAX):
        context = visit_of(alice, number)
        request_history.begin(context, exchange_of(number))
        context.on_end()  # type: ignore[misc]
    assert request_history.described(bob, 0)["ended"] == [], "what ended first is forgotten first"
    for number in range(SHOWN_MAX + 5):
        request_history.begin(visit_of(bob, number), exchange_of(number))
    shown = request_history.described(bob, 0)["open"]
    assert [one["id"] for one in shown] == [f"req-{SHOWN_MAX + 4 - n}" for n in range(SHOWN_MAX)]
    assert request_history.described(alice, 0)["open"] == []


@pytest.fixture
def watched(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[AsyncEngine, Engine]]:
    monkeypatch.setattr("stowage.server.monitor._PATIENCE_S", 0.05)
    async_engine = AsyncEngine(EngineSupervisor(lambda: engine), ServedModel("tiny"), Limits())
    yield async_engine, engine
    async_engine.close()


def test_a_busy_engine_keeps_nobody_waiting(watched: tuple[AsyncEngine, Engine]) -> None:
    """A step may take long. Meanwhile the last picture is shown, with its age; and one look serves all who ask."""
    async_engine, engine = watched
    looks = []

    async def scene() -> None:
        watch = Monitor(async_engine, ServerMetrics())
        fresh = await watch.state(Tenant(), 0)
        assert fresh["server"]["age_s"] < 30
        monkeypatched = engine.stats
        engine.stats = lambda timeout_s: looks.append(1) or monkeypatched(timeout_s)  # type: ignore[method-assign, func-returns-value]
        held, let_go = threading.Event(), threading.Event()

        def hold() -> None:
            with engine._lock:
                held.set()
                let_go.wait(60)

        holder = threading.Thread(target=hold)
        holder.start()
        try:
            held.wait(60)
            old = await asyncio.gather(*(watch.state(Tenant(), 0) for _ in range(5)))
            seen_s = fresh["server"]["now_s"] - fresh["server"]["age_s"]
            for one in old:
                assert one["server"]["now_s"] - one["server"]["age_s"] == pytest.approx(seen_s, abs=1e-5)
        finally:
            let_go.set()
            holder.join()
            del engine.stats
        assert len(looks) == 1
        again = await watch.state(Tenant(), 0)
        assert again["server"]["now_s"] - again["server"]["age_s"] > seen_s

    asyncio.run(scene())
