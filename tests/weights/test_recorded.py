"""Recorded decode steps of an engine whose weights are placed: the bits of unrecorded ones, and of all in memory.

``STOWAGE_TEST_FAMILIES=all`` tries every family of the table.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stowage
from stowage import CheckpointError, Engine, Memory, SamplingParams, StorageError
from stowage.errors import ModelError
from stowage.executor.replay.calls.backend import CallBackend, RecordedSteps
from stowage.executor.replay.programs import operations
from stowage.executor.replay.programs.program import Program
from stowage.executor.runner import Runner
from stowage.testing import tiny_models
from stowage.weights.prefetcher import Prefetcher
from stowage.weights.weight_unit import Delivery
from tests.answers import bits
from tests.depth import mostly_rare
from tests.engine.test_adapters import adapter_of
from tests.native import needs_native
from tests.weights import published_files
from tests.weights.test_failures import flip
from tests.weights.test_published import EXPERTS

RECORDED = ["deepseek_v3-fp8", "gpt_oss-mxfp4", "mixtral-awq", "qwen3_moe-nvfp4"]

FAMILIES = ("llama", "gemma3", "mixtral", "deepseek_v3", "qwen3_next", "nemotron_h", "gpt2")
UNRECORDED = ("phi4_mini", "aria", "dbrx", "longcat_flash")
"""Steps of these are not recorded with all weights in memory either."""
TRIED = tuple(tiny_models.FAMILIES) if os.environ.get("STOWAGE_TEST_FAMILIES") == "all" else FAMILIES
IN_EVERY_DTYPE = ("llama",)
CASES = [
    pytest.param(
        family, dtype, marks=() if dtype == "bfloat16" or family in IN_EVERY_DTYPE else pytest.mark.every_family
    )
    for family in TRIED
    for dtype in ("float32", "bfloat16", "float16")
]
BUDGETS = ("*=stream", "*=mapped", "last 1 of 2=stream,*=prefetch", "*=experts")
IN_EVERY_BUDGET = (("llama", "bfloat16"), ("mixtral", "bfloat16"), ("qwen3_next", "bfloat16"))
"""The others take turns: every second budget."""
SIZES: dict[str, Any] = {"kv_cache_memory": "8MiB", "host_memory": "64MiB", "max_num_seqs": 3}


def answers(engine: Engine) -> list[Any]:
    """Four prompts, three at a time: they come and go."""
    prompts = [[at + 5, *range(20, 20 + 3 * at)] for at in range(4)]
    params = [SamplingParams(max_new_tokens=8 + 3 * at, ignore_eos=True, logprobs=1) for at in range(4)]
    requests = [engine.submit(*asked) for asked in zip(prompts, params, strict=True)]
    assert all(request.wait(60) for request in requests)
    return bits(request.result() for request in requests)


def steps_of(engine: Engine) -> RecordedSteps | None:
    runner = engine.parts.runner
    return runner.steps if isinstance(runner, Runner) else None


def unrecorded(engine: Engine) -> Engine:
    if isinstance(engine.parts.runner, Runner):
        engine.parts.runner.steps = None
    return engine


@pytest.mark.parametrize(
    ("family", "dtype"), mostly_rare(CASES, [("llama", "bfloat16"), ("nemotron_h", "bfloat16"), ("gemma3", "bfloat16")])
)
def test_recorded_steps_give_the_bits_of_unrecorded_ones_and_of_weights_in_memory(
    family: str, dtype: str, tmp_path: Path
) -> None:
    directory = tiny_models.write(family, tmp_path / "model", dtype=dtype)
    with Engine(directory, Memory(**SIZES)) as engine:
        expected = answers(engine)
        in_memory = steps_of(engine)
        assert in_memory is None or not in_memory.why or family in UNRECORDED
    placed = 0
    for budget in BUDGETS if (family, dtype) in IN_EVERY_BUDGET else BUDGETS[TRIED.index(family) % 2 :: 2]:
        try:
            engine = Engine(directory, Memory(**SIZES, weights=budget))
        except stowage.StowageError:  # it has no experts of that kind, or on disk they have another form
            continue
        placed += 1
        with engine:
            assert engine.weights is not None
            steps, weights = steps_of(engine), engine.weights
            assert answers(engine) == expected, budget
            engine.check()
            weights.check()
            assert set(weights.placement.deliveries) - {Delivery.RESIDENT}
            if steps is not None and in_memory is not None and not in_memory.why:
                assert not steps.why and steps.counters.replayed_steps > 8, (budget, steps.why)
                assert weights.stats()["passes"] >= steps.counters.replayed_steps, "each has its turn"
            if placed == 1:  # wherever weights lie, models give the same bits: tests/weights/test_engine.py
                assert answers(unrecorded(engine)) == expected, budget
    assert placed


@needs_native
@pytest.mark.parametrize("name", mostly_rare(RECORDED, ["deepseek_v3-fp8", "qwen3_moe-nvfp4"]))
def test_steps_of_experts_as_published_are_recorded(name: str, tmp_path: Path) -> None:
    family, method, quantiser = EXPERTS[name]
    published, _ = published_files.write(family, tmp_path, method, quantiser)
    with Engine(published, Memory(**SIZES), dtype="bfloat16") as engine:
        expected = answers(unrecorded(engine))
    for budget in ("auto", "*=experts", "*=stream"):
        with Engine(published, Memory(**SIZES, weights=budget), dtype="bfloat16") as engine:
            assert answers(engine) == expected, budget
            steps = steps_of(engine)
            assert steps is not None and not steps.why and steps.counters.replayed_steps > 8, budget


@needs_native
def test_weights_lie_somewhere_else_in_each_step(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three units that take turns in two buffers: a program finds a weight where it is this time."""
    seen: dict[int, set[tuple[int, ...]]] = {}
    call = Program.__call__

    def noted(self: Program, *given: Tensor) -> Tensor | None:
        addresses = tuple(x.data_ptr() for x in given if type(x) is nn.Parameter)
        seen.setdefault(id(self), set()).add(addresses)
        return call(self, *given)

    with Engine(copied, Memory(**SIZES)) as engine:
        expected = answers(engine)
    monkeypatch.setattr(Program, "__call__", noted)
    with Engine(copied, Memory(**SIZES, weights="model.layers.*=stream,lm_head=stream")) as engine:
        assert answers(engine) == expected
    assert max(map(len, seen.values())) > 1


@needs_native
@pytest.mark.parametrize("rules", ["*=stream", "*=mapped"])
def test_a_checkpoint_that_changes_ends_recorded_steps(
    rules: str, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two steps, or while one is made: nothing is answered from what it holds now."""
    with Engine(copied, Memory(**SIZES, weights=rules)) as engine:
        answers(engine)
        steps = steps_of(engine)
        assert steps is not None and steps.counters.replayed_steps
        made = CallBackend._made

        def changing(self: CallBackend, calls: Any, step: Any) -> Tensor:
            found = made(self, calls, step)
            if sum(flips) < 1:
                flip(copied)
                flips.append(1)
            return found

        flips: list[int] = []
        monkeypatch.setattr(CallBackend, "_made", changing)
        for _ in range(2):
            with pytest.raises(CheckpointError, match="was changed"):
                answers(engine)
        assert flips and engine.alive


@needs_native
def test_steps_that_fail_in_the_middle_leave_the_others_right(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fails at a random unit fails requests of that step; whatever is answered is right."""
    chance, failing = random.Random(5), False
    take = Prefetcher.take

    def sometimes(self: Any, unit: int) -> Any:
        if failing and chance.random() < 0.01:
            raise StorageError("the disk is asleep")
        return take(self, unit)

    monkeypatch.setattr(Prefetcher, "take", sometimes)
    prompts = [[at + 5, *range(20, 20 + 3 * at)] for at in range(3)]
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    with Engine(copied, Memory(**SIZES)) as engine:
        expected = [answer.token_ids for answer in engine.generate(list(prompts), params)]
    with Engine(copied, Memory(**SIZES, weights="*=stream")) as engine:
        engine.generate(list(prompts), params)
        steps, failed, right = steps_of(engine), 0, 0
        assert steps is not None and steps.counters.replayed_steps
        failing = True
        for at in range(40):
            request = engine.submit(prompts[at % 3], params)
            assert request.wait(60)
            try:
                assert request.result().token_ids == expected[at % 3]
                right += 1
            except StorageError:
                failed += 1
        failing = False
        assert failed and right
        assert [answer.token_ids for answer in engine.generate(list(prompts), params)] == expected
        assert not steps.why
        engine.check()


@needs_native
@pytest.mark.parametrize("ended", ["changed", "closed"])
def test_recorded_prompts_of_mapped_weights_answer_from_no_others(ended: str, copied: Path) -> None:
    prompts, one = [[at, *range(20, 80)] for at in range(5, 15)], SamplingParams(max_new_tokens=1)
    with Engine(copied, Memory(**SIZES, weights="*=mapped")) as engine:
        for prompt in prompts:
            engine.generate([prompt], one)
        runner = engine.parts.runner
        assert isinstance(runner, Runner) and runner.prompts is not None and engine.weights is not None
        assert runner.prompts.counters.replayed_steps
        if ended == "changed":
            flip(copied)
        else:
            engine.weights.close()
        with pytest.raises((CheckpointError, ModelError), match=ended):
            engine.generate([list(range(30, 100))], one)


@needs_native
@pytest.mark.parametrize("rules", ["*=stream", "*=mapped"])
def test_weights_that_were_closed_are_computed_with_no_more(rules: str, copied: Path) -> None:
    with Engine(copied, Memory(**SIZES, weights=rules)) as engine:
        answers(engine)
        steps = steps_of(engine)
        assert steps is not None and steps.recorded and engine.weights is not None
        engine.weights.close()
        with pytest.raises(ModelError, match="closed"):
            answers(engine)
    assert not steps.recorded, "an engine that was closed keeps no addresses"


@needs_native
def test_copies_of_weights_are_right_while_steps_are_made(copied: Path, plain: Callable[..., Any]) -> None:
    """Another thread reads them between two steps: it waits for its turn."""
    whole = dict(plain("llama").named_parameters())
    name = "model.layers.1.mlp.up_proj.weight"
    with Engine(copied, Memory(**SIZES)) as engine:
        expected = answers(engine)
    with Engine(copied, Memory(**SIZES, weights="*=stream")) as engine:
        source, done, wrong, read = engine.weights, threading.Event(), [], []
        assert source is not None

        def reads() -> None:
            while not done.is_set():
                read.append(name)
                if not torch.equal(source.read(name), whole[name].detach()):
                    wrong.append(name)

        thread = threading.Thread(target=reads)
        thread.start()
        try:
            for _ in range(4):
                assert answers(engine) == expected
        finally:
            done.set()
            thread.join(60)
        assert read and not wrong
        source.check()


@needs_native
def test_hooks_of_others_keep_a_model_as_it_is_written(copied: Path) -> None:
    with Engine(copied, Memory(**SIZES, weights="*=stream")) as engine:
        called: list[int] = []
        steps = steps_of(engine)
        assert steps is not None
        tried = steps.counters.replayed_steps
        handle = engine.model.model.layers[0].register_forward_hook(lambda *_: called.append(1))
        answers(engine)
        assert called and steps.counters.replayed_steps == tried
        handle.remove()
        answers(engine)
        assert steps.counters.replayed_steps > tried and not steps.why


@pytest.mark.rare
@needs_native
def test_adapters_and_their_base_answer_as_in_memory(copied: Path, tmp_path: Path) -> None:
    adapter = adapter_of(copied, tmp_path / "adapter", 3)
    said = []
    for budget in ({}, {"weights": "*=stream"}, {"weights": "*=mapped"}):
        with Engine(copied, Memory(**SIZES, **budget), deterministic=True, adapter={"one": adapter}) as engine:
            params = SamplingParams(max_new_tokens=12, ignore_eos=True, logprobs=1)
            asked = [(at + 5, name) for at in range(4) for name in (None, "one")]
            requests = [engine.submit([token, 9, 11], params, adapter=name) for token, name in asked]
            assert all(request.wait(60) for request in requests)
            said.append(bits(request.result() for request in requests))
            steps = steps_of(engine)
            assert steps is not None and steps.counters.replayed_steps
    assert said[0] == said[1] == said[2]


def _pythons(engine: Engine) -> set[str]:
    """Functions that Python calls in recorded steps."""
    steps = steps_of(engine)
    assert steps is not None and steps.counters.replayed_steps > 8
    made = [entry.recording for entry in steps._entries.values() if entry.recording is not None]
    functions = [getattr(call.function, "func", call.function) for recording in made for call in recording.calls]
    return {getattr(function, "__name__", "") for function in functions}


def anew(engine: Engine) -> list[tuple[list[int], list[float]]]:
    """``answers`` of what nothing is cached of."""
    engine.drop_device_cache()
    engine.drop_host()
    return answers(engine)


@needs_native
@pytest.mark.parametrize("name", mostly_rare(RECORDED, ["deepseek_v3-fp8", "qwen3_moe-nvfp4"]))
def test_experts_and_latents_that_stay_are_parts_of_programs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is made of a weight is made anew when that has other numbers. Tokens may share experts."""
    monkeypatch.setattr(operations, "_ROWS_OF_EXPERT", 0)
    family, method, quantiser = EXPERTS[name]
    published, _ = published_files.write(family, tmp_path, method, quantiser)
    with Engine(published, Memory(**SIZES), dtype="bfloat16") as engine:
        before = answers(engine)
        left = _pythons(engine) & {"stacked", "update", "paged_attention", "repeat_interleave"}
        assert not left
        for parameter in (p for n, p in engine.model.named_parameters() if "kv_b_proj" in n):
            with torch.no_grad():
                parameter.mul_(2.0)
        after = anew(engine)
        assert (after != before) == (family == "deepseek_v3")
        assert after == anew(unrecorded(engine))
