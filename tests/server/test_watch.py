"""What the dashboard is told of a server is bounded, and a busy engine keeps nobody waiting for it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from stowage.engine.engine import Engine, Progress
from stowage.server.auth import Tenant
from stowage.server.bridge import Bridge
from stowage.server.counts import Counts
from stowage.server.engines import Engines
from stowage.server.front import Visit
from stowage.server.journal import KEPT_MAX, SHOWN_MAX, Journal
from stowage.server.limits import Limits
from stowage.server.served import Served
from stowage.server.watch import EVERY_S, KEPT_S, History, Watch

TEXT = "/v1/completions"


def test_the_history_is_a_ring() -> None:
    history = History(["a", "b"])
    kept = int(KEPT_S / EVERY_S)
    for n in range(3 * kept):
        history.add(n * EVERY_S, {"a": n, "other": 1.0})
    assert len(history) == kept == len(history.after(0))
    assert history.after(0)[0] == [2 * kept * EVERY_S, 2 * kept, None]
    assert [sample[1] for sample in history.after((3 * kept - 2) * EVERY_S)] == [3 * kept - 2, 3 * kept - 1]


def visit_of(tenant: Tenant, number: int) -> Visit:
    return Visit(TEXT, f"req-{number}", tenant, time.monotonic(), status=200)


def exchange_of(number: int) -> SimpleNamespace:
    """What a journal reads of an exchange."""
    progress = Progress("computing", 9, {"device": 4}, 5, number, 0, 0.2, 0.1, None, None, None)
    request = SimpleNamespace(completion=None, progress=lambda: progress)
    asked = SimpleNamespace(prompts=[SimpleNamespace(tokens=[1] * 9)], stream=False, choices=1, silent=False)
    return SimpleNamespace(ask=asked, requests=[request])


def test_the_journal_is_bounded() -> None:
    """Of all clients together so many are kept, and of one so many shown; those of others are in nobody's way."""
    alice, bob = Tenant(b"a"), Tenant(b"b")
    journal = Journal(time.monotonic())
    for number in range(KEPT_MAX + 10):
        visit = visit_of(bob if number == 20 else alice, number)
        journal.begin(visit, exchange_of(number))
        visit.at_end()  # type: ignore[misc]
    told = journal.described(alice, 0)["ended"]
    assert [one["id"] for one in told] == [f"req-{KEPT_MAX + 9 - n}" for n in range(SHOWN_MAX)]
    assert [one["id"] for one in journal.described(bob, 0)["ended"]] == ["req-20"]
    for number in range(KEPT_MAX):
        visit = visit_of(alice, number)
        journal.begin(visit, exchange_of(number))
        visit.at_end()  # type: ignore[misc]
    assert journal.described(bob, 0)["ended"] == [], "what ended first is forgotten first"
    for number in range(SHOWN_MAX + 5):
        journal.begin(visit_of(bob, number), exchange_of(number))
    shown = journal.described(bob, 0)["open"]
    assert [one["id"] for one in shown] == [f"req-{SHOWN_MAX + 4 - n}" for n in range(SHOWN_MAX)]
    assert journal.described(alice, 0)["open"] == []


@pytest.fixture
def watched(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Bridge, Engine]]:
    monkeypatch.setattr("stowage.server.watch._PATIENCE_S", 0.05)
    bridge = Bridge(Engines(lambda: engine), Served("tiny"), Limits())
    yield bridge, engine
    bridge.close()


def test_a_busy_engine_keeps_nobody_waiting(watched: tuple[Bridge, Engine]) -> None:
    """A step may take long. Meanwhile the last picture is shown, with its age; and one look serves all who ask."""
    bridge, engine = watched
    looks = []

    async def scene() -> None:
        watch = Watch(bridge, Counts())
        fresh = await watch.state(Tenant(), 0)
        assert fresh["server"]["age_s"] < 30
        monkeypatched = engine.stats
        engine.stats = lambda: looks.append(1) or monkeypatched()  # type: ignore[method-assign, func-returns-value]
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
