"""`/v1/completions`, as OpenAI defines it: continues prompts of text or of tokens."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from stowage.engine.prompts import Begin, unasked
from stowage.engine.request import Completion, Delta
from stowage.engine.sampling import TokenLogprob
from stowage.errors import RequestError
from stowage.server.api_errors import bad
from stowage.server.apis.answer import OpenAIAnswer, Scores, number
from stowage.server.apis.generation_request import GenerationRequest
from stowage.server.apis.reader import LOGPROBS_MAX, TOKENS_MOST, Reader, check_least
from stowage.server.fields import Fields, parse_object
from stowage.server.structured import structured_outputs, unusable
from stowage.server.vocabulary import Vocabulary

LOGPROB_ENTRIES_MAX: Final = 1 << 18
"""Prompt log-probabilities that one request may ask for: each takes some hundred bytes until it is sent."""
COMPLETION_TOKENS: Final = 16
"""The default of `max_tokens`, as OpenAI has it."""


def read(reader: Reader, body: bytes | bytearray, begin: Begin = unasked) -> GenerationRequest:
    """Parse a request. `begin`: see `Prompts.read`. Raises ApiError."""
    fields = Fields(parse_object(body))
    fields.without_effect("user")
    fields.neutral("suffix", "")
    model, n = reader.model(fields), reader.n(fields)
    fields.neutral("best_of", n)
    new_tokens = fields.whole("max_tokens", None, 0, TOKENS_MOST)
    logprobs = fields.whole("logprobs", None, 0, LOGPROBS_MAX)
    echo = fields.flag("echo")
    params = reader.sampling(fields, logprobs)
    found = structured_outputs(fields)
    if found is not None:
        param, wanted = found
        try:
            reader.grammars.begin(wanted)
        except RequestError as error:
            raise unusable(param, error) from error
        params = replace(params, structured_outputs=wanted)
    if echo and logprobs is not None:
        params = replace(params, prompt_logprobs=logprobs)
    stream, include_usage = reader.stream(fields)
    cache_salt, raw = fields.text("cache_salt", "") or "", fields.take("prompt")
    fields.finish()
    listed = _prompts(raw)
    reader.count_choices(len(listed), n)
    default = min(COMPLETION_TOKENS, reader.tokens_max)
    prompts = tuple(reader.prompt(item, new_tokens, default, begin) for item in listed)
    if params.prompt_logprobs is not None:
        _count_logprobs(sum(len(prompt.tokens) for prompt in prompts) * n * (params.prompt_logprobs + 1))
    check_least(params, *prompts)
    silent = new_tokens == 0
    return GenerationRequest(
        model, prompts, n, params, cache_salt, stream, include_usage, logprobs, echo=echo, silent=silent
    )


def _prompts(raw: Any) -> list[str | list[int]]:
    """One prompt or several: text, token ids, a list of texts, a list of lists of token ids."""
    if isinstance(raw, str):
        return [raw]
    if isinstance(raw, list) and raw:
        if all(type(item) is int for item in raw):
            return [raw]
        if all(isinstance(item, str) for item in raw):
            return raw
        if all(isinstance(item, list) and item and all(type(token) is int for token in item) for item in raw):
            return raw
    raise bad("'prompt' must be text, a list of token ids, or a list of such; none may be empty.", "prompt")


def _count_logprobs(entries: int) -> None:
    if entries > LOGPROB_ENTRIES_MAX:
        raise bad(
            f"'echo' with 'logprobs' asks for {entries} log-probabilities of prompts; one request may ask for at most "
            f"{LOGPROB_ENTRIES_MAX}. Send fewer or shorter prompts at once.",
            "logprobs",
        )


class TextAnswer(OpenAIAnswer):
    """Answers of /v1/completions."""

    prefix, whole_object, piece_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, request: GenerationRequest, vocabulary: Vocabulary, *, exact: bool = True) -> None:
        super().__init__(request, vocabulary, exact=exact)
        self._offsets: dict[int, _Offset] = {}

    def _choice(self, index: int, completion: Completion, scores: Scores) -> dict[str, Any]:
        text = "" if self.request.silent else completion.text
        reports = () if self.request.silent else completion.logprobs or ()
        return {"index": index} | self._part(index, text, reports, completion, scores, first=True)

    def _grown(self, choice: int, delta: Delta, scores: Scores) -> list[dict[str, Any]]:
        first = choice not in self._offsets and self.request.echo
        text, reports = ("", ()) if self.request.silent else (delta.text, delta.logprobs)
        if not text and not reports and delta.completion is None and not first:
            return []
        return [self._part(choice, text, reports, delta.completion, scores, first=first)]

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
        prompt = self.request.prompts[choice // self.request.n]
        offset = self._offsets.setdefault(choice, _Offset())
        listed: list[tuple[int, TokenLogprob | None]] = []
        offsets: list[int] = []
        if first and self.request.echo:
            text = prompt.text + text
            if scores:
                listed = list(zip(prompt.tokens, scores, strict=True))
                offsets = [offset.within(prompt.text, token, self._vocabulary) for token in prompt.tokens]
        listed += [(report.token_id, report) for report in reports]
        special = not self.request.params.skip_special_tokens
        offsets += [offset.then(self._vocabulary.shown(report.token_id, special=special)) for report in reports]
        logprobs = None if self.request.logprobs is None else self._logprobs(offsets, listed)
        return {"text": text, "logprobs": logprobs, "finish_reason": self._reason(completion)}

    def _logprobs(self, offsets: list[int], listed: list[tuple[int, TokenLogprob | None]]) -> dict[str, Any]:
        words = self._vocabulary
        return {
            "tokens": [words.text_of(token) for token, _ in listed],
            "token_logprobs": [None if report is None else number(report.logprob) for _, report in listed],
            "top_logprobs": [None if report is None else self._top(report) for _, report in listed],
            "text_offset": offsets,
        }

    def _top(self, report: TokenLogprob) -> dict[str, float]:
        """The top tokens, and the one that was drawn, which may not be among them."""
        pairs = (*report.top[: self.request.logprobs], (report.token_id, report.logprob))
        found: dict[str, float] = {}
        for token, logprob in pairs:  # of tokens with the same text the likelier one counts
            found.setdefault(self._vocabulary.text_of(token), number(logprob))
        return found


class _Offset:
    """The text offset of each token of a choice; a character that spans tokens counts with its last byte."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = 0

    def within(self, text: str, token: int, words: Vocabulary) -> int:
        """`then` for a token of `text`, which has a special token only where it was written."""
        written = text.startswith(words.text_of(token), self._characters)
        return self.then(words.shown(token, special=written))

    def then(self, shown: bytes) -> int:
        """The offset at which a token begins that adds these bytes."""
        if shown and not 0x80 <= shown[0] < 0xC0:  # what was half a character before it stays half
            self._characters += len(self._decoder.decode(b"", final=True))
        begin = self._characters
        self._characters += len(self._decoder.decode(shown))
        return begin
