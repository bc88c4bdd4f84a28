"""Structured output: restricts sampling to a JSON schema, a regular expression or a grammar.

Wraps `llguidance`: it needs no torch, has wheels for every Python, checks a schema before anything is computed, and
bounds each step (microseconds; its limits of memory and work are set here). Grammars are compiled on the caller's
thread, never on the engine's. A mask changes what is sampled, never what is cached.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from stowage.engine.endless_schema import endless
from stowage.engine.sampling_params import StructuredOutputs, Thinking
from stowage.errors import RequestError

KEPT: Final = 64
"""Compiled grammars in the cache: similar requests share one."""
SOUND_KEPT: Final = 4096
"""Digests in the cache of schemas that compiled."""
_WHITESPACE: Final = r"[ \n]{0,20}"
"""Between JSON tokens. Bounded: a small model may emit spaces without end."""
_LIMITS: Final = {
    "initial_lexer_fuel": 1_000_000,
    "max_grammar_size": 500_000,
    "max_lexer_states": 100_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
}
_SHOWN_CHARACTERS: Final = 300


class GrammarState:
    """The grammar state of one answer; inactive while the model thinks."""

    def __init__(self, matcher: Any, thinking: Thinking | None) -> None:
        self._matcher = matcher
        self._thinking = thinking
        self._thinks = thinking is not None and thinking.begun
        self._may_think = thinking is not None and not thinking.begun

    def mask(self, logits: Tensor) -> None:
        """Set logits ``[vocab]`` that may not come next to -inf. Raises RequestError: the grammar is too much work."""
        if self._thinks:
            return
        thought = logits[self._thinking.begin].clone() if self._thinking is not None and self._may_think else None
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        forbidden = np.unpackbits(~bits, bitorder="little")[: len(logits)].view(np.bool_)
        if logits.dtype is torch.float32 and logits.device.type == "cpu":  # torch would wake all threads for one row
            np.copyto(logits.numpy()[: len(forbidden)], -np.inf, where=forbidden)
        else:
            logits[: len(forbidden)].masked_fill_(torch.from_numpy(forbidden).to(logits.device), -torch.inf)
        logits[len(forbidden) :] = -torch.inf
        if self._thinking is not None and thought is not None:
            logits[self._thinking.begin] = thought

    def allows(self, token: int) -> bool:
        """Whether ``mask`` would allow ``token``, hundreds of times faster. Raises RequestError as ``mask``."""
        if self._is_thought(token):
            return True
        allowed = bool(self._matcher.validate_tokens([token]))
        self._check()
        return allowed

    def accept(self, token: int) -> None:
        """Advance by the sampled ``token``. Raises RequestError as ``mask``."""
        thinking = self._thinking
        if self._is_thought(token):
            self._thinks, self._may_think = thinking is not None and token != thinking.end, False
            return
        self._may_think = False
        self._matcher.consume_token(token)
        self._check()

    def try_accept(self, token: int) -> bool:
        """``accept`` if ``allows``; returns whether it did. Raises RequestError as ``mask``."""
        allowed = self.allows(token)
        if allowed:
            self.accept(token)
        return allowed

    @property
    def finished(self) -> bool:
        """Whether no further token is allowed."""
        return not self._thinks and bool(self._matcher.is_stopped())

    def _is_thought(self, token: int) -> bool:
        return self._thinks or (self._may_think and self._thinking is not None and token == self._thinking.begin)

    def _check(self) -> None:
        if self._matcher.is_error():
            what = _reason(self._matcher.get_error())
            raise RequestError(f"this structured output cannot go on ({what}): give a simpler schema or grammar.")


class Grammars:
    """Compiles and caches one engine's grammars. ``vocab``: size of its logits; ``eos``: end tokens. Thread-safe."""

    def __init__(self, tokenizer: Any, vocab: int, eos: frozenset[int]) -> None:
        self._tokenizer, self._vocab, self._eos = tokenizer, vocab, eos
        self._lock = threading.Lock()
        self._ours: Any = None
        self._sound: set[bytes] = set()
        self._compiled = lru_cache(KEPT)(self._compile)

    def begin(self, wanted: StructuredOutputs) -> GrammarState:
        """The beginning of an answer that is as ``wanted``.

        Raises RequestError for what cannot be compiled, with the reason and its position, and where `llguidance` is not
        installed.
        """
        with self._lock:
            return GrammarState(self._compiled(wanted).deep_copy(), wanted.thinking)

    def check(self, schema: str) -> None:
        """Whether a JSON schema can be used as a part of a larger grammar. Raises RequestError as ``begin``."""
        digest = blake2b(schema.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        with self._lock:
            if digest not in self._sound:
                self._compile(StructuredOutputs(json=schema))
                if len(self._sound) >= SOUND_KEPT:
                    self._sound.clear()
                self._sound.add(digest)

    def literal(self, text: str) -> str:
        """``text`` as a grammar in Lark's notation, this tokenizer's special tokens by id. Raises RequestError."""
        with self._lock:
            self._library()
            added = self._tokenizer.backend_tokenizer.get_added_tokens_decoder()
        special = {token.content: at for at, token in added.items() if self._ours.is_special_token(at)}
        if not special:
            return json.dumps(text, ensure_ascii=False)
        pieces = re.split("(" + "|".join(map(re.escape, sorted(special, key=len, reverse=True))) + ")", text)
        return " ".join(
            f"<[{special[piece]}]>" if piece in special else json.dumps(piece, ensure_ascii=False)
            for piece in pieces
            if piece
        )

    def _compile(self, wanted: StructuredOutputs) -> Any:
        matcher_of, limits = self._library()
        try:
            grammar = _GRAMMARS[wanted.kind](matcher_of, wanted.text)
            if error := matcher_of.validate_grammar(grammar, self._ours, limits=limits):
                raise ValueError(error)
            compiled = matcher_of(self._ours, grammar, limits=limits)
            trial = compiled.deep_copy()
            trial.compute_bitmask()  # some that never end are found out only here
            if trial.is_error():
                raise ValueError(trial.get_error())
            return compiled
        except (ValueError, TypeError, RecursionError) as error:
            what = _reason(error)
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


def _reason(error: object) -> str:
    """What `llguidance` says, without the state that it shows."""
    return " ".join(str(error).partition("<state>")[0].split())[:_SHOWN_CHARACTERS]


def _choices(matcher_of: Any, text: str) -> Any:
    listed = "|".join(re.escape(choice) for choice in json.loads(text))
    return matcher_of.grammar_from_regex(f"({listed})")


def _of_schema(matcher_of: Any, text: str) -> Any:
    try:
        reference = endless(json.loads(text))
    except ValueError:
        reference = ""  # no JSON: what compiles it says so
    if reference:
        raise ValueError(f"no JSON that ends is of this schema: {reference!r} leads in circles")
    return matcher_of.grammar_from_json_schema(text, defaults={"whitespace_pattern": _WHITESPACE})


_GRAMMARS: Final[dict[str, Callable[[Any, str], Any]]] = {
    "json": _of_schema,
    "json_object": lambda matcher_of, _: _of_schema(matcher_of, '{"type": "object"}'),
    "regex": lambda matcher_of, text: matcher_of.grammar_from_regex(text),
    "choice": _choices,
    "grammar": lambda matcher_of, text: matcher_of.grammar_from_lark(text),
}
