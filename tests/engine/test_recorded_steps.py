"""Steps of models of one function, replayed from lists of calls: the same bits, or the model computes them itself."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stowage.executor import kernels
from stowage.executor.determinism.row_invariance import RowInvariance
from stowage.executor.fused.recurrent_kernels import StateRows
from stowage.executor.replay.calls.backend import ModelStep, RecordedSteps, recorded_steps
from stowage.executor.replay.calls.recording import one_call
from tests.native import needs_native


class Own(nn.Module):
    """A model of one function: ``step(self, x)``, with a parameter, and a state of 3 numbers."""

    def __init__(self, step: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]), requires_grad=False)
        self.register_buffer("eye", torch.eye(3))
        self.plain = torch.ones(3)
        self.state = torch.zeros(3)
        self.calls = 0
        self._step = step

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self._step(self, x)


def step_of(model: Own, x: Tensor) -> ModelStep:
    """A step with the model's one state."""
    view, rows = model.state[None], torch.tensor([0])
    bound = lambda: nullcontext([model.state])  # noqa: E731
    return ModelStep((x,), lambda: model(x), bound, lambda: [StateRows(view, rows)], False)


def run(steps: RecordedSteps, model: Own, x: Tensor, mode: RowInvariance | None = None) -> Tensor:
    def plain() -> Tensor:
        with mode or nullcontext():
            return model(x)  # type: ignore[no-any-return]

    return steps.run(step_of(model, x), plain)


def steps_of(model: Own, count: int = 6) -> tuple[list[Tensor], RecordedSteps]:
    """What steps of ``model`` give, each with another input, and who made them."""
    mode = RowInvariance(linear=False, exact=False)
    steps = recorded_steps(model, mode)
    found = []
    for at in range(count):
        x = torch.tensor([float(at), -1.0, 2.0 - at])
        found.append(run(steps, model, x, mode).clone())
    return found, steps


def expected(model: Own) -> list[Tensor]:
    return [model(torch.tensor([float(at), -1.0, 2.0 - at])).clone() for at in range(6)]


def _grows(self: Any, x: Tensor) -> Tensor:
    self.state.copy_(self.state * 0.5 + x)
    return self.state * self.weight


def _own_memory(self: Any, x: Tensor) -> Tensor:
    out = x * 2
    out[1:] += 1
    out.mul_(self.weight)
    first, *rest = out.split(1)
    return torch.cat([*rest, first.clamp(min=0.0)], dim=-1) @ self.eye


def _sorted(self: Any, x: Tensor) -> Tensor:
    best = x.topk(2)
    return torch.where(x > 0, x, self.weight)[best.indices] + best.values.softmax(-1)


@pytest.mark.parametrize("step", [_grows, _own_memory, _sorted, lambda self, x: torch.nn.functional.silu(x, False)])
def test_what_depends_on_nothing_else_is_made_from_the_list(step: Any) -> None:
    model, other = Own(step), Own(step)
    found, steps = steps_of(model)
    assert steps.counters.replayed_steps == 3 and model.calls == 3
    assert all(torch.equal(*pair) for pair in zip(found, expected(other), strict=True))
    assert torch.equal(model.state, other.state)


def _caught(self: Any, x: Tensor) -> Tensor:
    try:
        return x * x.max().item()
    except Exception:  # noqa: BLE001 - as some models do
        return x


def _counts(self: Any, x: Tensor) -> Tensor:
    return x * float(self.calls)


def _counts_states(self: Any, x: Tensor) -> Tensor:
    self.state.add_(float(self.calls))
    return x.clone()


REFUSED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "asks for a number": lambda self, x: x * x.max().item(),
    "asks for truth": lambda self, x: x * 2 if x[0] > 1 else x * 3,
    "asks for a list": lambda self, x: x * x.tolist()[0],
    "asks for an integer": lambda self, x: x * int(x[0]),
    "catches what is raised": _caught,
    "picks by a mask": lambda self, x: x[x > 0].sum() + x,
    "picks what is not zero": lambda self, x: x * x.nonzero().numel(),
    "where of one": lambda self, x: x * torch.where(x > 0)[0].numel(),
    "makes as many as a tensor says": lambda self, x: x * torch.arange(x.abs().max() + 1).numel(),
    "slices by a tensor": lambda self, x: x[: x.abs().max().long()].sum() + x,
    "repeats by a tensor": lambda self, x: x.repeat_interleave(x.abs().long()).sum() + x,
    "a tensor of its own": lambda self, x: x + self.plain,
    "changes its parameter": lambda self, x: x + self.weight.add_(1.0),
    "changes its input": lambda self, x: x.view(3).add_(1.0) * 1,
    "draws": lambda self, x: x + torch.rand(3) * 0,
    "counts": _counts,
    "counts in its state": _counts_states,
}


WHY = {
    "catches what is raised": "calls item",
    "picks by a mask": "by a mask",
    "where of one": "calls where",
    "makes as many as a tensor says": "as much as a tensor says",
    "slices by a tensor": "tensors over in a slice",
    "a tensor of its own": "may change",
    "changes its parameter": "not the step's own",
    "changes its input": "not the step's own",
    "counts": "something else",
}
"""Said of those that could be found out in more ways than one."""


@pytest.mark.parametrize("what", REFUSED)
def test_what_may_come_out_otherwise_runs_as_it_is(what: str) -> None:
    model, other = Own(REFUSED[what]), Own(REFUSED[what])
    found, steps = steps_of(model)
    assert steps.counters.replayed_steps == 0 and WHY.get(what, "") in steps.why
    if what in ("counts", "counts in its state"):
        return  # a step that is computed again counts again
    assert all(torch.equal(*pair) for pair in zip(found, expected(other), strict=True))


def test_a_list_that_changes_states_otherwise_leaves_them_as_the_model_does() -> None:
    model = Own(_counts_states)
    steps_of(model, 3)
    assert torch.equal(model.state, torch.full((3,), 1.0 + 2.0 + 3.0))


def test_a_refused_step_leaves_the_states_as_they_were_before_it() -> None:
    def step(self: Any, x: Tensor) -> Tensor:
        self.state.add_(1.0)
        return x * x.max().item()

    model = Own(step)
    steps_of(model, 5)
    assert torch.equal(model.state, torch.full((3,), 5.0))


@needs_native
def test_a_layer_that_is_given_something_else_than_those_fused_with_it_is_computed_from_that() -> None:
    torch.manual_seed(1)
    model = Own(lambda self, x: torch.cat((self.first(x), self.second(x * 2 if self.calls == 2 else x))))
    model.first, model.second = (nn.Linear(3, 3, bias=False).requires_grad_(False) for _ in range(2))
    mode = RowInvariance(linear=True, exact=False)
    steps = recorded_steps(model, mode)
    x = torch.randn(3)
    found = [run(steps, model, x, mode) for _ in range(3)]
    first, second = kernels.linear(x, model.first.weight), kernels.linear(x, model.second.weight)
    assert torch.equal(found[0], torch.cat((first, second))) and torch.equal(found[2], found[0])
    assert torch.equal(found[1], torch.cat((first, kernels.linear(x * 2, model.second.weight))))


def test_what_nobody_needs_any_more_is_let_go_at_once() -> None:
    seen: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    @one_call
    def look(x: Tensor) -> Tensor:
        alive.append(sum(ref() is not None for ref in seen))
        seen.append(weakref.ref(x))
        return x + 1

    def step(self: Any, x: Tensor) -> Tensor:
        seen.clear()
        for _ in range(4):
            x = look(torch.sin(x))
        return x

    model = Own(step)
    _, steps = steps_of(model, 3)
    for _ in range(2):
        seen.clear()
        alive.clear()
        x = torch.ones(3)
        run(steps, model, x)
    assert steps.counters.replayed_steps == 2 and alive == [0, 0, 0, 0]


def test_hooks_of_modules_are_called() -> None:
    model = Own(lambda self, x: x * 2)
    heard: list[Tensor] = []
    model.register_forward_hook(lambda module, args, out: heard.append(out))
    _, steps = steps_of(model)
    assert len(heard) == 6 and steps.counters.replayed_steps == 0


def test_states_that_somebody_asks_for_are_gathered() -> None:
    """Only a kernel may have them as they lie, and a copy of one to itself is left out."""
    kernel = one_call(lambda x, state: (x + state, state), in_place=True)

    def to_itself(own: Any, x: Tensor) -> Tensor:
        out, state = kernel(x, own.state)
        own.state.copy_(state)
        return out * 2  # type: ignore[no-any-return]

    def gathered(own: Any, x: Tensor) -> Tensor:
        return kernel(x, own.state)[0] * own.state  # type: ignore[no-any-return]

    def copied(own: Any, x: Tensor) -> Tensor:
        out, state = kernel(x, own.state)
        return out * own.state.copy_(state)  # type: ignore[no-any-return]

    def another(own: Any, x: Tensor) -> Tensor:
        out, _ = kernel(x, own.state)
        own.state.copy_(out)
        return out  # type: ignore[no-any-return]

    def listed(own: Any, x: Tensor) -> Tensor:
        return torch.stack([x, own.state])

    for step in (to_itself, gathered, copied, another, listed):
        model = Own(step)
        _, steps = steps_of(model)
        (entry,) = steps._entries.values()
        calls = entry.recording
        assert calls is not None and (calls.in_place is not None) == (step is to_itself), step
        if step is to_itself:
            assert len(calls.in_place or ()) == len(calls.calls) - 1
            assert torch.equal(calls.replay((torch.zeros(3), model.state), in_place=True), model.state * 2)


def test_other_shapes_have_lists_of_their_own() -> None:
    model = Own(lambda self, x: x * 2 + 1)
    steps = recorded_steps(model, None)
    for at in range(9):
        x = torch.arange(float(2 + at % 3))
        assert torch.equal(run(steps, model, x), x * 2 + 1)
    assert steps.counters.replayed_steps == 0 and model.calls == 9 and len(steps.recorded) == 3
    for _ in range(9):
        run(steps, model, torch.ones(2))
    assert steps.counters.replayed_steps == 9
    steps.check()


def test_lists_are_not_kept_for_ever() -> None:
    model = Own(lambda self, x: x * 2)
    steps = recorded_steps(model, None)
    for length in range(200):
        x = torch.ones(length)
        for _ in range(4):
            run(steps, model, x)
    assert steps.counters.replayed_steps == 64
    steps.check()
