"""Answers as OpenAI clients read them: whole ones, and pieces of one while it grows.

Owns the shapes of both APIs. Log-probabilities are natural logarithms, never below -9999, which stands for zero
probability, because JSON has no infinity. `text_offset` counts characters from the start of the answer's text.
"""

from __future__ import annotations

import codecs
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from stowage import __version__
from stowage.engine.engine import Completion, Delta
from stowage.engine.sampling import TokenLogprob
from stowage.server.openai import Ask
from stowage.server.vocabulary import Vocabulary

_LOGPROB_LEAST: Final = -9999.0
Scores = Sequence[TokenLogprob | None]


class Answer:
    """What one request is answered with. Subclasses say how a choice looks."""

    prefix, whole_object, piece_object = "", "", ""

    def __init__(self, ask: Ask, vocabulary: Vocabulary, *, exact: bool = True) -> None:
        self.ask = ask
        self._vocabulary = vocabulary
        self._fingerprint = f"stowage-{__version__}" + ("" if exact else "-batch-dependent")
        self._id = f"{self.prefix}-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._ended: dict[int, Completion] = {}

    def whole(self, scores: Mapping[int, Scores]) -> dict[str, Any]:
        """The answer when all choices have ended; `scores` are log-probabilities by prompt."""
        choices = [self._choice(i, self._ended[i], scores.get(i // self.ask.n, ())) for i in range(self.ask.choices)]
        return self._frame(self.whole_object, choices) | {"usage": self.usage()}

    def ended(self, choice: int, completion: Completion) -> None:
        self._ended[choice] = completion

    def opening(self) -> list[dict[str, Any]]:
        """Pieces that come before anything is computed."""
        return []

    def piece(self, choice: int, delta: Delta, scores: Scores) -> dict[str, Any] | None:
        """One piece of a stream; `scores` are for the first of a choice. None: there is nothing to say yet."""
        found = self._grown(choice, delta, scores)
        return None if found is None else self._piece([{"index": choice} | found])

    def last(self) -> dict[str, Any]:
        """The piece with the usage, after all others."""
        return self._frame(self.piece_object, []) | {"usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        """Tokens of prompts (each once, however many choices it has), of answers, and those that were not computed."""
        ask = self.ask
        prompts = sum(len(prompt.tokens) for prompt in ask.prompts)
        answers = 0 if ask.silent else sum(len(done.token_ids) for done in self._ended.values())
        firsts = [done for choice, done in self._ended.items() if choice % ask.n == 0]
        cached = sum(sum(done.reused_tokens.values()) for done in firsts)
        return {
            "prompt_tokens": prompts,
            "completion_tokens": answers,
            "total_tokens": prompts + answers,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _choice(self, index: int, completion: Completion, scores: Scores) -> dict[str, Any]:
        raise NotImplementedError

    def _grown(self, choice: int, delta: Delta, scores: Scores) -> dict[str, Any] | None:
        raise NotImplementedError

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


class ChatAnswer(Answer):
    """Of /v1/chat/completions."""

    prefix, whole_object, piece_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self) -> list[dict[str, Any]]:
        start = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return [self._piece([{"index": choice} | start]) for choice in range(self.ask.choices)]

    def _choice(self, index: int, completion: Completion, scores: Scores) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": completion.text, "refusal": None},
            "logprobs": self._logprobs(completion.logprobs or ()),
            "finish_reason": self._reason(completion),
        }

    def _grown(self, choice: int, delta: Delta, scores: Scores) -> dict[str, Any] | None:
        logprobs = self._logprobs(delta.logprobs) if delta.logprobs else None
        if not delta.text and logprobs is None and delta.completion is None:
            return None
        content = {"content": delta.text} if delta.text else {}
        return {"delta": content, "logprobs": logprobs, "finish_reason": self._reason(delta.completion)}

    def _logprobs(self, reports: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if self.ask.logprobs is None:
            return None
        count = self.ask.logprobs
        content = [
            self._named(report.token_id, report.logprob)
            | {"top_logprobs": [self._named(*pair) for pair in report.top[:count]]}
            for report in reports
        ]
        return {"content": content, "refusal": None}

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self._vocabulary.bytes_of(token)
        return {"token": self._vocabulary.text_of(token), "logprob": _number(logprob), "bytes": list(raw)}


class TextAnswer(Answer):
    """Of /v1/completions."""

    prefix, whole_object, piece_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, ask: Ask, vocabulary: Vocabulary, *, exact: bool = True) -> None:
        super().__init__(ask, vocabulary, exact=exact)
        self._offsets: dict[int, _Offset] = {}

    def _choice(self, index: int, completion: Completion, scores: Scores) -> dict[str, Any]:
        text = "" if self.ask.silent else completion.text
        reports = () if self.ask.silent else completion.logprobs or ()
        return {"index": index} | self._part(index, text, reports, completion, scores, first=True)

    def _grown(self, choice: int, delta: Delta, scores: Scores) -> dict[str, Any] | None:
        first = choice not in self._offsets and self.ask.echo
        text, reports = ("", ()) if self.ask.silent else (delta.text, delta.logprobs)
        if not text and not reports and delta.completion is None and not first:
            return None
        return self._part(choice, text, reports, delta.completion, scores, first=first)

    def _part(
        self,
        choice: int,
        text: str,
        reports: Sequence[TokenLogprob],
        completion: Completion | None,
        scores: Scores,
        *,
        first: bool,
    ) -> dict[str, Any]:
        prompt = self.ask.prompts[choice // self.ask.n]
        offset = self._offsets.setdefault(choice, _Offset())
        listed: list[tuple[int, TokenLogprob | None]] = []
        if first and self.ask.echo:
            text = prompt.text + text
            if scores:
                listed = list(zip(prompt.tokens, scores, strict=True))
        listed += [(report.token_id, report) for report in reports]
        logprobs = None if self.ask.logprobs is None else self._logprobs(offset, listed)
        return {"text": text, "logprobs": logprobs, "finish_reason": self._reason(completion)}

    def _logprobs(self, offset: _Offset, listed: list[tuple[int, TokenLogprob | None]]) -> dict[str, Any]:
        words = self._vocabulary
        return {
            "tokens": [words.text_of(token) for token, _ in listed],
            "token_logprobs": [None if report is None else _number(report.logprob) for _, report in listed],
            "top_logprobs": [None if report is None else self._top(report) for _, report in listed],
            "text_offset": [offset.then(words.shown(token)) for token, _ in listed],
        }

    def _top(self, report: TokenLogprob) -> dict[str, float]:
        """The likeliest tokens, and the one that was drawn, which may be none of them."""
        pairs = (*report.top[: self.ask.logprobs], (report.token_id, report.logprob))
        found: dict[str, float] = {}
        for token, logprob in pairs:  # of tokens that look alike the likelier one counts
            found.setdefault(self._vocabulary.text_of(token), _number(logprob))
        return found


class _Offset:
    """How far the text of a choice has come, token by token; a part of a character counts with its last byte."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = 0

    def then(self, shown: bytes) -> int:
        """Where a token begins that adds these bytes."""
        begin = self._characters
        self._characters += len(self._decoder.decode(shown))
        return begin


def _number(logprob: float) -> float:
    return logprob if logprob > _LOGPROB_LEAST else _LOGPROB_LEAST
