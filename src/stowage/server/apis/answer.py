"""What all answers have in common: usage, ended choices, events of a stream.

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
from stowage.engine.request import Completion, Delta
from stowage.engine.sampling import TokenLogprob
from stowage.server.api_errors import ApiError
from stowage.server.apis.generation_request import GenerationRequest
from stowage.server.vocabulary import Vocabulary

_LOGPROB_LEAST: Final = -9999.0
Scores = Sequence[TokenLogprob | None]
Event = tuple[str, Mapping[str, Any]]
"""A stream's event: its name, empty in OpenAI's older APIs, and its JSON value."""


class Answer(ABC):
    """The answer to one request. Subclasses are the formats of the APIs."""

    done_event = False
    """Whether a stream ends with `[DONE]`."""

    def __init__(self, request: GenerationRequest, vocabulary: Vocabulary, *, exact: bool = True) -> None:
        self.request = request
        self._vocabulary = vocabulary
        self._fingerprint = f"stowage-{__version__}" + ("" if exact else "-batch-dependent")
        self._created = int(time.time())
        self._ended: dict[int, Completion] = {}

    @abstractmethod
    def whole(self, scores: Mapping[int, Scores]) -> dict[str, Any]:
        """The answer in one piece, when all choices have ended; `scores`: log-probabilities by prompt."""

    def ended(self, choice: int, completion: Completion) -> None:
        self._ended[choice] = completion

    def opening(self) -> list[Event]:
        """Events that are sent before anything is computed."""
        return []

    @abstractmethod
    def events(self, choice: int, delta: Delta, scores: Scores) -> list[Event]:
        """The events of one piece, if any; `scores`, of the prompt, come with the first piece of a choice."""

    def closing(self) -> list[Event]:
        """The last events."""
        return []

    def failure(self, error: ApiError) -> Event:
        """The event of an error, for a stream that has begun."""
        return "", error.body

    @property
    def answer_tokens(self) -> int:
        return 0 if self.request.silent else sum(len(done.token_ids) for done in self._ended.values())

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed."""
        firsts = [done for choice, done in self._ended.items() if choice % self.request.n == 0]
        return sum(sum(done.reused_tokens.values()) for done in firsts)


class OpenAIAnswer(Answer):
    """The answers of /v1/completions and /v1/chat/completions."""

    prefix, whole_object, piece_object = "", "", ""
    done_event = True

    def __init__(self, request: GenerationRequest, vocabulary: Vocabulary, *, exact: bool = True) -> None:
        super().__init__(request, vocabulary, exact=exact)
        self._id = f"{self.prefix}-{secrets.token_hex(12)}"

    def whole(self, scores: Mapping[int, Scores]) -> dict[str, Any]:
        choices = [
            self._choice(i, self._ended[i], scores.get(i // self.request.n, ())) for i in range(self.request.choices)
        ]
        return self._frame(self.whole_object, choices) | {"usage": self.usage()}

    def events(self, choice: int, delta: Delta, scores: Scores) -> list[Event]:
        return [("", self._piece([{"index": choice} | found])) for found in self._grown(choice, delta, scores)]

    def closing(self) -> list[Event]:
        if not self.request.include_usage:
            return []
        return [("", self._frame(self.piece_object, []) | {"usage": self.usage()})]

    def usage(self) -> dict[str, Any]:
        """Tokens of prompts and of answers, and prompt tokens that were not computed."""
        return {
            "prompt_tokens": self.request.prompt_tokens,
            "completion_tokens": self.answer_tokens,
            "total_tokens": self.request.prompt_tokens + self.answer_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    @abstractmethod
    def _choice(self, index: int, completion: Completion, scores: Scores) -> dict[str, Any]:
        """An ended choice in an answer that is not streamed."""

    @abstractmethod
    def _grown(self, choice: int, delta: Delta, scores: Scores) -> list[dict[str, Any]]:
        """What one piece adds to the stream of a choice."""

    def _piece(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        frame = self._frame(self.piece_object, choices)
        return frame | {"usage": None} if self.request.include_usage else frame

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self.request.model,
            "system_fingerprint": self._fingerprint,
            "choices": choices,
        }

    def _reason(self, completion: Completion | None) -> str | None:
        if completion is None:
            return None
        return "length" if self.request.silent else completion.finish_reason


def number(logprob: float) -> float:
    """A log-probability as JSON has it."""
    return logprob if logprob > _LOGPROB_LEAST else _LOGPROB_LEAST
