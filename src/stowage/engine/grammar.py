"""Structured output: which tokens may come next, so that an answer is of a JSON schema, a pattern or a grammar.

Owns the border to `llguidance`, which does the work: it needs no torch, has wheels for every Python, checks a schema
before anything is computed, and bounds each step (microseconds; its limits of memory and work are fixed here). What is
asked for is compiled on the caller's thread, never on the engine's; a mask changes what is drawn, nothing that is kept.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from stowage.engine.sampling_params import StructuredOutputs
from stowage.errors import RequestError

__all__ = ["GrammarState", "Grammars"]

KEPT: Final = 64
"""Compiled grammars that are remembered: requests of one kind have the same."""
_WHITESPACE: Final = r"[ \n]{0,20}"
"""Between the tokens of JSON: a small model that may write any number of spaces does."""
_LIMITS: Final = {
    "initial_lexer_fuel": 1_000_000,
    "max_grammar_size": 500_000,
    "max_lexer_states": 100_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
}
_SHOWN_CHARACTERS: Final = 300


class GrammarState:
    """Where one answer stands in its grammar."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def mask(self, logits: Tensor) -> None:
        """Set the logits ``[vocab]`` of tokens that may not come next to minus infinity. Raises RequestError when the
        grammar is too much work.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        allowed = np.unpackbits(bits, bitorder="little")[: len(logits)].astype(np.bool_)
        logits[: len(allowed)].masked_fill_(torch.from_numpy(~allowed), -torch.inf)
        logits[len(allowed) :] = -torch.inf

    def drawn(self, token: int) -> None:
        """``token`` was drawn. Raises RequestError as ``mask``."""
        self._matcher.consume_token(token)
        self._check()

    @property
    def is_over(self) -> bool:
        """Whether nothing may follow."""
        return bool(self._matcher.is_stopped())

    def _check(self) -> None:
        if self._matcher.is_error():
            what = str(self._matcher.get_error())[:_SHOWN_CHARACTERS]
            raise RequestError(f"this structured output cannot go on ({what}): give a simpler schema or grammar.")


class Grammars:
    """Of one engine. ``vocab``: rows of its logits; ``eos``: tokens that end an answer. Any thread."""

    def __init__(self, tokenizer: Any, vocab: int, eos: frozenset[int]) -> None:
        self._tokenizer, self._vocab, self._eos = tokenizer, vocab, eos
        self._lock = threading.Lock()
        self._ours: Any = None
        self._compiled = lru_cache(KEPT)(self._compile)

    def begin(self, wanted: StructuredOutputs) -> GrammarState:
        """The beginning of an answer that is as ``wanted``.

        Raises RequestError for what cannot be compiled, with the reason and its position, and where `llguidance` is not
        installed.
        """
        with self._lock:
            return GrammarState(self._compiled(wanted).deep_copy())

    def _compile(self, wanted: StructuredOutputs) -> Any:
        matcher_of, limits = self._library()
        try:
            grammar = _GRAMMARS[wanted.kind](matcher_of, wanted.text)
            if error := matcher_of.validate_grammar(grammar, self._ours, limits=limits):
                raise ValueError(error)
            return matcher_of(self._ours, grammar, limits=limits)
        except (ValueError, TypeError, RecursionError) as error:
            what = " ".join(str(error).split())[:_SHOWN_CHARACTERS]
            raise RequestError(f"structured_outputs.{wanted.kind} cannot be used: {what}.") from error

    def _library(self) -> tuple[Any, Any]:
        """What compiles, and its limits; `llguidance` reads the tokenizer at first use (0.3 s)."""
        try:
            import llguidance.hf
        except ImportError as error:
            raise RequestError(
                "structured output needs llguidance, which is not installed: pip install 'stowage[grammar]'."
            ) from error
        if self._ours is None:
            if getattr(self._tokenizer, "backend_tokenizer", None) is None:
                raise RequestError(
                    "structured output needs a tokenizer of the tokenizers library; this model has none."
                )
            self._ours = llguidance.hf.from_tokenizer(
                self._tokenizer, n_vocab=max(self._vocab, len(self._tokenizer)), eos_token=sorted(self._eos) or None
            )
        return llguidance.LLMatcher, llguidance.LLParserLimits(**_LIMITS)


def _choices(matcher_of: Any, text: str) -> Any:
    listed = "|".join(re.escape(choice) for choice in json.loads(text))
    return matcher_of.grammar_from_regex(f"({listed})")


def _of_schema(matcher_of: Any, text: str) -> Any:
    return matcher_of.grammar_from_json_schema(text, defaults={"whitespace_pattern": _WHITESPACE})


_GRAMMARS: Final[dict[str, Callable[[Any, str], Any]]] = {
    "json": _of_schema,
    "json_object": lambda matcher_of, _: _of_schema(matcher_of, '{"type": "object"}'),
    "regex": lambda matcher_of, text: matcher_of.grammar_from_regex(text),
    "choice": _choices,
    "grammar": lambda matcher_of, text: matcher_of.grammar_from_lark(text),
}
