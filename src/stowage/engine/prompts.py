"""Turns a prompt (text, token ids or chat messages) into the tokens that a model computes.

Owns the checks of a prompt, and how much work it may be: in proportion to the tokens that are allowed, not to what was
sent. A text with more characters than so many tokens can have is refused unread; of a long one pieces are counted
first, so that one that is refused anyhow is never tokenized whole. Nothing here keeps a state between prompts: any
thread, several at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final

from stowage.errors import RequestError
from stowage.models.layout import ModelLayout

PIECE_CHARACTERS: Final = 1 << 16
"""Of a long text, at a time, while its tokens are counted."""
_CHARACTERS_PER_TOKEN: Final = 6
"""A text of fewer than so many per allowed token is tokenized at once: most that are allowed have three to five."""
_SURELY: Final = 2
"""A text has some more tokens when it is cut into pieces: so many times too many of them are surely too many."""
_TRIAL: Final = "stowage"
_SHOWN_CHARACTERS: Final = 100
_NO_TOKENIZER: Final = "this model has no tokenizer; give the prompt as token ids."
PLAINLY: Final[Mapping[str, Any]] = MappingProxyType({})
"""What a chat template is given besides the messages: nothing."""
Begin = Callable[[int], None]


def unasked(_characters: int) -> None:
    """Nobody wants to know how many characters are tokenized."""


class PromptTooLong(RequestError):
    """A prompt of more tokens than are allowed. ``what``: how long it is, as far as that is known."""

    def __init__(self, what: str, most: int) -> None:
        super().__init__(f"the prompt is {what} long, above the context of {most}: shorten it.")
        self.what = what


class Prompts:
    """Prompts for one model; ``tokenizer`` ``None``: only token ids."""

    def __init__(self, tokenizer: Any, layout: ModelLayout) -> None:
        self._tokenizer = tokenizer
        self._layout = layout

    def read(
        self, prompt: Any, most: int | None = None, begin: Begin = unasked, template: Mapping[str, Any] = PLAINLY
    ) -> list[int]:
        """Token ids of a prompt: text, token ids, or chat messages (``[{"role": ..., "content": ...}]``, through the
        model's template). ``begin`` is told how many characters are tokenized next, and 0 in the end; it may raise.
        ``template``: what the template is given besides (``apply_chat_template``).

        Raises ``RequestError`` for an empty prompt, a token outside the vocabulary, or text without a tokenizer;
        ``PromptTooLong`` for one of more than ``most`` tokens, or than the context has.
        """
        layout = self._layout
        most = layout.context_tokens if most is None else min(most, layout.context_tokens)
        tokens = self.tokenize(prompt, most, begin, template)
        if not tokens:
            raise RequestError("the prompt is empty; give at least one token.")
        if len(tokens) > most:
            raise PromptTooLong(f"{len(tokens)} tokens", most)
        wrong = next((t for t in tokens if not 0 <= t < layout.vocab), None)
        if wrong is not None:
            shown = wrong if -(1 << 64) < wrong < 1 << 64 else "of more than 64 bits"
            raise RequestError(f"token {shown} is outside the model's vocabulary of {layout.vocab}.")
        if layout.placeholders and not layout.placeholders.isdisjoint(tokens):
            picture = next(t for t in tokens if t in layout.placeholders)
            raise RequestError(f"token {picture} stands for a picture or a sound, and of this model only text is run.")
        return tokens

    def tokenize(
        self, prompt: Any, most: int, begin: Begin = unasked, template: Mapping[str, Any] = PLAINLY
    ) -> list[int]:
        """``read`` without its checks of vocabulary and, where that is no much work, of length."""
        if isinstance(prompt, str | bytes) or not isinstance(prompt, Items):
            listed: Items[Any] = ()
        else:
            listed = prompt
            if all(isinstance(token, int) for token in prompt):
                return list(prompt)
        if isinstance(prompt, str):
            return self.text(prompt, most, begin)
        if not listed or not all(map(_is_message, listed)):
            raise RequestError("a prompt is text, a list of token ids, or a list of messages with role and content.")
        if len(listed) > most:
            raise PromptTooLong(f"{len(listed)} messages", most)
        return self.text(self._apply_chat_template(list(listed), template), most, begin, add_special_tokens=False)

    def text(self, text: str, most: int, begin: Begin = unasked, *, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a text. Raises as ``read``."""
        if self._tokenizer is None:
            raise RequestError(_NO_TOKENIZER)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"the prompt is no text: it has half a surrogate pair at {error.start}.") from error
        if len(text) > _CHARACTERS_PER_TOKEN * most:
            self._refuse_too_long(text, most, begin)
        begin(len(text))
        ids: list[int] = self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
        begin(0)
        return list(ids)

    def _refuse_too_long(self, text: str, most: int, begin: Begin) -> None:
        """Raises ``PromptTooLong`` for what is surely of more than ``most`` tokens; else says nothing."""
        longest = self._characters_most
        if longest and len(text) > longest * most:
            raise PromptTooLong(f"{len(text)} characters, which are more than {most} tokens,", most)
        count = 0
        for start in range(0, len(text), PIECE_CHARACTERS):
            piece = text[start : start + PIECE_CHARACTERS]
            begin(len(piece))
            count += len(self._tokenizer(piece, add_special_tokens=False)["input_ids"])
            if count > _SURELY * most + 2 * (start // PIECE_CHARACTERS + 1):
                raise PromptTooLong(f"{len(text)} characters, the first of which are {count} tokens,", most)

    @cached_property
    def _characters_most(self) -> int:
        """How many characters of a text one token can stand for; 0: nobody knows."""
        return characters_most(self._tokenizer)

    def _apply_chat_template(self, messages: list[Any], template: Mapping[str, Any]) -> str:
        from jinja2 import TemplateError, TemplateSyntaxError
        from jinja2.exceptions import SecurityError

        tokenizer = self._tokenizer
        if tokenizer is None:
            raise RequestError(_NO_TOKENIZER)
        if not getattr(tokenizer, "chat_template", None):
            raise RequestError(
                "this model's tokenizer has no chat template: give the prompt as text, or --chat-template FILE."
            )
        _refuse_only_named(tokenizer.chat_template, template)
        try:
            if _takes_parts(tokenizer):
                messages = [{**m, "content": _parts(m["content"])} for m in messages]
            given = {"add_generation_prompt": True, **template}
            return str(tokenizer.apply_chat_template(messages, tokenize=False, **given))
        except (TemplateSyntaxError, SecurityError) as error:
            raise RequestError(
                f"the model's chat template cannot be used, whatever the messages: {error}. Start with another one: "
                "--chat-template FILE"
            ) from error
        except (
            TemplateError,
            TypeError,
            ValueError,
            LookupError,
            ArithmeticError,
            AttributeError,
            RecursionError,
        ) as error:  # as values in it may be odd
            raise RequestError(f"the model's chat template refuses these messages: {error}") from error


def _refuse_only_named(templates: Any, given: Mapping[str, Any]) -> None:
    """Where there are several templates, none of them for these messages. Raises RequestError."""
    if not isinstance(templates, Mapping) or "default" in templates or given.get("chat_template") is not None:
        return
    if given.get("tools") is None or "tool_use" not in templates:
        shown = ", ".join(sorted(map(str, templates)))[:_SHOWN_CHARACTERS]
        raise RequestError(
            f"this model has chat templates for other uses only ({shown}), and none for these messages. Give it one: "
            "--chat-template FILE"
        )


def _is_message(message: Any) -> bool:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return False
    content = message.get("content")
    return isinstance(content, str) or (isinstance(content, list) and all(isinstance(part, dict) for part in content))


def _takes_parts(tokenizer: Any) -> bool:
    """Whether the template leaves out what is given as plain text, or fails at it, and takes lists of parts: so do some
    of models that take pictures.
    """
    from jinja2 import TemplateError

    for content in (_TRIAL, _parts(_TRIAL)):
        try:
            if _TRIAL in tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False):
                return content is not _TRIAL
        except (TemplateError, TypeError, ValueError):  # the last: there are templates for other uses only
            continue
    return False


def _parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def characters_most(tokenizer: Any) -> int:
    """How many characters of a text one token of ``tokenizer`` can stand for at most; 0 where none can be sure: where
    something on the way drops characters, or makes one token of as many as come.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return 0
    if any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()):
        return 0  # which take the spaces beside them along
    normalizers = _parts_of(backend.normalizer, "normalizers")
    cutters = _parts_of(backend.pre_tokenizer, "pretokenizers")
    shrinks = [_shrinks(part) for part in normalizers]
    vocabulary = tokenizer.get_vocab()
    bytewise = any(part.get("type") == "ByteLevel" for part in (*normalizers, *cutters))
    if 0 in shrinks or not all(map(_keeps, cutters)) or not _knows_all(backend.model, vocabulary, bytewise):
        return 0
    return max(shrinks, default=1) * max(map(len, vocabulary), default=0)


def _parts_of(pipeline: Any, name: str) -> list[dict[str, Any]]:
    """What a normalizer or pre-tokenizer does, one after another."""
    found: list[dict[str, Any]] = []
    left = [] if pipeline is None else [json.loads(pipeline.__getstate__())]
    while left:
        part = left.pop()
        if part.get("type") == "Sequence":
            left += part[name]
        else:
            found.append(part)
    return found


def _shrinks(normalizer: dict[str, Any]) -> int:
    """How many characters a normalizer may make one of; 0: nobody knows."""
    kind = normalizer.get("type")
    if kind in ("NFC", "NFKC"):
        return 4  # no character is composed of more (Unicode Standard Annex 15, expansion factors)
    if kind == "Replace":
        found = normalizer.get("pattern", {}).get("String")
        return 1 if found is not None and len(normalizer.get("content", "")) >= len(found) else 0
    return 1 if kind in ("NFD", "NFKD", "Prepend", "Lowercase", "ByteLevel") else 0


def _keeps(pre_tokenizer: dict[str, Any]) -> bool:
    """Whether a pre-tokenizer only cuts."""
    if pre_tokenizer.get("type") in ("Split", "Punctuation"):
        return pre_tokenizer.get("behavior") != "Removed"
    return pre_tokenizer.get("type") in ("ByteLevel", "Metaspace", "Digits")


def _knows_all(model: Any, vocabulary: Mapping[str, int], bytewise: bool) -> bool:
    """Whether every character is some token's: what is not known may be left out, or many made one."""
    if type(model).__name__ != "BPE":
        return False
    if model.byte_fallback:
        return all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    if bytewise:
        from tokenizers.pre_tokenizers import ByteLevel

        return all(character in vocabulary for character in ByteLevel.alphabet())
    return model.unk_token is not None and not model.fuse_unk
