"""Engines that decode with the paged kernel, interpreted on the CPU: answers are those of torch's attention."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

from stowage.config.memory import Memory
from stowage.cuda.paged_attention import launch
from stowage.engine.engine import Engine
from stowage.executor import kernels
from stowage.testing import tiny_models
from tests.engine.conftest import greedy, random_prompt
from tests.second_device.interpreting import interpreting

pytestmark = pytest.mark.device
FAMILIES = ["llama", "gemma2", "gpt_oss", "llama4", "deepseek_v3", "qwen3_next"]
"""Full; sliding and soft-capped; with sinks; chunked; latent; in blocks that a recurrent state forces."""
PROMPTS = [random_prompt(length, seed=length) for length in (110, 33)]
KV = Memory(kv_cache_memory="8MiB")


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Wanted on a CPU too, where the kernels in C would take its place."""
    monkeypatch.setattr(kernels, "wanted", lambda *_: False)
    monkeypatch.setattr(launch, "wanted", lambda device, dtype: dtype in launch.DTYPES)
    with interpreting():
        yield


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The queries that the kernel was called with."""
    found = []
    attend = launch.attend

    def noted(query, *rest):  # type: ignore[no-untyped-def]
        found.append(query.shape)
        return attend(query, *rest)

    monkeypatch.setattr(launch, "attend", noted)
    return found


def answers(model):  # type: ignore[no-untyped-def]
    with Engine(model, KV, batch_dependent=True) as engine:
        return engine.generate(PROMPTS, greedy(4))


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_torchs(family: str, asked: list[torch.Size], monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_models.build(family).eval()
    found = answers(model)
    together = [shape for shape in asked if shape[0] == len(PROMPTS)]
    assert together, "the kernel decoded nothing"
    monkeypatch.setattr(launch, "wanted", lambda *_: False)
    called = len(asked)
    for here, there in zip(found, answers(model), strict=True):
        assert here.token_ids == there.token_ids
        for one, other in zip(here.logprobs, there.logprobs, strict=True):
            assert abs(one.logprob - other.logprob) < 1e-4
    assert len(asked) == called, "torch was to decode"


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if getattr(r, "stowage_event", "") == "paged_attention"]


def _nudged(query, *rest):  # type: ignore[no-untyped-def]
    """Off by a thousandth, for the longest sequence only."""
    found = _attend(query, *rest)
    found[-1, -1, -1] += 1e-3
    return found


def _no_number(query, *rest):  # type: ignore[no-untyped-def]
    found = _attend(query, *rest)
    found[0] = torch.nan
    return found


def _out_of_resources(*_: object) -> torch.Tensor:
    from triton.runtime.errors import OutOfResources

    raise OutOfResources(1 << 20, 1 << 16, "shared memory")


def _not_compiled(*_: object) -> torch.Tensor:
    import ast

    from triton.compiler.errors import CompilationError

    raise CompilationError(
        "def split(\n    keys\n", ast.Name("keys", lineno=2, col_offset=4), "NameError('a name that is not there')"
    )


def _no_compiler(*_: object) -> torch.Tensor:
    raise RuntimeError("Failed to find C compiler.\nPlease specify via CC")


_attend = launch.attend


@pytest.mark.parametrize(
    ("kernel", "why"),
    [
        (_nudged, "ValueError: answers of a trial were off by 1.0e-03"),
        (_no_number, "ValueError: answers of a trial were off by nan"),
        (_out_of_resources, "OutOfResources: out of resource: shared memory"),
        (_no_compiler, "RuntimeError: Failed to find C compiler."),
        (_not_compiled, "CompilationError: NameError('a name that is not there')"),
    ],
)
def test_refused(kernel, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:  # type: ignore[no-untyped-def]
    """One warning, and torch decodes; the pools are as they were."""
    monkeypatch.setattr(launch, "attend", kernel)
    with (
        caplog.at_level(logging.WARNING, "stowage.engine"),
        Engine(tiny_models.build("gpt_oss").eval(), KV, batch_dependent=True) as engine,
    ):
        (warning,) = warnings_of(caplog)
        assert why in warning and "torch gathers" in warning
        assert not any(pool.storage.any() for pool in engine.parts.pools)
        engine.generate(PROMPTS, greedy(2))
    assert len(warnings_of(caplog)) == 1


def test_what_a_trial_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sort of layer once: over the edges of its window, in one piece and in several; the pools are left as they
    were. A kernel that is right is taken.
    """
    noted = []

    def attend(query, keys, values, blocks, bases, positions, kind, window, scores):  # type: ignore[no-untyped-def]
        noted.append((kind.value, window, scores.softcap, sorted(positions.tolist())))
        return _attend(query, keys, values, blocks, bases, positions, kind, window, scores)

    monkeypatch.setattr(launch, "attend", attend)
    with Engine(tiny_models.build("gemma2").eval(), KV, batch_dependent=True) as engine:
        assert engine.parts.runner._paged is attend
        assert not any(pool.storage.any() for pool in engine.parts.pools)
    assert {(kind, window) for kind, window, *_ in noted} == {("sliding", 72), ("full", 0)} and len(noted) == 6
    assert all(softcap for _, _, softcap, _ in noted)
    assert [1000] in [positions for *_, positions in noted], "alone, in several pieces"
    assert any({71, 72, 146, 1000} <= set(positions) for *_, positions in noted)
