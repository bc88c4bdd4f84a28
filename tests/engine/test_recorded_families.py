"""Decode steps of real families that are replayed from lists and programs: the model's own bits, in few calls."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from stowage.config.memory import Memory
from stowage.engine.engine import Engine
from stowage.engine.sampling_params import SamplingParams
from stowage.executor import kernels
from stowage.executor.fused.recurrent_kernels import StateRows
from stowage.executor.replay.calls.backend import CallBackend, ModelStep, RecordedSteps
from stowage.executor.replay.calls.call_list import RecordedCalls
from stowage.executor.replay.programs import operations
from stowage.executor.replay.programs.encoding import Operation
from stowage.executor.runner import Runner
from stowage.testing import tiny_models
from tests.depth import mostly_rare
from tests.native import needs_native

KINDS = ("llama", "gemma2", "llama4", "gpt_oss", "mixtral", "deepseek_v3", "gpt2", "qwen3_next", "lfm2", "nemotron_h")
IN_EVERY_DTYPE = ("llama", "qwen3_next")
pytestmark = needs_native


def steps_of_an_engine(model: Any) -> RecordedSteps:
    """After five prompts, three at a time: they come and go."""
    with Engine(model, Memory(kv_cache_memory="1MiB", max_num_seqs=3)) as engine:
        prompts = [[at + 5, *range(20, 20 + 3 * at)] for at in range(5)]
        requests = [
            engine.submit(list(prompt), SamplingParams(10 + 3 * at, ignore_eos=True, logprobs=2))
            for at, prompt in enumerate(prompts)
        ]
        assert all(request.wait(60) for request in requests)
        for request in requests:
            request.result()
        runner = engine.parts.runner
        assert isinstance(runner, Runner) and runner.steps is not None
        return runner.steps


@pytest.mark.parametrize(
    ("family", "dtype"),
    mostly_rare(
        [
            pytest.param(
                family,
                dtype,
                marks=() if dtype is torch.bfloat16 or family in IN_EVERY_DTYPE else pytest.mark.every_family,
            )
            for family in KINDS
            for dtype in kernels.DTYPES
        ],
        [
            ("llama", torch.float32),
            ("gpt_oss", torch.bfloat16),
            ("deepseek_v3", torch.bfloat16),
            ("nemotron_h", torch.bfloat16),
            ("lfm2", torch.bfloat16),
        ],
    ),
)
def test_a_list_gives_the_model_s_own_bits(family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step that is made from a list is computed by the model too: which prompts meet in a step is not the same
    twice.
    """
    replay = CallBackend.replay
    wrong: list[str] = []
    compared: list[int] = []

    def both(self: CallBackend, calls: RecordedCalls, step: ModelStep) -> Tensor:
        states = step.states()
        before = [state.view[state.rows] for state in states]
        found = replay(self, calls, step)
        after = [state.view[state.rows] for state in states]
        for state, old in zip(states, before, strict=True):
            state.view[state.rows] = old
        with step.bound(), self._mode or nullcontext():
            plain = step.forward()
        again = [state.view[state.rows] for state in states]
        if not all(torch.equal(*pair) for pair in zip((plain, *again), (found, *after), strict=True)):
            wrong.append(f"a step of {step.given[0].tolist()}")
        compared.append(len(step.given[0]))
        return found

    monkeypatch.setattr(CallBackend, "replay", both)
    steps = steps_of_an_engine(tiny_models.build(family).to(dtype))
    assert steps.counters.replayed_steps > 8
    assert compared and not wrong


@pytest.mark.parametrize(
    "family",
    mostly_rare(["qwen3_next", "kimi_linear", "lfm2", "nemotron_h", "falcon_h1"], ["nemotron_h", "qwen3_next"]),
)
def test_states_of_several_are_changed_where_they_lie(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit as if they were gathered and written back."""
    replay = RecordedCalls.replay
    wrong: list[str] = []
    sizes: list[int] = []

    def both(self: RecordedCalls, given: Any, *, in_place: bool = False) -> Tensor:
        if not in_place:
            return replay(self, given)
        states = [one for one in given if isinstance(one, StateRows)]
        gathered = [state.view[state.rows] for state in states]
        logits = replay(self, given, in_place=True)
        again = replay(self, (*given[: len(given) - len(states)], *gathered))
        after = [state.view[state.rows] for state in states]
        if not all(torch.equal(*pair) for pair in zip((logits, *after), (again, *gathered), strict=True)):
            wrong.append(f"a step of {given[0].tolist()}")
        sizes.append(len(given[0]))
        return logits

    monkeypatch.setattr(RecordedCalls, "replay", both)
    with Engine(tiny_models.build(family), Memory(kv_cache_memory="64MiB", max_num_seqs=3)) as engine:
        for count in (2, 3):
            prompts = [[at + 5, *range(20, 20 + 3 * at)] for at in range(count)]
            engine.generate(prompts, SamplingParams(20, ignore_eos=True))
    assert not wrong
    assert {2, 3} <= set(sizes)


def test_layers_with_one_input_are_computed_together_by_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    linear = operations._linear

    def counted(*args: Any) -> list[Operation]:
        done = linear(*args)
        sizes.extend(int(one.words[1]) for one in done)  # type: ignore[arg-type]
        return done

    monkeypatch.setattr(operations, "_linear", counted)
    assert steps_of_an_engine(tiny_models.build("llama")).counters.replayed_steps > 8
    assert sizes.count(3) == sizes.count(2) > 1  # query, key and value; gate and up; two layers


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_all_layers_are_one_call(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Embedding, rotation, attention, what puts keys into blocks, and all else; before it, its addresses are set."""
    lists: list[RecordedCalls] = []
    record = CallBackend.record

    def noted(self: CallBackend, *asked: Any) -> Any:
        found = record(self, *asked)
        lists.append(found[0])
        return found

    monkeypatch.setattr(CallBackend, "record", noted)
    model = tiny_models.build(family).bfloat16()
    steps = steps_of_an_engine(model)
    assert not steps.recorded, "an engine that was closed keeps no lists"
    assert lists and kernels.form_of(model.lm_head.weight, kernels.of_plain(model.lm_head.weight))[1] == all(
        len(one.calls) == {"llama": 2, "gemma2": 4}[family] for one in lists
    )
