"""What the two sides of the connector keep account of: budgets, events, names of states, times of steps, and bugs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from stowage.core.geometry import Kind
from stowage.errors import BudgetError, ConfigError
from stowage.plugins.vllm import settings
from stowage.plugins.vllm.adapter import GroupShape
from stowage.plugins.vllm.division import Piece
from stowage.plugins.vllm.messages import Part
from stowage.plugins.vllm.scheduler import SchedulerSide
from stowage.plugins.vllm.step_times import StepTimes
from stowage.plugins.vllm.worker import machine
from tests.vllm.two_sides import BLOCK, BLOCKS, FULL, RANKS, WINDOW, Request, blocks_for, prompt, store_prompt, stores


def test_budgets_and_places_that_cannot_work(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BudgetError, match="set host_memory to at least"):
        made([FULL], host="4KiB")
    with pytest.raises(ConfigError, match="host memory"):
        settings.read({})
    for wrong in ("half", 0, -1, True, 1.5):
        with pytest.raises(ConfigError, match=r"resume_points is .*growing, all, ends, or a distance in tokens"):
            settings.read({"host_memory": "1GiB", "resume_points": wrong})
    with pytest.raises(ConfigError, match="Did you mean 'disk'"):
        settings.read({"host_memory": "1GiB", "disc": "/tmp/x:1GiB"})
    with pytest.raises(ConfigError, match="chunk_blocks"):
        settings.read({"host_memory": "1GiB", "chunk_blocks": 65})
    scheduler = SchedulerSide(SimpleNamespace(speculative_config=None), [FULL], settings.read({"host_memory": "4MiB"}))
    piece = ((Piece("a", 64, ""),),)
    parts = {(0, 0): Part(machine(), BLOCKS, piece), (0, 1): Part("elsewhere 1", BLOCKS, piece)}
    with pytest.raises(ConfigError, match="several machines"):
        scheduler.connect(parts)


def test_the_node_has_one_budget_whatever_the_ranks(made: Any) -> None:
    here = made([FULL, WINDOW], host="1MiB")
    assert here.scheduler._store.arena.bytes <= 1 << 20
    pieces = [[piece.nbytes for worker in here.workers for piece in worker.part().pieces[g]] for g in range(2)]
    assert [group.bytes_per_block for group in here.scheduler._groups] == [sum(sizes) for sizes in pieces]
    begins = [here.scheduler._shared.shares[rank][0].offsets.tolist() for rank in RANKS]
    assert [begin for mine in begins for begin in mine] == [0, *np.cumsum(pieces[0])[:-1].tolist()], "side by side"


def test_engines_of_a_node_share_a_budget(made: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with data parallelism: an engine that would take the sum above the limit does not start, until one ends."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    budget = {"host": "4MiB", "node_host_memory": "10MiB"}
    first, second = made([FULL], **budget), made([FULL], **budget)
    with pytest.raises(BudgetError, match="other engines hold 8 MiB"):
        made([FULL], **budget)
    store_prompt(first, prompt(300))  # its workers hold the part too
    first.scheduler.close()
    with pytest.raises(BudgetError):
        made([FULL], **budget)
    first.close()
    made([FULL], **budget)
    second.close()
    with pytest.raises(ConfigError, match="node_host_memory cannot be used"):
        settings.read({"host_memory": "1GiB", "node_host_memory": "much"})


def test_events_tell_what_is_stored_and_what_has_gone(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.kv_events import BlockRemoved, BlockStored
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    from stowage.plugins.vllm import events

    here = made([WINDOW, FULL])
    here.scheduler._announcements = events.Announcements(here.scheduler._store, here.scheduler._groups[1], BLOCK)
    here.scheduler._storing._announcements = here.scheduler._announcements
    request = Request("first", prompt(300))
    request.block_hashes = [bytes([at]) * 32 for at in range(300 // BLOCK)]  # type: ignore[attr-defined]
    assert here.offer(request) == 0
    here.compute(request, blocks_for(300), 0, 300)
    first, second = here.scheduler.events()
    assert isinstance(first, BlockStored) and len(first.block_hashes) == 8
    assert first.block_hashes == [maybe_convert_block_hash(one) for one in request.block_hashes[:8]]  # type: ignore[attr-defined]
    assert (first.parent_block_hash, first.token_ids) == (None, prompt(300)[:128])
    assert second.parent_block_hash == first.block_hashes[-1] and second.token_ids == prompt(300)[128:256]
    assert (second.block_size, second.medium) == (BLOCK, "stowage")
    assert here.scheduler.events() == [], "nothing is told twice"
    here.scheduler._store.drop_host()
    here.scheduler._announcements._audit_s = 0.0
    (gone,) = here.scheduler.events()
    assert isinstance(gone, BlockRemoved) and set(gone.block_hashes) == {*first.block_hashes, *second.block_hashes}


STATE = GroupShape(Kind.RECURRENT, 64, 0, ("s",))


def test_a_state_is_stored_only_where_it_is_the_one_of_its_name(made: Any) -> None:
    """A step that ends inside a block, or ahead of the known tokens, leaves no state that a name fits."""
    here = made([STATE])
    tokens = prompt(128)
    request = Request("first", tokens)
    assert here.offer(request) == 0
    table = [0, 7, 8]  # vLLM's align mode: the first state was never kept
    here.step({"first": (0, 100, table)})
    assert here.scheduler.stats()["stores"] == 0
    here.step({"first": (100, 28, table)})
    assert here.scheduler.stats()["stores"] == 1
    here.step({"first": (128, 64, table)})  # 64 tokens ahead of what is known
    tokens += prompt(64, seed=3)
    here.step({"first": (192, 1, table)})
    assert here.scheduler.stats()["stores"] == 1, "the block holds the state of 193 tokens, or of 192: nobody knows"
    other = Request("second", prompt(128) + prompt(100, seed=3))
    assert here.offer(other) == 128


@pytest.mark.parametrize("place", ["offer", "plans", "plan", "settle", "give_back", "ask"])
def test_a_bug_costs_hits_and_not_the_engine(place: str, made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever raises: nothing that vLLM calls does. A request that was promised blocks is told that they failed."""
    here = made([FULL])
    store_prompt(here, prompt(300))
    second = Request("second", prompt(300))
    if place in ("plans", "give_back"):
        assert here.offer(second) == 256

    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("a bug")

    owner = here.scheduler._storing if place in ("plan", "settle") else here.scheduler._prefixes
    monkeypatch.setattr(type(owner), place, broken)
    here.scheduler.arrived(second)
    if place == "plans":
        here.scheduler.allocated(second, [blocks_for(300)], 256)
        assert here.step({}) == {"second"}, "a failed load: vLLM computes it"
    elif place == "give_back":
        here.scheduler.finished(second)
    else:
        fresh = Request("fresh", prompt(300, seed=5))
        assert here.offer(fresh) == 0
        here.step({"fresh": (0, 300, blocks_for(300))})
        here.scheduler.arrived(Request("asked", prompt(300)))
    monkeypatch.undo()
    assert here.scheduler.counts["faults"] >= 1
    assert here.offer(Request("third", prompt(300))) == 0, "from now on it stands aside"


def test_steps_that_are_built_ahead_are_measured_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([10.0, 11.0, 14.0, 20.0])  # two are built, then both end
    monkeypatch.setattr("stowage.plugins.vllm.step_times.time", SimpleNamespace(monotonic=lambda: next(now)))
    times = StepTimes()
    assert [times.built(100), times.built(200)] == [1, 2]
    assert [times.ended(1), times.ended(2)] == [(100, 4.0), (200, 6.0)]


def test_a_step_that_nobody_reported_does_not_shift_the_others(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process alone tells nothing of a step that computed nothing and copied nothing."""
    here = made([FULL])
    side, measured = here.scheduler, []
    monkeypatch.setattr(side._cost_model, "computed", lambda tokens, seconds: measured.append(tokens))
    store_prompt(here, prompt(300))
    side._step_times.built(0)
    request = Request("another", prompt(200, seed=4))
    assert here.offer(request) == 0
    here.compute(request, blocks_for(200, 19), 0, 200)
    assert measured == [300, 200]


@pytest.mark.parametrize("then", ["looked up", "idle", "ended", "ended before", "another prompt", "four steps"])
def test_reports_of_answers_wait_for_each_other_and_nobody_waits_for_them(then: str, made: Any) -> None:
    """Who looks a prefix up finds the chunk; an engine that has nothing to do ends its steps with nothing left over."""
    here = made([FULL], chunk_blocks=2, host="8MiB")
    side, text, table = here.scheduler, prompt(300), blocks_for(300)
    request = Request("first", text[:60])
    assert here.offer(request) == 0
    side.allocated(request, [], 0)
    here.compute(request, table, 0, 60)
    woken: list[int] = []
    with side._background.turn:  # the store's thread has no turn
        side._background.wake = lambda: woken.append(1)

        def generate(ends: range) -> None:
            for end in ends:
                request.all_token_ids = text[:end]
                here.write(request, table, end - 1, end)
                here.carry_out(here.build({"first": (end - 1, 1, table)}), settle=False)

        generate(range(62, 64))
        if then == "ended before":  # vLLM may hear of the last step's copies after it has ended the request
            told, side.reported = side.reported, lambda output: (side.finished(request), told(output))
        generate(range(64, 65))  # the 64th ends a chunk
        assert side.behind and stores(here) == 1 and bool(woken) == (then == "ended before"), "it can wait"
        if then == "looked up":
            assert here.offer(Request("second", text[:100])) == 64
        elif then == "idle":
            built = [here.build({}) for _ in range(2)]  # vLLM may have several under way
            for step in built:
                here.carry_out(step, settle=False)
            assert stores(here) == 2
        elif then.startswith("ended"):  # no step may follow
            side.finished(request)
            assert woken
            side._settle()
        elif then == "another prompt":  # its chunks may be needed by lower tiers: it does not wait
            other = Request("other", prompt(100, seed=1))
            assert here.offer(other) == 0
            side.allocated(other, [], 0)
            here.carry_out(here.build({"other": (0, 100, blocks_for(100, 24))}), settle=False)
            assert woken
        else:
            generate(range(65, 66))
            assert woken and side.behind
            side._settle()
        assert side.behind == (then == "another prompt")
        here.carry_out(here.build({}), settle=False)
        assert not side.behind, "or vLLM would go on for ever"
        assert stores(here) == (5 if then == "another prompt" else 2)
    side.check()


def test_waiting_requests_wait_once_in_a_step(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many of them are told to ask again while nothing is computed."""
    here = made([FULL])
    waits: list[float] = []
    monkeypatch.setattr(here.scheduler._store, "wait", waits.append)
    monkeypatch.setattr(here.scheduler._prefixes, "offer", lambda *_: None)
    for _ in range(2):
        here.step({})
        for number in range(50):
            assert here.scheduler.matched(Request(f"r{number}", prompt(300, number)), 0) == (None, False)
    assert waits.count(0.001) == 2
