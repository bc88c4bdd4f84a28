"""From logits to tokens: greedy or sampled, reproducible by seed.

Owns the sampling parameters and one random generator per sequence, so that what a sequence draws never depends on its
neighbours, on preemption or on how its prefix arrived. Filters apply in the order temperature, top-k, top-p (Holtzman
et al., arXiv:1904.09751), min-p (Nguyen et al., arXiv:2407.01082), which is the order of Transformers' own logits
processors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from stowage.config.arguments import items_of
from stowage.errors import ModelError, RequestError

LOGPROBS_MAX = 50
STOPS_MAX = 64
STOP_CHARACTERS_MAX = 1024
STOP_TOKENS_MAX = 1024
_SHOWN_CHARACTERS = 40


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a completion is drawn and when it ends.

    ``temperature`` 0 is greedy. ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 switch a filter off. ``seed`` ``None`` draws
    anew each time. ``logprobs`` n > 0 reports the chosen token's log-probability and the n likeliest of the unfiltered
    distribution. ``prompt_logprobs`` n (0 too) reports the same of every prompt token but the first, from position
    ``prompt_logprobs_from`` on: from there the prompt is computed, and only what lies before it may come from a cache.
    A ``stop`` string (at most 64, of at most 1,024 characters) ends the text before it; a token of ``stop_token_ids``
    (and, unless ``ignore_eos``, the model's own end of sequence) ends it after it.

    Raises ``RequestError`` for a value of the wrong type or out of range, with the field's name.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int = 0
    prompt_logprobs: int | None = None
    prompt_logprobs_from: int = 0

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "top_k", "logprobs", "prompt_logprobs_from"):
            object.__setattr__(self, name, _whole(name, getattr(self, name)))
        for name in ("seed", "prompt_logprobs"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _whole(name, getattr(self, name)))
        for name in ("temperature", "top_p", "min_p"):
            object.__setattr__(self, name, _number(name, getattr(self, name)))
        object.__setattr__(self, "stop", _listed("stop", self.stop, str, "non-empty strings"))
        object.__setattr__(self, "stop_token_ids", _listed("stop_token_ids", self.stop_token_ids, int, "token ids"))
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos must be true or false, not {_shown(self.ignore_eos)}.")
        problems = {
            f"max_new_tokens must be at least 1, not {self.max_new_tokens}": self.max_new_tokens < 1,
            f"temperature must be a finite number from 0, not {self.temperature}": not 0 <= self.temperature < math.inf,
            f"top_k must be 0 (off) or more, not {self.top_k}": self.top_k < 0,
            f"top_p must be above 0 and at most 1, not {self.top_p}": not 0 < self.top_p <= 1,
            f"min_p must be from 0 to below 1, not {self.min_p}": not 0 <= self.min_p < 1,
            f"logprobs must be from 0 to {LOGPROBS_MAX}, not {self.logprobs}": not 0 <= self.logprobs <= LOGPROBS_MAX,
            f"prompt_logprobs must be None (off) or from 0 to {LOGPROBS_MAX}, not {self.prompt_logprobs}": (
                self.prompt_logprobs is not None and not 0 <= self.prompt_logprobs <= LOGPROBS_MAX
            ),
            f"prompt_logprobs_from must be 0 or more, not {self.prompt_logprobs_from}": self.prompt_logprobs_from < 0,
            "stop must be a sequence of non-empty strings": "" in self.stop,
            f"stop must be at most {STOPS_MAX} strings of at most {STOP_CHARACTERS_MAX} characters": (
                len(self.stop) > STOPS_MAX or any(len(text) > STOP_CHARACTERS_MAX for text in self.stop)
            ),
            f"stop_token_ids must be at most {STOP_TOKENS_MAX}": len(self.stop_token_ids) > STOP_TOKENS_MAX,
            f"seed must be from 0 to 2**63 - 1, not {self.seed}": self.seed is not None and not 0 <= self.seed < 2**63,
        }
        for problem, true in problems.items():
            if true:
                raise RequestError(f"{problem}.")


def _whole(name: str, value: Any) -> int:
    """``value`` as an int of at most 64 bits. Raises RequestError."""
    if not isinstance(value, bool) and isinstance(value, Integral):
        whole = int(value)
        if -(1 << 63) <= whole < 1 << 63:
            return whole
    raise RequestError(f"{name} must be a whole number, not {_shown(value)}.")


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise RequestError(f"{name} must be a number, not {_shown(value)}.")
    try:
        return float(value)
    except OverflowError as error:
        raise RequestError(f"{name} must be a finite number, not {_shown(value)}.") from error


def _listed(name: str, values: Any, kind: type, wanted: str) -> tuple[Any, ...]:
    """``values`` as a tuple. Raises RequestError."""
    items = items_of(values)
    if items is None:
        raise RequestError(f"{name} must be a sequence of {wanted}, not {_shown(values)}.")
    wrong = [
        item for item in items if isinstance(item, bool) or not isinstance(item, Integral if kind is int else kind)
    ]
    if wrong:
        raise RequestError(f"{name} must be a sequence of {wanted}; it holds {_shown(wrong[0])}.")
    return items if kind is str else tuple(int(item) for item in items)


def _shown(value: Any) -> str:
    """What a message says of a value that may be anything."""
    if isinstance(value, int) and not -(1 << 64) < value < 1 << 64:
        return "a very large number"
    text = repr(value) if isinstance(value, int | float | str | bytes | None) else f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability (natural logarithm) of a chosen token, and the likeliest ``(token_id, logprob)`` at its place."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def logprobs_of(logits: Tensor, tokens: list[int], top: int) -> list[TokenLogprob]:
    """The log-probability of one token for each row of ``logits`` ``[rows, vocab]``, with the ``top`` likeliest."""
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(-1, torch.tensor(tokens)[:, None])[:, 0].tolist()
    values, ids = logprobs.topk(min(top, logprobs.shape[-1]))
    likeliest = [tuple(zip(*row, strict=True)) for row in zip(ids.tolist(), values.tolist(), strict=True)]
    return [TokenLogprob(*report) for report in zip(tokens, chosen, likeliest, strict=True)]


def check_logits(logits: Tensor) -> None:
    """Raises ModelError for a row of ``logits`` ``[rows, vocab]`` that says nothing: with a NaN, with plus infinity, or
    with minus infinity everywhere. Minus infinity at some tokens says that those are never drawn.
    """
    if not bool(logits.amax(-1).isfinite().all()):
        raise ModelError(
            "the model computed logits that are not numbers (NaN or infinite) for this request, so no token can be "
            "drawn; nothing of this step is kept. Try another dtype (float32), and check the checkpoint's weights."
        )


class Sampler:
    """Draws the tokens of one sequence."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self._generator = torch.Generator()
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed)

    def draw(self, logits: Tensor) -> tuple[int, TokenLogprob | None]:
        """The next token from ``logits`` ``[vocab]``, float32, with its log-probability when asked for."""
        if self.params.temperature == 0:
            token = int(logits.argmax())
        else:
            token = int(torch.multinomial(self._filtered(logits), 1, generator=self._generator))
        if not self.params.logprobs:
            return token, None
        return token, logprobs_of(logits[None], [token], self.params.logprobs)[0]

    def _filtered(self, logits: Tensor) -> Tensor:
        """Probabilities ``[vocab]`` after temperature and filters."""
        params = self.params
        # The likeliest is 0 whatever the temperature, and others at worst minus infinity: no overflow, no NaN.
        scaled = ((logits.double() - logits.max()) / params.temperature).float()
        if 0 < params.top_k < scaled.numel():
            least = scaled.topk(params.top_k).values[-1]
            scaled = scaled.masked_fill(scaled < least, -math.inf)
        if params.top_p < 1:
            ordered, order = scaled.softmax(-1).sort(descending=True)
            beyond = ordered.cumsum(-1) - ordered >= params.top_p
            beyond[0] = False  # where top_p is less than a float32 can say
            scaled = scaled.index_fill(0, order[beyond], -math.inf)
        probabilities = scaled.softmax(-1)
        if params.min_p > 0:
            probabilities = probabilities.masked_fill(probabilities < params.min_p * probabilities.max(), 0.0)
        return probabilities
