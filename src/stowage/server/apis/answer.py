"""What every answer has in common: usage, choices that end, events of a stream.

Owns the shape of OpenAI's answers. Log-probabilities are natural logarithms, never below -9999, which stands for zero
probability, because JSON has no infinity.
"""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Final

from stowage import __version__
from stowage.engine.engine import Completion, Delta
from stowage.engine.sampling import TokenLogprob
from stowage.server.apis.ask import Ask
from stowage.server.refusal import ApiError
from stowage.server.vocabulary import Vocabulary

__all__ = ["Answer", "Event", "OpenAIAnswer", "Scores", "number"]

_LOGPROB_LEAST: Final = -9999.0
Scores = Sequence[TokenLogprob | None]
Event = tuple[str, Mapping[str, Any]]
"""Of a stream: its name, which OpenAI's older APIs leave out (empty), and what it says."""


class Answer(ABC):
    """What one request is answered with. Subclasses say how it looks."""

    done_event = False
    """Whether a stream is closed by `[DONE]`."""

    def __init__(self, ask: Ask, vocabulary: Vocabulary, *, exact: bool = True) -> None:
        self.ask = ask
        self._vocabulary = vocabulary
        self._fingerprint = f"stowage-{__version__}" + ("" if exact else "-batch-dependent")
        self._created = int(time.time())
        self._ended: dict[int, Completion] = {}

    @abstractmethod
    def whole(self, scores: Mapping[int, Scores]) -> dict[str, Any]:
        """The answer when all choices have ended; `scores` are log-probabilities by prompt."""

    def ended(self, choice: int, completion: Completion) -> None:
        self._ended[choice] = completion

    def opening(self) -> list[Event]:
        """Events that come before anything is computed."""
        return []

    @abstractmethod
    def events(self, choice: int, delta: Delta, scores: Scores) -> list[Event]:
        """A piece of a stream; `scores` are for the first of a choice. Empty: there is nothing to say yet."""

    def closing(self) -> list[Event]:
        """Events after all others."""
        return []

    def failure(self, error: ApiError) -> Event:
        """How a stream that has begun is told of an error."""
        return "", error.body

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts, each once, however many choices it has."""
        return sum(len(prompt.tokens) for prompt in self.ask.prompts)

    @property
    def answer_tokens(self) -> int:
        return 0 if self.ask.silent else sum(len(done.token_ids) for done in self._ended.values())

    @property
    def cached_tokens(self) -> int:
        """Of prompts: those that were not computed."""
        firsts = [done for choice, done in self._ended.items() if choice % self.ask.n == 0]
        return sum(sum(done.reused_tokens.values()) for done in firsts)


class OpenAIAnswer(Answer):
    """Of /v1/completions and /v1/chat/completions."""

    prefix, whole_object, piece_object = "", "", ""
    done_event = True

    def __init__(self, ask: Ask, vocabulary: Vocabulary, *, exact: bool = True) -> None:
        super().__init__(ask, vocabulary, exact=exact)
        self._id = f"{self.prefix}-{secrets.token_hex(12)}"

    def whole(self, scores: Mapping[int, Scores]) -> dict[str, Any]:
        choices = [self._choice(i, self._ended[i], scores.get(i // self.ask.n, ())) for i in range(self.ask.choices)]
        return self._frame(self.whole_object, choices) | {"usage": self.usage()}

    def events(self, choice: int, delta: Delta, scores: Scores) -> list[Event]:
        return [("", self._piece([{"index": choice} | found])) for found in self._grown(choice, delta, scores)]

    def closing(self) -> list[Event]:
        if not self.ask.include_usage:
            return []
        return [("", self._frame(self.piece_object, []) | {"usage": self.usage()})]

    def usage(self) -> dict[str, Any]:
        """Tokens of prompts, of answers, and those that were not computed."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.answer_tokens,
            "total_tokens": self.prompt_tokens + self.answer_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    @abstractmethod
    def _choice(self, index: int, completion: Completion, scores: Scores) -> dict[str, Any]:
        """A choice that has ended, in the whole answer."""

    @abstractmethod
    def _grown(self, choice: int, delta: Delta, scores: Scores) -> list[dict[str, Any]]:
        """What a piece of a choice adds to a stream."""

    def _piece(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        frame = self._frame(self.piece_object, choices)
        return frame | {"usage": None} if self.ask.include_usage else frame

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self.ask.model,
            "system_fingerprint": self._fingerprint,
            "choices": choices,
        }

    def _reason(self, completion: Completion | None) -> str | None:
        if completion is None:
            return None
        return "length" if self.ask.silent else completion.finish_reason


def number(logprob: float) -> float:
    """A log-probability as JSON has it."""
    return logprob if logprob > _LOGPROB_LEAST else _LOGPROB_LEAST
