"""Pipeline parallel 2 with tensor parallel 2: vLLM's CPU build does not start it, with a connector or without, so its
engine core and scheduler run here over ranks of ours (see ``ranks``). Each test runs in a process of its own.
"""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.child import FULL, HYBRID, KEPT, Run
from tests.vllm.oracle import prompt

UNEVEN = ["full", "sliding", "sliding", "sliding"]
"""The group with full attention has layers on the first stage only, and two groups with a window on the second only."""
KINDS = {"full": FULL, "hybrid": HYBRID, "uneven": UNEVEN}


@pytest.mark.slow
@pytest.mark.parametrize("kinds", KINDS)
def test_every_rank_gets_its_own_bytes_back(kinds: str, run: Run) -> None:
    run(comes_back, kinds)


def comes_back(directory: Path, kinds: str) -> None:
    from tests.vllm.pipeline import Engine
    from tests.vllm.ranks import RANKS

    engine = Engine(directory, KINDS[kinds])
    tokens = prompt(400)
    assert engine.ask("cold", tokens) == 0
    assert engine.executor.flying_max == 2, "a second batch is scheduled before the first one's result is known"
    engine.assert_comes_back(tokens)
    engine.forget()
    assert engine.ask("salted by another prompt", prompt(400, seed=2)) == 0
    begins = {tuple(share.offsets.tolist()) for rank in RANKS for share in engine.side._shared.shares[rank]}
    assert len(begins) > 1
    engine.assert_idle(200)
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("kinds", ["full", "hybrid"])
def test_a_rank_that_fails(kinds: str, run: Run) -> None:
    """Each of the four in turn: its load, and its store."""
    run(one_fails, kinds)


def one_fails(directory: Path, kinds: str) -> None:
    from tests.vllm.pipeline import Engine, broken

    def fail() -> None:
        raise OSError("a copy that the test broke")

    engine = Engine(directory, KINDS[kinds])
    tokens = prompt(400)
    engine.ask("cold", tokens)
    for number, rank in enumerate(engine.ranks):
        engine.forget()
        with broken(rank, load=fail):
            engine.ask(f"load {number}", tokens)  # answered rightly, and it ends: no livelock
        assert engine.side.counts["loads_failed"] == number + 1, "offered once, and never again"
        engine.forget()
        assert engine.ask(f"as good as ever {number}", tokens) == KEPT
        other = prompt(400, seed=10 + number)
        with broken(rank, store=fail):
            engine.ask(f"store {number}", other)
        assert engine.side.counts["stores_failed"] > 0
        engine.forget()
        assert engine.ask(f"not whole {number}", other) == 0, "three of four parts are no chunk"
    engine.assert_idle(200)
    engine.close()


@pytest.mark.slow
def test_a_rank_whose_report_is_late_or_lost(run: Run) -> None:
    """A chunk is found when the last rank has told that its part is written, and not before."""
    run(late_reports)


def late_reports(directory: Path) -> None:
    from tests.vllm.pipeline import Engine, held_reports

    engine = Engine(directory, HYBRID)
    engine.ask("so that all is mapped", prompt(100))
    for number, rank in enumerate(engine.ranks):
        tokens = prompt(400, seed=number)
        with held_reports(rank):
            engine.ask(f"cold {number}", tokens)
            engine.forget()
            assert engine.ask(f"early {number}", tokens) == 0
        engine.ask(f"tells {number}", prompt(20, seed=90 + number))
        engine.forget()
        assert engine.ask(f"told {number}", tokens) == KEPT
    engine.assert_idle(200)
    with held_reports(engine.ranks[3], lost=True):
        engine.ask("lost", prompt(400, seed=50))
    engine.forget()
    assert engine.ask("never found", prompt(400, seed=50)) == 0
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 3])
def test_a_rank_that_is_slow_to_load(number: int, run: Run) -> None:
    """Three have loaded, one has not: the request waits, others compute. Aborted, it keeps blocks until the last."""
    run(slow_load, number)


def slow_load(directory: Path, number: int) -> None:
    from tests.vllm.pipeline import Engine, broken

    engine = Engine(directory, HYBRID)
    tokens, go = prompt(400), threading.Event()
    engine.ask("cold", tokens)
    engine.forget()
    with broken(engine.ranks[number], load=lambda: _wait(go)):
        engine.add("slow", tokens)
        engine.step_until(lambda: engine.loading("slow"))
        for turn in range(3):
            engine.add(f"other {turn}", prompt(150, seed=20 + turn))
            engine.step_until(lambda: len(engine.said[f"other {turn}"]) == 8)  # noqa: B023
            engine.assert_right(f"other {turn}", prompt(150, seed=20 + turn))
            assert engine.loading("slow") and not engine.said["slow"]
        go.set()
        engine.finish()
        engine.assert_right("slow", tokens)
        assert engine.external["slow"] == KEPT
        engine.forget()
        go.clear()
        engine.add("gone", tokens)
        engine.step_until(lambda: engine.loading("gone"))
        free = engine.free()
        engine.core.abort_requests(["gone"])
        engine.add("after", prompt(150, seed=7))
        engine.step_until(lambda: len(engine.said["after"]) == 8)
        assert engine.free() <= free, "a copy may still write into its blocks"
        go.set()
        engine.finish()
    engine.assert_idle(200)
    engine.close()


def _wait(event: threading.Event) -> None:
    assert event.wait(600)


@pytest.mark.slow
@pytest.mark.parametrize("kinds", KINDS)
def test_little_room(kinds: str, run: Run) -> None:
    """Preemptions, aborts and copies that fail, with two batches in flight, on a device that holds three of ten."""
    run(little_room, kinds)


def little_room(directory: Path, kinds: str) -> None:
    from tests.vllm.pipeline import Engine, broken

    blocks = {"full": 50, "hybrid": 75, "uneven": 110}[kinds]
    drawn = random.Random(kinds)
    engine = Engine(directory, KINDS[kinds], blocks)
    system = prompt(130, seed=99)
    prompts = [system + prompt(drawn.randrange(30, 250), seed) for seed in range(10)]
    external = 0

    def sometimes() -> None:
        if drawn.random() < 0.02:
            raise OSError("a copy that the test broke")

    engine.ask("so that all is mapped", prompt(200, seed=98))
    with broken(engine.ranks[1], load=sometimes, store=sometimes), broken(engine.ranks[2], load=sometimes):
        for turn in range(2):
            gone = set()
            for at, tokens in enumerate(prompts):
                engine.add(f"{turn} {at}", tokens, 40)
            names = [f"{turn} {at}" for at in range(len(prompts))]
            for _ in range(4):
                for _ in range(drawn.randrange(5, 40)):
                    engine.step()
                name = drawn.choice(names)
                if name in engine.states():
                    gone.add(name)
                    engine.core.abort_requests([name])
            engine.finish()
            for name, tokens in zip(names, prompts, strict=True):
                if name not in gone:
                    engine.assert_right(name, tokens, 40)
                    external += engine.external[name]
            engine.assert_idle(blocks)
            engine.forget()
    assert external > 0 and engine.preemptions > 0 and engine.executor.flying_max == 2
    assert not engine.wrong()
    engine.close()


def test_a_slow_disk_holds_up_nobody_else(run: Run) -> None:
    """What lies on disk comes into host memory while vLLM computes for others; then it is a hit."""
    run(slow_disk)


def slow_disk(directory: Path) -> None:
    from stowage.storage.disk import DiskTier
    from tests.vllm.driver import PREPARATIONS
    from tests.vllm.pipeline import Engine

    PREPARATIONS["patient"]()
    engine = Engine(directory, HYBRID, disk=directory / "cache")
    tokens = prompt(400)
    engine.ask("cold", tokens)
    assert engine.side._store.flush(60)
    with engine.side._background.turn:
        assert engine.side._store.drop_host() > 0
    engine.forget()
    held: list[tuple[Any, Any]] = []
    load, DiskTier.load = DiskTier.load, lambda tier, transfer: held.append((tier, transfer))
    engine.add("slow", tokens)
    for turn in range(3):
        engine.add(f"other {turn}", prompt(150, seed=20 + turn))
        engine.step_until(lambda: len(engine.said[f"other {turn}"]) == 8)  # noqa: B023
        engine.assert_right(f"other {turn}", prompt(150, seed=20 + turn))
    assert held and not engine.said["slow"] and not engine.loading("slow")
    DiskTier.load = load
    with engine.side._background.turn:
        for tier, transfer in held:
            load(tier, transfer)
    engine.finish()
    engine.assert_right("slow", tokens)
    assert engine.external["slow"] == KEPT and engine.side.stats()["hits.disk"] > 0
    engine.assert_idle(200)
    engine.close()


def test_events_say_what_vllms_own_events_say(run: Run) -> None:
    """The same block hashes as vLLM publishes for its device, with a medium of their own; and what has gone."""
    run(events)


def events(directory: Path) -> None:
    from vllm.config.kv_events import KVEventsConfig
    from vllm.distributed.kv_events import BlockRemoved, BlockStored

    from tests.vllm.pipeline import BLOCK, Engine

    config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    engine = Engine(directory, FULL, options={"kv_events_config": config})
    batches: list[Any] = []
    engine.core.scheduler.kv_event_publisher.publish = batches.append
    tokens = prompt(400)
    engine.ask("cold", tokens)
    told = [event for batch in batches for event in batch.events]
    stored = [event for event in told if isinstance(event, BlockStored)]
    ours = [event for event in stored if event.medium == "stowage"]
    device = {
        one: event.token_ids[at * BLOCK : (at + 1) * BLOCK]
        for event in stored
        if event.medium != "stowage"
        for at, one in enumerate(event.block_hashes)
    }
    assert [event.token_ids for event in ours] == [tokens[at : at + 128] for at in (0, 128, 256)]
    hashes = [one for event in ours for one in event.block_hashes]
    assert [device[one] for one in hashes] == [tokens[at : at + BLOCK] for at in range(0, KEPT, BLOCK)]
    assert ours[0].parent_block_hash is None and ours[1].parent_block_hash == ours[0].block_hashes[-1]
    batches.clear()
    with engine.side._background.turn:
        engine.side._store.drop_host()
    engine.side._announcements._audit_s = 0.0
    engine.ask("another", prompt(20, seed=1), 2)
    gone = [event for batch in batches for event in batch.events if isinstance(event, BlockRemoved)]
    assert {one for event in gone if event.medium == "stowage" for one in event.block_hashes} == set(hashes)
    engine.close()


def test_ranks_on_several_machines_are_refused(run: Run) -> None:
    """What an engine over Ray comes to when a worker is elsewhere: it does not start, and says what to do."""
    run(several_machines)


def several_machines(directory: Path) -> None:
    from stowage.errors import ConfigError
    from stowage.plugins.vllm.worker import machine
    from tests.vllm.pipeline import Engine

    with pytest.raises(ConfigError, match=r"several machines.*one engine per machine"):
        Engine(directory, FULL, machines=[machine()] * 3 + ["another 1"])
