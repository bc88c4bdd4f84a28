"""Finds thoughts and tool calls in what a model writes, piece by piece: of a text, the same parts however it is cut.

Owns what is held back: no more than may yet be a marker, or the beginning of a call until its tool's name is whole.
What looks like a call and is none is given out as text. Arguments are handed on as the model writes them; those between
tags become JSON (`tagged`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from stowage.server.tools.formats import ToolFormat
from stowage.server.tools.stage import Kind, Part, Stage
from stowage.server.tools.tagged import TaggedCalls

__all__ = ["PLAIN", "OutputParser", "Part", "Speech"]

THINK_BEGIN: Final = "<think>"
THINK_END: Final = "</think>"
_NAME_CHARACTERS: Final = 256
_OBJECT: Final = re.compile(
    r'\s*\{\s*"name"\s*:\s*"((?:[^"\\]|\\.)*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)', re.DOTALL
)
_KEY: Final = re.compile(r'\{\s*"(\w*)"')
_KEYS: Final = ("name", "arguments", "parameters", "type", "id")
"""What the first key of a call may be."""


@dataclass(frozen=True, slots=True)
class Speech:
    """What an answer may consist of. format: None: no calls. thinks: its thoughts stand before `</think>`; begun: it
    begins with them. parallel: more than one call counts. schemas: of the arguments of each tool, by its name.
    """

    format: ToolFormat | None = None
    thinks: bool = False
    begun: bool = False
    parallel: bool = True
    harmony: bool = False
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def is_plain(self) -> bool:
        """Whether an answer is nothing but its text."""
        return self.format is None and not self.thinks and not self.harmony


PLAIN: Final = Speech()
"""Text."""


class OutputParser:
    """Of one answer. Parts of the same kind that follow each other are one, but for calls."""

    def __init__(self, speech: Speech) -> None:
        self._thoughts = _Thoughts(speech.begun) if speech.thinks else None
        self._calls: Stage | None = None
        if speech.harmony:
            self._calls = _Harmony(calls=speech.format is not None)
        elif speech.format is not None and speech.format.tags is not None:
            self._calls = TaggedCalls(speech.format, speech.format.tags, speech.schemas)
        elif speech.format is not None:
            self._calls = _Calls(speech.format)
        self._parallel = speech.parallel
        self._seen = 0

    def push(self, text: str) -> list[Part]:
        """The answer goes on with `text`; the parts that are now certain."""
        return self._sifted(self._through(text, last=False))

    def finish(self) -> list[Part]:
        """The answer is over; what was held back."""
        return self._sifted(self._through("", last=True))

    def _through(self, text: str, *, last: bool) -> Iterable[Part]:
        first = [Part("content", text)]
        if self._thoughts is not None:
            first = self._thoughts.feed(text, last=last)
        if self._calls is None:
            return first
        found: list[Part] = []
        for part in first:
            found += [part] if part.kind != "content" else self._calls.feed(part.text, last=False)
        return found + (self._calls.feed("", last=True) if last else [])

    def _sifted(self, parts: Iterable[Part]) -> list[Part]:
        kept: list[Part] = []
        for part in parts:
            self._seen += part.kind == "call"
            if not part.text or (self._seen > 1 and not self._parallel and part.kind != "reasoning"):
                continue
            if kept and kept[-1].kind == part.kind != "call":
                kept[-1] = Part(part.kind, kept[-1].text + part.text)
            else:
                kept.append(part)
        return kept


class _Thoughts(Stage):
    """Thoughts stand before `</think>`; an answer may begin with `<think>`."""

    def __init__(self, begun: bool) -> None:
        super().__init__()
        self._state = "thinks" if begun else "begins"

    def _step(self, last: bool) -> bool:
        if self._state == "says":
            return self._give("content", len(self._held))
        if self._state == "thinks":
            if self._give_until("reasoning", (THINK_END,), last):
                self._state = "ends"
                return True
            return False
        text = self._held.lstrip()
        if self._state == "ends":
            self._held, self._state = text, "says" if text else "ends"
            return bool(text)
        if not last and THINK_BEGIN.startswith(text):
            return False
        if text.startswith(THINK_BEGIN):
            self._held, self._state = text[len(THINK_BEGIN) :], "thinks"
        else:
            self._state = "says"
        return True


class _Calls(Stage):
    """Calls of any format but harmony."""

    def __init__(self, form: ToolFormat) -> None:
        super().__init__()
        self._form = form
        self._heads = [re.compile(form.header, re.DOTALL), _OBJECT] if form.header else [_OBJECT]
        self._state = "says" if form.trigger else "begins"
        self._marker = ""
        self._value, self._read = _Value(), 0

    def feed(self, text: str, *, last: bool) -> list[Part]:
        parts = super().feed(text, last=last)
        if last and self._marker and self._state in ("names", "follows"):
            parts.append(Part("content", self._marker))
        return parts

    def _step(self, last: bool) -> bool:
        return bool(getattr(self, f"_{self._state}")(last))

    def _begins(self, last: bool) -> bool:
        """Calls are the whole answer, or there are none."""
        text, tags = self._held.lstrip(), [tag for tag in self._form.skipped if len(tag) > 1]
        if not last and (not text or any(tag.startswith(text) and tag != text for tag in tags)):
            return False
        tag = next((one for one in tags if text.startswith(one)), "")
        if tag or text.startswith("{"):
            self._marker, self._held = tag, text[len(tag) :]
            return self._names_next()
        self._state = "speaks"
        return True

    def _speaks(self, last: bool) -> bool:
        return self._give("content", len(self._held))

    def _says(self, last: bool) -> bool:
        marker = self._give_until("content", (self._form.trigger,), last)
        if marker:
            self._marker, self._state = marker, "follows"
        return bool(marker)

    def _follows(self, last: bool) -> bool:
        """Behind a call, or behind what calls begin with: the next one, or text."""
        text = self._held.lstrip()
        if not text:
            self._held = "" if last else self._held
            return False
        listed = sorted((*self._form.heads, *self._form.skipped), key=len, reverse=True)
        if not last and any(one.startswith(text) and one != text for one in listed):
            return False
        known = next((one for one in listed if text.startswith(one)), "")
        if known:
            self._held = text[len(known) :]
            if known in self._form.heads:
                self._marker = known
                self._names_next()
        elif text[0] == "{" or self._marker == self._form.trigger:
            self._held = text
            self._names_next()
        else:
            self._state = "says" if self._form.trigger else "speaks"
        return True

    def _names_next(self) -> bool:
        self._state, self._value, self._read = "names", _Value(), 0
        return True

    def _names(self, last: bool) -> bool:
        """The name of the tool, up to its arguments."""
        text = self._held.lstrip()
        if self._form.name == "mistral" and text.startswith("["):
            self._held = text[1:]
            return True
        for pattern in self._heads:
            if found := pattern.match(self._held):
                name = _text_of(found[1]) if pattern is _OBJECT else found[1]
                self._parts.append(Part("call", name))
                self._marker = ""
                self._held, self._value, self._state = self._held[found.end() :], _Value(), "argues"
                return True
        if text.startswith("{") and not ((key := _KEY.match(text)) and key[1] not in _KEYS):
            self._held = text
            end = self._value.feed(text[self._read :])
            if end and self._whole(text[: self._read + end]):
                self._held, self._state = text[self._read + end :], "follows"
                return True
            self._read = len(text)
            return self._none() if end or last else False
        if text.startswith("{"):
            return self._none()
        return self._none() if last or len(text) > _NAME_CHARACTERS else False

    def _argues(self, last: bool) -> bool:
        end = self._value.feed(self._held)
        if end:
            self._state = "follows"
        return self._give("arguments", end or len(self._held))

    def _whole(self, text: str) -> bool:
        """A call whose name does not come first: it is read when all of it is there."""
        try:
            call = json.loads(text)
        except ValueError:
            return False
        name = call.get("name")
        arguments: Any = call.get("arguments", call.get("parameters"))
        if isinstance(arguments, dict):
            arguments = json.dumps(arguments, ensure_ascii=False)
        if not isinstance(name, str) or not name or not isinstance(arguments, str):
            return False
        self._parts += [Part("call", name), Part("arguments", arguments)]
        self._marker = ""
        return True

    def _none(self) -> bool:
        """What looked like a call is text."""
        self._parts.append(Part("content", self._marker))
        self._marker, self._state = "", "speaks" if not self._form.trigger else "says"
        if self._held.startswith(self._form.trigger or "\0"):
            return True
        return self._give("content", 1)


class _Harmony(Stage):
    """Messages in channels: `analysis` is thought, what goes to a function is a call, all else is said."""

    def __init__(self, *, calls: bool) -> None:
        super().__init__()
        self._takes_calls = calls
        self._kind: Kind | None = None
        self._begun = False

    def _step(self, last: bool) -> bool:
        if self._kind is not None:
            ends = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
            if not self._give_until(self._kind, ends, last):
                return False
            self._kind = None
            return True
        if not self._begun and not self._held.lstrip().startswith("<"):
            self._kind, self._begun = "content", True  # no channel at all
            return bool(self._held)
        self._begun = True
        head, marker, rest = self._held.partition("<|message|>")
        if not marker:
            self._held = "" if last else self._held
            return False
        self._held = rest
        called = re.search(r"to=(?:functions\.)?([\w.-]+)", head)
        if called and self._takes_calls:
            self._parts.append(Part("call", called[1]))
            self._kind = "arguments"
        else:
            self._kind = "reasoning" if "analysis" in head else "content"
        return True


class _Value:
    """Where a JSON object or list ends."""

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = self._escaped = False

    def feed(self, text: str) -> int:
        """How many characters of `text` belong to it, if it ends there; else 0."""
        for at, character in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped, self._quoted = character == "\\", character != '"'
            elif character == '"':
                self._quoted = True
            else:
                self._depth += (character in "{[") - (character in "}]")
                if self._depth == 0:
                    return at + 1
        return 0


def _text_of(raw: str) -> str:
    try:
        return str(json.loads(f'"{raw}"'))
    except ValueError:
        return raw
