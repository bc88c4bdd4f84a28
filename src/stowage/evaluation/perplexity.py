"""Perplexity of a model and of the same model packed: what packing costs, and how much of that is too much."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from stowage.config.memory import Memory
from stowage.engine.engine import Engine
from stowage.engine.sampling_params import SamplingParams
from stowage.errors import ModelError
from stowage.models import hub
from stowage.models.directory import load_tokenizer

_WINDOW_TOKENS: Final = 512
_GROWTH_MOST: Final = 1.05

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Perplexity:
    """Perplexity per token over ``tokens`` scored tokens of ``text``, with the original and the packed weights."""

    text: str
    tokens: int
    before: float
    after: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def refuse_lossy(directory: Path, found: Perplexity) -> None:
    """Raises ModelError where perplexity has grown by more than 5 %."""
    if found.after <= _GROWTH_MOST * found.before:
        return
    raise ModelError(
        f"packed, the perplexity of {found.text} grows from {found.before:.2f} to {found.after:.2f} "
        f"({found.after / found.before - 1:+.1%}), by more than {_GROWTH_MOST - 1:.0%}: {directory} was not written. "
        "Take --weights int8, mixed with more --bits, or keep it with --force."
    )


def refuse_short(model: str, text: str, name: str, tokens_most: int) -> None:
    """Raises ModelError where `measure` would, for too short a text: before all is packed."""
    _scored_ids(load_tokenizer(hub.find(model)), text, name, tokens_most)


def _scored_ids(tokenizer: Any, text: str, name: str, tokens_most: int) -> list[int]:
    ids = list(tokenizer.encode(text))[:tokens_most]
    if len(ids) < 2:
        raise ModelError(f"{name} is too short to be scored: give a longer text as --eval, or --eval-tokens 0.")
    return ids


def measure(
    model: str, memory: Memory, text: str, name: str, tokens_most: int, progress: Progress = lambda _done, _all: None
) -> tuple[float, int]:
    """Perplexity of ``text`` by ``model``, under the budgets of ``memory``, and the number of scored tokens: in windows
    of 512 tokens, each scored from its second token on, at most ``tokens_most`` in all. Raises ModelError without a
    tokenizer or with too short a text, and whatever opening an engine raises.
    """
    engine = Engine(model, memory)
    try:
        if engine.tokenizer is None:
            raise ModelError(f"{model} has no tokenizer, so text cannot be scored.")
        total, scored = score(engine, _scored_ids(engine.tokenizer, text, name, tokens_most), progress)
        return math.exp(total / scored), scored
    finally:
        engine.close()


def score(engine: Engine, ids: Sequence[int], progress: Progress = lambda _done, _all: None) -> tuple[float, int]:
    """Negative log-likelihood of ``ids`` in nats, and how many count: in windows of 512, without the first of each."""
    length = min(_WINDOW_TOKENS, engine.parts.layout.context_tokens - 1)
    windows = [w for at in range(0, len(ids), length) if len(w := ids[at : at + length]) > 1]
    total, scored = 0.0, 0
    params = SamplingParams(max_new_tokens=1, prompt_logprobs=0)
    for number, window in enumerate(windows):
        progress(number, len(windows))
        (answer,) = engine.generate([list(window)], params)
        scores = [one.logprob for one in answer.prompt_logprobs or [] if one is not None]
        total, scored = total - sum(scores), scored + len(scores)
    progress(len(windows), len(windows))
    return total, scored
