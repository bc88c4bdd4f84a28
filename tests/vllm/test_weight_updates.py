"""Weights that are changed in place: nothing that others have computed is loaded, nor stored under their name."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from stowage.plugins.vllm.messages import Step
from stowage.plugins.vllm.weight_updates import Changes, Validity
from stowage.plugins.vllm.worker import WorkerSide
from tests.vllm.conftest import Start
from tests.vllm.models import FAMILIES
from tests.vllm.oracle import Engine, Engines, connector, prompt, prove

TOKENS = prompt(700)


@pytest.mark.slow
def test_weights_that_are_reloaded(start: Start, engines: Engines, tmp_path: Path) -> None:
    """vLLM's reset alone, which leaves connectors as they are, is not enough to go on; one with connectors is, before
    the change or after it. Other engines find nothing of the new weights.
    """
    changed = start("llama", seed=1)
    expected = changed.generate(TOKENS)
    changed.close()
    other, first = (str(engines.model("llama", FAMILIES["llama"], seed)) for seed in (1, 0))
    engine = start("llama", connector(disk=tmp_path / "cache"))
    engine.generate(TOKENS)
    engine.ask("reload", path=other)
    engine.forget()
    for _ in range(3):
        found = engine.generate(TOKENS)
        assert (found.local, found.external, found.distance(expected)) == (0, 0, 0.0)
        engine.generate(prompt(700, seed=1))
        engine.forget()
    assert engine.counted("loads_failed") <= 1, "refused by the scheduler when it knows"
    nothing_of_it_is_found(engine, start("llama", connector(disk=tmp_path / "cache")), prompt(700, seed=1))
    assert engine.ask("reset", connector=True)
    assert prove(engine, TOKENS).distance(expected) < 1e-4
    assert engine.ask("reset", connector=True)
    engine.ask("reload", path=first)
    engine.ask("reload", path=other)
    assert prove(engine, TOKENS).distance(expected) < 1e-4
    assert engine.counted("faults") == 0
    engine.ask("check")


def nothing_of_it_is_found(engine: Engine, neighbour: Engine, tokens: list[int]) -> None:
    assert engine.ask("flush")
    assert neighbour.generate(tokens).external == 0
    assert neighbour.generate(TOKENS).external > 0, "of the weights that both began with"
    neighbour.close()


def test_a_load_that_runs_while_weights_change(start: Start, engines: Engines) -> None:
    """It brings what the old ones have computed: the request is computed instead."""
    changed = start("llama", seed=1)
    expected = changed.generate(TOKENS)
    changed.close()
    engine = start("llama", connector())
    engine.generate(TOKENS)
    engine.forget()
    engine.ask("fault", kind="hold_load", count=1)
    name = engine.add(TOKENS)
    engine.ask("step", count=3)
    assert "WAITING_FOR_REMOTE_KVS" in str(engine.ask("queues")["requests"])
    assert not engine.ask("reset", connector=True), "vLLM is told that it has to ask again"
    engine.ask("reload", path=str(engines.model("llama", FAMILIES["llama"], 1)))
    engine.ask("release")
    assert engine.finish()[name].distance(expected) == 0.0


@pytest.mark.parametrize("way", ["reload_weights", "update_weights", "runner", "model", "draft"])
def test_every_way_to_change_weights_is_seen(way: str) -> None:
    done: list[Any] = []
    model, draft = SimpleNamespace(load_weights=done.append), SimpleNamespace(load_weights=done.append)
    runner = SimpleNamespace(reload_weights=done.append)
    worker = SimpleNamespace(
        model_runner=runner,
        reload_weights=done.append,
        update_weights=done.append,
        get_model=lambda: model,
        get_draft_model=lambda: draft,
    )
    changes = Changes(worker)
    ways = {"runner": runner.reload_weights, "model": model.load_weights, "draft": draft.load_weights}
    assert changes.count == 0
    (ways.get(way) or getattr(worker, way))("weights")
    assert changes.count == 1 and done == ["weights"]


def test_a_report_that_nobody_took_is_not_of_the_step_behind_a_reset() -> None:
    changes = Changes(SimpleNamespace(model_runner=SimpleNamespace(reload_weights=lambda: None)))
    side = WorkerSide([], 0, (0, 0))
    side.register({}, changes)
    said = []
    for number, fresh in ((1, False), (2, False), (3, True), (4, False)):
        side.begin_loads(Step(number, fresh=fresh))
        said += [] if number == 2 else [side.report().changed]
        changes.count += number == 1
    assert said == [False, False, False], "of steps 1, 3 and 4"
    changes.count += 1
    side.begin_loads(Step(5))
    assert side.report().changed


def test_steps_that_were_built_before_a_reset_say_nothing_of_what_is_stored_behind_it() -> None:
    """vLLM builds a step while the one before is computed."""
    validity = Validity()
    assert not validity.was_reset and not validity.fresh(busy=True)
    assert validity.changed(7) and not validity.changed(8), "told once"
    validity.reset(9)
    assert not validity.changed(9) and not validity.stale
    assert [validity.fresh(busy=busy) for busy in (False, True, True)] == [True, True, False]
    assert validity.changed(10) and validity.stale and validity.was_reset
