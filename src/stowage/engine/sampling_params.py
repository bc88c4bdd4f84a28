"""How a completion is sampled and when it ends: the parameters, with their types and ranges.

Owns nothing but the checks. What they mean is in ``sampling`` (drawing), ``logits_processors`` and ``completion``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from stowage.config.arguments import items_of
from stowage.config.wording import shown_value
from stowage.errors import RequestError

LOGPROBS_MAX = 50
STOPS_MAX = 64
STOP_CHARACTERS_MAX = 1024
STOP_TOKENS_MAX = 1024
LOGIT_BIAS_MAX = 1024
"""Tokens with a bias of their own."""
STRUCTURES = ("json", "regex", "choice", "grammar", "json_object")
"""What an answer can be asked to be."""
STRUCTURE_CHARACTERS_MAX = 1 << 18
"""Of a schema or grammar."""


@dataclass(frozen=True, slots=True)
class Thinking:
    """Tokens around what a model thinks first. ``begun``: the prompt ends with ``begin``; else answers may begin so."""

    begin: int
    end: int
    begun: bool


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """What an answer must be; one of these, under vLLM's names. ``json``: of this JSON schema, an object or its text;
    ``regex``: of this pattern; ``choice``: one of these texts; ``grammar``: of this grammar in Lark's notation;
    ``json_object``: any JSON object. ``thinking``: what may come before, and is free.

    Raises ``RequestError`` for none or several of them, and for one of the wrong type; whether it can be compiled is
    found when a request has it.
    """

    json: str | Mapping[str, Any] | None = field(default=None, compare=False)
    regex: str | None = field(default=None, compare=False)
    choice: tuple[str, ...] | None = field(default=None, compare=False)
    grammar: str | None = field(default=None, compare=False)
    json_object: bool = field(default=False, compare=False)
    thinking: Thinking | None = field(default=None, compare=False)
    kind: str = field(init=False)
    text: str = field(init=False)
    """What is given for ``kind``, as text: by both it is compared and remembered."""

    def __post_init__(self) -> None:
        given = [name for name in STRUCTURES if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise RequestError(f"structured_outputs must have one of {', '.join(STRUCTURES)}; it has {len(given)}.")
        text = _structure(given[0], getattr(self, given[0]))
        if len(text) > STRUCTURE_CHARACTERS_MAX:
            most = f"at most {STRUCTURE_CHARACTERS_MAX} characters"
            raise RequestError(f"structured_outputs.{given[0]} may have {most}; it has {len(text)}.")
        object.__setattr__(self, "kind", given[0])
        object.__setattr__(self, "text", text)


def _structure(name: str, value: Any) -> str:
    """A structure as text. Raises RequestError."""
    if name == "json_object":
        if value is not True:
            raise RequestError(f"structured_outputs.json_object must be true or false, not {shown_value(value)}.")
        return ""
    if name == "choice":
        choices = _listed("structured_outputs.choice", value, str, "texts")
        if not choices or "" in choices:
            raise RequestError("structured_outputs.choice must be texts, none of them empty.")
        return json.dumps(choices)
    if name == "json" and isinstance(value, Mapping):
        try:
            return json.dumps(dict(value), allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"structured_outputs.json is no JSON schema: {error}.") from error
    if not isinstance(value, str):
        raise RequestError(f"structured_outputs.{name} must be text, not {shown_value(value)}.")
    return value


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a completion is sampled and when it ends.

    ``temperature`` 0 is greedy. ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 switch a filter off. ``seed`` ``None`` draws
    anew each time. ``logprobs`` n > 0 reports the chosen token's log-probability and the n likeliest of the unfiltered
    distribution. ``prompt_logprobs`` n (0 too) reports the same of every prompt token but the first, from position
    ``prompt_logprobs_from`` on: from there the prompt is computed, and only what lies before it may come from a cache.
    A ``stop`` string (at most 64, of at most 1,024 characters) ends the text before it; a token of ``stop_token_ids``
    (and, unless ``ignore_eos``, the model's own end of sequence) ends it after it; but nothing does before
    ``min_tokens`` tokens.

    ``logit_bias`` is added to the logits of single tokens (-100 to 100). What the answer has already gets less likely
    by ``presence_penalty`` (once) and ``frequency_penalty`` (each time; both -2 to 2, 0 off, as OpenAI defines them);
    what prompt or answer have, by ``repetition_penalty`` (0.01 to 10, 1 off; Keskar et al., arXiv:1909.05858).
    Only tokens that ``structured_outputs`` allows are sampled. Log-probabilities are those of the model, before all of
    this. ``skip_special_tokens`` false: special tokens are part of the text, but for the one that ends it; else only
    ``kept_special_tokens`` are.

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
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    structured_outputs: StructuredOutputs | None = None
    skip_special_tokens: bool = True
    kept_special_tokens: tuple[int, ...] = ()

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """``logit_bias`` as pairs."""
        found: Any = self.logit_bias
        return tuple(found)

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "top_k", "logprobs", "prompt_logprobs_from", "min_tokens"):
            object.__setattr__(self, name, _whole(name, getattr(self, name)))
        for name in ("seed", "prompt_logprobs"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _whole(name, getattr(self, name)))
        for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
            object.__setattr__(self, name, _number(name, getattr(self, name)))
        object.__setattr__(self, "stop", _listed("stop", self.stop, str, "non-empty strings"))
        for name in ("stop_token_ids", "kept_special_tokens"):
            object.__setattr__(self, name, _listed(name, getattr(self, name), int, "token ids"))
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        if not isinstance(self.structured_outputs, StructuredOutputs | None):
            raise RequestError(
                f"structured_outputs must be StructuredOutputs or None, not {shown_value(self.structured_outputs)}."
            )
        for name in ("ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false, not {shown_value(getattr(self, name))}.")
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
            f"min_tokens must be from 0 to max_new_tokens ({self.max_new_tokens}), not {self.min_tokens}": (
                not 0 <= self.min_tokens <= self.max_new_tokens
            ),
            f"presence_penalty must be from -2 to 2, not {self.presence_penalty}": not -2 <= self.presence_penalty <= 2,
            f"frequency_penalty must be from -2 to 2, not {self.frequency_penalty}": (
                not -2 <= self.frequency_penalty <= 2
            ),
            f"repetition_penalty must be from 0.01 to 10, not {self.repetition_penalty}": (
                not 0.01 <= self.repetition_penalty <= 10
            ),
            f"logit_bias must be at most {LOGIT_BIAS_MAX} tokens": len(self.logit_bias) > LOGIT_BIAS_MAX,
            "logit_bias must be numbers from -100 to 100 for tokens from 0 on": any(
                token < 0 or not -100 <= value <= 100 for token, value in self.biases
            ),
            f"seed must be from 0 to 2**63 - 1, not {self.seed}": self.seed is not None and not 0 <= self.seed < 2**63,
        }
        for problem, true in problems.items():
            if true:
                raise RequestError(f"{problem}.")


def _biases(values: Any) -> tuple[tuple[int, float], ...]:
    """Pairs of a token and what is added to its logit. Raises RequestError."""
    items = items_of(values.items() if isinstance(values, Mapping) else values)
    if items is None or not all(isinstance(item, tuple | list) and len(item) == 2 for item in items):
        raise RequestError(f"logit_bias must be numbers by token, not {shown_value(values)}.")
    return tuple((_whole("a token of logit_bias", token), _number("logit_bias", value)) for token, value in items)


def _whole(name: str, value: Any) -> int:
    """``value`` as an int of at most 64 bits. Raises RequestError."""
    if not isinstance(value, bool) and isinstance(value, Integral):
        whole = int(value)
        if -(1 << 63) <= whole < 1 << 63:
            return whole
    raise RequestError(f"{name} must be a whole number, not {shown_value(value)}.")


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise RequestError(f"{name} must be a number, not {shown_value(value)}.")
    try:
        return float(value)
    except OverflowError as error:
        raise RequestError(f"{name} must be a finite number, not {shown_value(value)}.") from error


def _listed(name: str, values: Any, kind: type, wanted: str) -> tuple[Any, ...]:
    """``values`` as a tuple. Raises RequestError."""
    items = items_of(values)
    if items is None:
        raise RequestError(f"{name} must be a sequence of {wanted}, not {shown_value(values)}.")
    wrong = [
        item for item in items if isinstance(item, bool) or not isinstance(item, Integral if kind is int else kind)
    ]
    if wrong:
        raise RequestError(f"{name} must be a sequence of {wanted}; it holds {shown_value(wrong[0])}.")
    return items if kind is str else tuple(int(item) for item in items)
