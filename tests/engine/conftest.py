"""Plain Transformers as the reference that every engine answer is held against."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from stowage.cache import cost_model
from stowage.config.memory import Memory
from stowage.engine.engine import Engine
from stowage.engine.sampling_params import SamplingParams
from stowage.executor import kernels
from stowage.executor.batch import ForwardStep, current
from stowage.executor.block_pool import bytes_needed

LOGPROB_BOUND = 4e-4
"""float32 sums in another order: the largest difference of a log-probability that is not an error. Of tiny models the
one of Qwen3-Next amplifies rounding most: against float64 plain Transformers is off by up to 1.5e-4, we by 1.3e-4.
"""

INSTRUCTIONS = ["base", "avx2", "avx512", "avx512_bf16", "amx_bf16"]
"""Sets of them that kernels are compiled for."""


def each_instruction_set() -> Iterator[str]:
    """In use, one after the other: those that this processor has."""
    try:
        for name in INSTRUCTIONS:
            with contextlib.suppress(ValueError):
                kernels._kernel.use_instructions(name)
                yield name
    finally:
        kernels._kernel.use_instructions(None)


@pytest.fixture(params=INSTRUCTIONS)
def instructions(request):
    """Every instruction set that this processor has."""
    try:
        kernels._kernel.use_instructions(request.param)
    except ValueError as error:
        pytest.skip(str(error))
    yield request.param
    kernels._kernel.use_instructions(None)


class Answer:
    """What plain Transformers answers to a prompt, greedily. Made when it is asked for: to judge a completion takes one
    forward, to write an answer as many as it has tokens.
    """

    def __init__(self, model: Any, prompt: list[int], new_tokens: int) -> None:
        self._model, self._prompt, self._new_tokens = model, prompt, new_tokens
        self._judged: dict[tuple[int, ...], list[float]] = {}

    @functools.cached_property
    def tokens(self) -> list[int]:
        """Of ``generate()``."""
        ids = torch.tensor([self._prompt])
        options = {
            "attention_mask": torch.ones_like(ids),  # generate() would take a pad token in a prompt for padding
            "max_new_tokens": self._new_tokens,
            "do_sample": False,
            "eos_token_id": None,
            "pad_token_id": 0,
        }
        with torch.inference_mode():
            out = self._model.generate(ids, **options)
        return out[0, len(self._prompt) :].tolist()

    def judge(self, tokens: list[int]) -> list[float]:
        """Asserts that each of ``tokens`` is the likeliest after all before it, so that ``generate()`` would have drawn
        them. Their log-probabilities.
        """
        assert len(tokens) == self._new_tokens
        if tuple(tokens) not in self._judged:
            ids = torch.tensor([self._prompt + tokens[:-1]])
            with torch.inference_mode():
                out = self._model(ids, attention_mask=torch.ones_like(ids), use_cache=False)
            found = out.logits[0, -len(tokens) :].float().log_softmax(-1)
            if tokens != found.argmax(-1).tolist():  # of two that are as likely, generate() may draw the other one
                assert tokens == self.tokens
            self._judged[tuple(tokens)] = found.gather(-1, torch.tensor(tokens)[:, None])[:, 0].tolist()
        return self._judged[tuple(tokens)]


class Reference:
    """Plain Transformers of one family."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self._known: dict[tuple[tuple[int, ...], int], Answer] = {}

    def answer(self, prompt: list[int], new_tokens: int) -> Answer:
        key = (tuple(prompt), new_tokens)
        if key not in self._known:
            self._known[key] = Answer(self.model, list(prompt), new_tokens)
        return self._known[key]


def be_patient(monkeypatch: pytest.MonkeyPatch, least_s: float = 30.0) -> None:
    """Engines load whatever a tier has, and wait at least so long for it."""
    monkeypatch.setattr(cost_model, "_DEADLINE_LEAST_S", least_s)
    monkeypatch.setattr(cost_model.CostModel, "worth_loading", lambda *_: True)
    monkeypatch.setattr(cost_model.CostModel, "worth_overlapping", lambda *_: False)


def assert_nothing_is_pinned(engine: Engine) -> None:
    """In host memory, once what is being spilled has come to its tier: until then it is."""
    assert engine.flush()
    assert engine.store.stats()["chunks_pinned"] == 0  # type: ignore[union-attr]


@pytest.fixture(scope="session")
def references(checkpoints: Callable[..., Path]) -> Callable[..., Reference]:
    known: dict[tuple[str, int], Reference] = {}

    def reference(family: str, context_tokens: int = 4096) -> Reference:
        key = (family, context_tokens)
        if key not in known:
            known[key] = Reference(checkpoints(*key))
        return known[key]

    return reference


@pytest.fixture(autouse=True)
def _patience(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a tier has is loaded, however slow the machine is at the moment: a tiny model computes its prompt in
    milliseconds, and an engine that is right to load nothing slower would make any hit a matter of luck.
    """
    if request.node.get_closest_marker("hurried") is None:
        be_patient(monkeypatch)


@pytest.fixture
def engines(checkpoints: Callable[..., Path]) -> Iterator[Callable[..., Engine]]:
    """Engines on tiny checkpoints, closed at the test's end after checking their invariants."""
    opened: list[Engine] = []

    def engine(family: str, context_tokens: int = 4096, **memory: object) -> Engine:
        made = Engine(checkpoints(family, context_tokens), Memory(**({"kv_cache_memory": "8MiB"} | memory)))  # type: ignore[arg-type]
        opened.append(made)
        return made

    yield engine
    check_and_close(opened)


def check_and_close(opened: list[Engine]) -> None:
    """The end of a test: those that are still open keep their invariants."""
    for made in opened:
        if not made._loop.closing:
            made.check()
            made.close()


def random_prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, 512, (length,), generator=generator).tolist()


def greedy(new_tokens: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=new_tokens, ignore_eos=True, logprobs=1)


def assert_same(completion: object, answer: Answer) -> None:
    """The completion's tokens are the reference's, and so are its log-probabilities within the bound."""
    expected = answer.judge(completion.token_ids)  # type: ignore[attr-defined]
    found = [report.logprob for report in completion.logprobs]  # type: ignore[attr-defined]
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < LOGPROB_BOUND


def leave_only_disk(engine: Engine) -> None:
    """Nothing is left on the device and in host memory; all of it is in the tiers below."""
    assert engine.flush()
    engine.drop_device_cache()
    engine.drop_host()


def assert_well(engine, references, family, prompt):
    """It answers, and right, and nothing is held that nobody has."""
    (completion,) = engine.generate([prompt], greedy(8))
    assert_same(completion, references(family).answer(prompt, 8))
    engine.check()
    assert all(pool["used"] == 0 for pool in engine.stats()["pools"])
    return completion.reused_tokens


def small_pool(engines, family, **memory):
    """An engine whose device holds about one and a half sequences of 160 tokens."""
    layouts = engines(family, context_tokens=160).parts.layout.blocks
    need = bytes_needed(layouts, 160, 64)
    return engines(family, context_tokens=160, kv_cache_memory=int(need * 1.7), max_num_batched_tokens=64, **memory)


@pytest.fixture
def forward() -> Iterator[ForwardStep]:
    """As in an engine's forward with kernels."""
    nothing = torch.zeros(0, dtype=torch.long)
    step = ForwardStep(nothing, nothing, nothing, 0, kernels=True)
    token = current.set(step)
    yield step
    current.reset(token)
