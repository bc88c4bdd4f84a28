"""From tokens to text, piece by piece, without splitting characters or giving away what a stop string takes back.

Owns the text of one completion. Text handed out is never revised: a piece is held back while it may still be half a
character or the beginning of a stop string. A token costs time in proportion to its text and the number of stop
strings, however long these are, and also where the tokens' bytes never become characters.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from stowage.engine.sampling_params import SamplingParams

REPLACEMENT = "\ufffd"
_CONTEXT_TOKENS = 8
_DECODED_TOKENS = 8
"""So many tokens are decoded again with each new one, at most, unless their text is not certain."""
_UNFINISHED_TOKENS = 4
"""A character has at most four bytes, so what these tokens follow can no longer be half of one."""


class Detokenizer:
    """Text of one sequence's new tokens.

    Args:
        tokenizer: a Transformers tokenizer, or ``None``: then there is no text, and stop strings never match.
        prompt: the prompt's tokens; the last few give the first piece its context (leading spaces depend on it).
        min_tokens: a stop string that is whole with so many tokens does not count.
        silent: None: special tokens are left out of the text; else only these are.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt: Sequence[int],
        stop: Sequence[str],
        min_tokens: int = 0,
        silent: frozenset[int] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._backend = backend_of(tokenizer)
        self._stops = [_Stop(text) for text in stop]
        self._skips = silent is None
        self._silent = frozenset(getattr(tokenizer, "all_special_ids", ())) if silent is None else silent
        self._tokens = list(prompt[-_CONTEXT_TOKENS:])
        self._begin = 0
        self._read = len(self._tokens)
        self._before: str | None = None
        """The text of the tokens from ``_begin`` to ``_read``, where it is known."""
        self._text = ""
        self._given = 0
        self._unstoppable = min_tokens
        """Tokens that are still to come before a stop string counts; below zero: it does."""
        self.stopped = False
        self.stop_text: str | None = None
        """The stop string that ended the text."""

    @property
    def text(self) -> str:
        """Everything so far, cut at a stop string."""
        return self._text

    def push(self, token: int) -> str:
        """Add a token; return the text that is now certain. Sets ``stopped`` when a stop string appeared."""
        if self._tokenizer is None or self.stopped:
            return ""
        self._unstoppable -= 1
        if token in self._silent and not (self._skips and self._decode([token])):
            return ""  # left out of every text: any number of them costs nothing
        self._tokens.append(token)
        before, now = self._known(), self._decode(self._tokens[self._begin :])
        read = len(self._tokens)
        if now.endswith(REPLACEMENT):
            read -= _UNFINISHED_TOKENS
            now = self._certain(now, read)
        if len(now) <= len(before):
            return ""
        if read - self._begin > _DECODED_TOKENS:
            self._begin, self._read, self._before = self._read, read, None
        else:
            self._read, self._before = read, now
        self._add(now[len(before) :])
        held = 0 if self.stopped else max((stop.begun for stop in self._stops), default=0)
        return self._give(len(self._text) - held)

    def finish(self) -> str:
        """What was still held back; nothing follows."""
        if self._tokenizer is not None and not self.stopped and self._read < len(self._tokens):
            self._add(self._decode(self._tokens[self._begin :])[len(self._known()) :])
        return self._give(len(self._text))

    def _known(self) -> str:
        """The text of the tokens up to ``_read``."""
        if self._before is None:
            self._before = self._decode(self._tokens[self._begin : self._read])
        return self._before

    def _certain(self, text: str, read: int) -> str:
        """What of ``text``, which ends with half a character, the first ``read`` tokens are; empty where they are not
        whole characters. Bytes that are none would else be decoded again with every token.
        """
        if read <= self._read:
            return ""
        head = self._decode(self._tokens[self._begin : read])
        return head if head + self._decode(self._tokens[read:]) == text else ""

    def _decode(self, tokens: list[int]) -> str:
        if self._backend is not None:
            return str(self._backend.decode(tokens, skip_special_tokens=self._skips))
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=self._skips, clean_up_tokenization_spaces=False)
        return text

    def _add(self, piece: str) -> None:
        """The text goes on with ``piece``, up to the first stop string."""
        begin = len(self._text)
        self._text += piece
        if self._unstoppable >= 0:
            for stop in self._stops:
                stop.pass_over(piece)
            return
        ended = [(stop.text, end) for stop in self._stops if (end := stop.feed(piece)) is not None]
        begins = [(begin + end - len(text), text) for text, end in ended]
        if begins:
            at, self.stop_text = min(begins)
            self._text = self._text[:at]
            self.stopped = True

    def _give(self, end: int) -> str:
        piece = self._text[self._given : end]
        self._given = max(self._given, end)
        return piece


def detokenizer(tokenizer: Any, prompt: Sequence[int], params: SamplingParams, eos: frozenset[int]) -> Detokenizer:
    """The text of a request's answer; ``eos``: tokens that end one, unless the request ignores them."""
    silent = None
    if not params.skip_special_tokens and tokenizer is not None:
        silent = special_tokens(tokenizer).intersection(params.stop_token_ids)
        silent |= frozenset() if params.ignore_eos else eos
    elif params.kept_special_tokens and tokenizer is not None:
        silent = special_tokens(tokenizer).difference(params.kept_special_tokens) | eos
    return Detokenizer(tokenizer, prompt, params.stop, params.min_tokens, silent)


def backend_of(tokenizer: Any) -> Any:
    """The tokenizer of the tokenizers library that ``tokenizer`` asks for a text; asking it is three times as quick.
    ``None`` where there is none, or where ``tokenizer`` decodes in another way than Transformers' own classes.
    """
    if not hasattr(tokenizer, "backend_tokenizer"):
        return None
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    bound = [getattr(getattr(tokenizer, name, None), "__func__", None) for name in ("decode", "_decode")]
    plain = bound == [PreTrainedTokenizerBase.decode, getattr(PreTrainedTokenizerFast, "_decode", bound)]
    return tokenizer.backend_tokenizer if plain else None


@lru_cache(maxsize=4)
def special_tokens(tokenizer: Any) -> frozenset[int]:
    """All that decoding leaves out: the ones with a role, and those that were added as special."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset(tokenizer.all_special_ids) | {int(token) for token, said in added.items() if said.special}


class _Stop:
    """A stop string, looked for in pieces (Knuth, Morris, Pratt, 1977). ``begun``: what of it the text ends with."""

    __slots__ = ("_shorter", "begun", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.begun = 0
        self._shorter = [0] * (len(text) + 1)  # by characters that match: how many do at the next position that may
        length = 0
        for at in range(1, len(text)):
            while length and text[at] != text[length]:
                length = self._shorter[length]
            length += text[at] == text[length]
            self._shorter[at + 1] = length

    def pass_over(self, piece: str) -> None:
        """``piece`` comes, and an end of the string in it does not count."""
        while (end := self.feed(piece)) is not None:
            self.begun = self._shorter[len(self.text)]
            piece = piece[end:]

    def feed(self, piece: str) -> int | None:
        """Where in ``piece`` the string has ended first; ``None``: it has not, and ``begun`` is right."""
        text, begun = self.text, self.begun
        for at, character in enumerate(piece):
            while begun and character != text[begun]:
                begun = self._shorter[begun]
            begun += character == text[begun]
            if begun == len(text):
                return at + 1
        self.begun = begun
        return None
