"""Prompts that are replayed from one list for any number of rows: the model's own bits, or the model computes them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter

from stowage.config.memory import Memory
from stowage.engine.engine import Engine
from stowage.engine.sampling_params import SamplingParams
from stowage.executor import kernels
from stowage.executor.determinism.row_invariance import RowInvariance
from stowage.executor.replay.backend import CaptureError
from stowage.executor.replay.calls import prompts
from stowage.executor.replay.calls.prompts import PromptStep
from stowage.executor.replay.calls.recording import one_call, recorded
from stowage.executor.replay.programs.any_rows import RecordedRows, for_any_rows
from stowage.executor.replay.programs.program import Arena
from stowage.executor.replay.programs.writer import planned
from stowage.executor.runner import Runner
from stowage.testing import tiny_models
from tests.depth import mostly_rare
from tests.native import needs_native

pytestmark = needs_native
ROWS = (7, 11, 13)
EXACT = RowInvariance(linear=True, exact=True)
WEIGHT = Parameter(torch.randn(12, 8, generator=torch.Generator().manual_seed(1)).bfloat16(), requires_grad=False)
TABLE = Parameter(torch.randn(900, 8, generator=torch.Generator().manual_seed(2)).bfloat16(), requires_grad=False)
Function = Callable[[Tensor], Tensor]


def rows_of(count: int) -> Tensor:
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(count)).bfloat16()


@torch.inference_mode()
def recording(function: Function) -> RecordedRows:
    plans, arena = [], Arena()
    for count in ROWS:
        x = rows_of(count)
        _, step = recorded(partial(function, x), (x,), (), (WEIGHT, TABLE), EXACT)
        plans.append(planned(step, arena, any_rows=True))
    return for_any_rows(plans, ROWS)


@torch.inference_mode()
def agrees(function: Function, found: RecordedRows) -> bool:
    with EXACT:
        expected = [(x, function(x)) for x in map(rows_of, (2, 3, 13, 40, 256, 700))]
    return all(torch.equal(found.replay((x,)), y) for x, y in expected)


def layer(x: Tensor) -> Tensor:
    """Products, functions, views, copies and joints, as models have them."""
    y = F.linear(F.silu(x), WEIGHT)
    heads = y.view(1, len(x), 3, 4).transpose(1, 2)
    turned = torch.cat((-heads[..., 2:], heads[..., :2]), dim=-1)
    return F.linear((heads * 2 + turned).transpose(1, 2).reshape(len(x), 12), WEIGHT.t()) + x


@one_call
def seen(x: Tensor) -> Tensor:
    """A call that stays Python's: it reads what a program gives, as a view, and gives what one reads."""
    return x.flip(0).contiguous()


@one_call
def lasting(x: Tensor, rows: Tensor) -> Tensor:
    return x[rows]


@pytest.mark.parametrize(
    "function",
    [
        layer,
        lambda x: seen(layer(x)[:, 1:5] * 3) + 1,
        lambda x: layer(x)[-1:] - x[:1],
        lambda x: layer(layer(x)).view(1, len(x), 2, 4).sum(dim=1),
        lambda x: torch.stack((layer(x), x * x), dim=1).flatten(0, 1)[1::2],
        lambda x: lasting(x + TABLE[3], torch.arange(len(x)) * 1) * 2,
        lambda x: (seen(x).view(2 * len(x), 4) * 2).view(len(x), 8).expand(3, len(x), 8) + x,
    ],
)
def test_one_list_serves_any_number_of_rows(function: Function) -> None:
    assert agrees(function, recording(function))


def square(x: Tensor) -> Tensor:
    every = (x[:, None, :1] * x[None, :, :1]).squeeze(-1)
    return (every * 2).sum(dim=1, keepdim=True) + x


def of_many(x: Tensor) -> Tensor:
    return layer(x) if len(x) < 12 else layer(x) + 1


def changing(x: Tensor) -> Tensor:
    return x * 2 + 1 if len(x) == 11 else x * 3 + 1


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (square, "grows otherwise"),
        (of_many, "more or less"),
        (changing, "other constants|other values|grows otherwise"),
        (lambda x: x * len(x) + 1, "other"),
        (lambda x: x * 2 + TABLE[: len(x)], "more of a constant"),
        (lambda x: F.linear(TABLE[: len(x)], WEIGHT) + 1, "more of a constant"),
        (lambda x: lasting(TABLE, torch.arange(20 - len(x))) * 2 + 1, "less memory"),
        (lambda x: torch.cat((x, x[:1].expand(16 - len(x), 8)))[: len(x)] * 2, "less of something"),
        (seen, "no call"),
    ],
)
def test_what_grows_otherwise_is_refused(function: Function, why: str) -> None:
    with pytest.raises(CaptureError, match=why):
        recording(function)


@settings(max_examples=40, deadline=None)
@drawn(data=st.data())
def test_any_views_of_any_number_of_rows(data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(3)))
    back = [order.index(at) for at in range(3)]
    begin, step = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 2))
    dim = data.draw(st.integers(0, 2))

    def function(x: Tensor) -> Tensor:
        a = x.view(len(x), 2, 4)
        y = (a.permute(order).contiguous() * 2 + a.permute(order)).permute(back)[:, :, begin::step]
        z = torch.cat((y, -y), dim=dim)
        return (z.reshape(-1) + z.permute(order).reshape(-1)).view(-1, 2)

    assert agrees(function, recording(function))


# prompts of an engine


@contextmanager
def compared(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """Sequences and rows of each replay, which the model has computed, too."""
    told: list[tuple[int, int]] = []
    wrong: list[int] = []
    prompt = Runner._compute

    def both(self: Runner, step: Any, states: Any, **named: Any) -> Tensor:
        before = self.prompts.counters.replayed_steps if self.prompts is not None else 0
        found = prompt(self, step, states, **named)
        if self.prompts is not None and self.prompts.counters.replayed_steps > before:
            expected = prompt(self, step, states, **{**named, "prompt": None})
            told.append((len(step.logit_rows), len(step.ids)))
            wrong.extend([len(step.ids)] * (not torch.equal(found, expected)))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Runner, "_compute", both)
        yield told
    assert not wrong


def ask(engine: Engine, *lengths: int) -> list[Any]:
    draw = random.Random(sum(lengths))
    asked: list[Any] = [[draw.randrange(20, 180) for _ in range(length)] for length in lengths]
    return engine.generate(asked, SamplingParams(max_new_tokens=3, ignore_eos=True, logprobs=2))


def memory(**more: Any) -> Memory:
    return Memory(kv_cache_memory="8MiB", max_num_seqs=4, max_num_batched_tokens=200, **more)


def recorded_of(engine: Engine) -> Any:
    runner = engine.parts.runner
    assert isinstance(runner, Runner) and runner.prompts is not None
    return runner.prompts


ONE_OF_EACH = ("llama", "gemma3", "gpt2", "qwen3_moe")
MORE = (
    "mistral",
    "llama4",
    "gpt_oss",
    "deepseek_v3",
    "cohere2",
    "phi3",
    "opt",
    "exaone4",
    "gemma3n",
    "apertus",
    "olmoe",
)


@pytest.mark.parametrize(
    ("family", "dtype"),
    mostly_rare(
        [
            pytest.param(family, dtype, marks=() if family in ONE_OF_EACH else pytest.mark.every_family)
            for family in (*ONE_OF_EACH, *MORE)
            for dtype in kernels.DTYPES
        ],
        [("llama", torch.float32), ("gemma3", torch.bfloat16), ("qwen3_moe", torch.bfloat16)],
    ),
)
def test_a_list_gives_the_model_s_own_bits(family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    with compared(monkeypatch) as told, Engine(tiny_models.build(family).to(dtype), memory()) as engine:
        for length in (60, 50, 70, 41, 45, 55, 65, 42, 150, 9, 190):
            ask(engine, length)
        for length in range(45, 105, 5):
            ask(engine, length, length + 7)
        assert recorded_of(engine).why == ""
    assert {rows for count, rows in told if count == 1} >= {42, 150, 9, 190}
    assert any(count == 2 for count, _ in told)


def test_short_prompts_alone_are_not_written_down() -> None:
    with Engine(tiny_models.build("llama"), memory()) as engine:
        for _ in range(12):
            ask(engine, prompts.LEAST - 1)
        assert not recorded_of(engine).recorded
        for length in range(8):
            ask(engine, prompts.LEAST + length)
        assert len(recorded_of(engine).recorded) == 1


def test_a_model_that_does_something_else_in_longer_prompts_computes_them() -> None:
    """Than those that are written down: what is tried is longer."""
    with Engine(tiny_models.build("llama"), memory()) as engine:
        expected = ask(engine, 60)[0].token_ids
        mlp = engine.model.model.layers[0].mlp
        own = mlp.forward
        mlp.forward = lambda x: own(x) * 2 if x.shape[1] == prompts.LEAST else own(x)
        for length in range(70, 150, 10):
            ask(engine, length)
        found = recorded_of(engine)
        assert not found.recorded and found.counters.replayed_steps == 0
        assert found.why == "the same calls gave something else"
        assert ask(engine, 60)[0].token_ids == expected


def test_a_model_that_fills_its_rows_up_computes_them() -> None:
    """The parts that are written down take as much room, in which longer ones have none."""
    with Engine(tiny_models.build("llama"), memory()) as engine:
        mlp = engine.model.model.layers[0].mlp
        own = mlp.forward

        def filled(x: Tensor) -> Tensor:
            room = x.new_zeros(1, -(-x.shape[1] // 16) * 16, x.shape[2])
            room[:, : x.shape[1]] = x
            return own(room)[:, : x.shape[1]]

        mlp.forward = filled
        expected = ask(engine, 60)[0].token_ids
        for length in range(70, 150, 10):
            ask(engine, length)
        found = recorded_of(engine)
        assert not found.recorded and found.why.startswith("the same calls fail")
        assert ask(engine, 60)[0].token_ids == expected


def test_hooks_that_come_later_are_called_as_long_as_they_are_there() -> None:
    with Engine(tiny_models.build("llama"), memory()) as engine:
        for length in range(60, 70):
            ask(engine, length)
        runner, rows = engine.parts.runner, []
        assert isinstance(runner, Runner) and runner.steps is not None
        caches = runner.steps, recorded_of(engine)
        before = [cache.counters.replayed_steps for cache in caches]
        assert all(before)
        handle = engine.model.model.layers[0].mlp.register_forward_hook(
            lambda module, args, out: rows.append(out.shape[1])
        )
        ask(engine, 80)
        assert rows == [80, 1, 1]
        assert [cache.counters.replayed_steps for cache in caches] == before
        handle.remove()
        ask(engine, 90)
        assert len(rows) == 3
        assert all(cache.counters.replayed_steps > count for cache, count in zip(caches, before, strict=True))


def test_code_of_others_may_do_something_else_in_long_prompts() -> None:
    model = tiny_models.build("llama")
    assert prompts.is_known(model)
    model.model.layers[1].mlp.__class__ = type("Mine", (type(model.model.layers[1].mlp),), {"__module__": "mine"})
    assert not prompts.is_known(model)
    with Engine(model, memory()) as engine:
        ask(engine, 60)
        runner = engine.parts.runner
        assert isinstance(runner, Runner) and runner.prompts is None and runner.steps is not None


def test_where_bits_may_depend_on_the_batch_nothing_is_written_down() -> None:
    with Engine(tiny_models.build("llama"), memory(), batch_dependent=True) as engine:
        for length in range(60, 70):
            ask(engine, length)
        runner = engine.parts.runner
        assert isinstance(runner, Runner) and runner.prompts is None


def test_what_a_prompt_is_computed_with_is_given_back() -> None:
    with Engine(tiny_models.build("llama"), memory()) as engine:
        for length in (*range(60, 68), 180):
            ask(engine, length)
        found = recorded_of(engine)
        (shape,) = found.recorded
        kept = found._entries[shape].recording
        assert isinstance(kept, RecordedRows) and kept.room.at(180) > 0
        tensors = [one for one in kept.calls.values if isinstance(one, Tensor)]
        own = {one.data_ptr() for one in (*engine.model.parameters(), *engine.model.buffers())}
        assert all(one.data_ptr() in own for one in tensors)
        arena = found.backend._calls.arena
        assert arena.room(0).numel() < kept.room.at(180), "that of single tokens is another"


def test_a_step_says_how_many_sequences_it_has() -> None:
    given = tuple(torch.zeros(3) for _ in range(4))
    assert str(prompts._PromptBackend(None).shape(PromptStep(2, given, None))) == "2 sequences"  # type: ignore[arg-type]
