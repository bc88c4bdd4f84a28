"""From tokens to text, piece by piece, without splitting characters or giving away what a stop string takes back.

Owns the text of one completion. Text handed out is never revised: a piece is held back while it may still be half a
character or the beginning of a stop string.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

REPLACEMENT = "\ufffd"
_CONTEXT_TOKENS = 8


class Detokenizer:
    """Text of one sequence's new tokens.

    Args:
        tokenizer: a Transformers tokenizer, or ``None``: then there is no text, and stop strings never match.
        prompt: the prompt's tokens; the last few give the first piece its context (leading spaces depend on it).
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._tokens = list(prompt[-_CONTEXT_TOKENS:])
        self._begin = 0
        self._read = len(self._tokens)
        self._text = ""
        self._given = 0
        self.stopped = False

    @property
    def text(self) -> str:
        """Everything so far, cut at a stop string."""
        return self._text

    def push(self, token: int) -> str:
        """Add a token; return the text that is now certain. Sets ``stopped`` when a stop string appeared."""
        if self._tokenizer is None or self.stopped:
            return ""
        self._tokens.append(token)
        before = self._decode(self._tokens[self._begin : self._read])
        now = self._decode(self._tokens[self._begin :])
        if len(now) <= len(before) or now.endswith(REPLACEMENT):
            return ""
        searched = max(0, len(self._text) - max(map(len, self._stop), default=0))
        self._text += now[len(before) :]
        self._begin, self._read = self._read, len(self._tokens)
        self._cut(searched)
        return self._give(len(self._text) - (0 if self.stopped else self._held()))

    def finish(self) -> str:
        """What was still held back; nothing follows."""
        if self._tokenizer is not None and not self.stopped and self._read < len(self._tokens):
            before = self._decode(self._tokens[self._begin : self._read])
            self._text += self._decode(self._tokens[self._begin :])[len(before) :]
            self._cut(0)
        return self._give(len(self._text))

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def _cut(self, searched: int) -> None:
        places = [place for stop in self._stop if (place := self._text.find(stop, searched)) >= 0]
        if places:
            self._text = self._text[: min(places)]
            self.stopped = True

    def _held(self) -> int:
        """Length of the longest tail that begins some stop string."""
        longest = max(map(len, self._stop), default=1) - 1
        for length in range(min(longest, len(self._text)), 0, -1):
            if any(stop.startswith(self._text[-length:]) for stop in self._stop):
                return length
        return 0

    def _give(self, end: int) -> str:
        piece = self._text[self._given : end]
        self._given = max(self._given, end)
        return piece
