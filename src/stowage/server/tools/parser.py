"""Finds reasoning and tool calls in a model's text, piece by piece; the parts are the same however the text is cut.

Owns what is held back: no more than may yet be a marker, or the beginning of a call until its tool's name is whole.
What looks like a call and is none is given out as text. Arguments are handed on as the model writes them; those between
tags become JSON (`tagged`).

Of a call that the limit of tokens cuts, what is certain is given out: its name, and the arguments so far. What precedes
a whole name is nothing that a client could use, and no text either: it is left out. So do vLLM's parsers, in streams;
what is not streamed some of them give out as text (hermes, llama3_json), and others leave out too (deepseek_v3).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from stowage.server.tools.formats import ToolFormat
from stowage.server.tools.incremental_parser import CallParser, IncrementalParser, Kind, Part
from stowage.server.tools.tagged import TaggedCalls

THINK_BEGIN: Final = "<think>"
THINK_END: Final = "</think>"
_NAME_CHARACTERS: Final = 256
_OBJECT: Final = re.compile(
    r'\s*\{\s*"name"\s*:\s*"((?:[^"\\]|\\.)*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)', re.DOTALL
)
_BEGUN: Final = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]*)("?)')
_KEY: Final = re.compile(r'\{\s*"(\w*)"')
_KEYS: Final = ("name", "arguments", "parameters", "type", "id")
"""What the first key of a call may be."""


@dataclass(frozen=True, slots=True)
class OutputSyntax:
    """The syntax of an answer. format: of tool calls; None: none. thinks: reasoning ends with `</think>`; begun: the
    answer begins within it. parallel: more than one call counts. schemas: of each tool's arguments, by tool name.
    forced: an answer is calls and nothing else.
    """

    format: ToolFormat | None = None
    thinks: bool = False
    begun: bool = False
    parallel: bool = True
    harmony: bool = False
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    forced: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether an answer is nothing but content."""
        return self.format is None and not self.thinks and not self.harmony


PLAIN: Final = OutputSyntax()
"""Content only."""


class OutputParser:
    """Parses one answer. Consecutive parts of the same kind are merged, except calls."""

    def __init__(self, syntax: OutputSyntax) -> None:
        self._thoughts = _Thoughts(syntax.begun) if syntax.thinks else None
        self._calls: IncrementalParser | None = None
        if syntax.harmony:
            self._calls = _Harmony(calls=syntax.format is not None)
        elif syntax.format is not None and syntax.format.tags is not None:
            self._calls = TaggedCalls(syntax.format, syntax.format.tags, syntax.schemas, forced=syntax.forced)
        elif syntax.format is not None:
            self._calls = _Calls(syntax.format, tuple(syntax.schemas), forced=syntax.forced)
        self._parallel = syntax.parallel
        self._seen = 0

    def push(self, text: str) -> list[Part]:
        """Parse more text; the parts that are now certain."""
        return self._sifted(self._through(text, last=False))

    def finish(self, *, is_cut: bool = False) -> list[Part]:
        """The answer has ended; the parts that were buffered. is_cut: the model would have written more."""
        if self._calls is not None:
            self._calls.is_cut = is_cut
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


class _Thoughts(IncrementalParser):
    """Reasoning up to `</think>`; an answer may begin with `<think>`."""

    def __init__(self, begun: bool) -> None:
        super().__init__()
        self._state = "thinks" if begun else "detect"

    def _step(self, last: bool) -> bool:
        if self._state == "text":
            return self._emit("content", len(self._buffer))
        if self._state == "thinks":
            if self._emit_until("reasoning", (THINK_END,), last):
                self._state = "ends"
                return True
            return False
        text = self._buffer.lstrip()
        if self._state == "ends":
            self._buffer, self._state = text, "text" if text else "ends"
            return bool(text)
        if not last and THINK_BEGIN.startswith(text):
            return False
        if text.startswith(THINK_BEGIN):
            self._buffer, self._state = text[len(THINK_BEGIN) :], "thinks"
        else:
            self._state = "text"
        return True


class _Calls(CallParser):
    """Calls of any format but harmony and those with tags. forced: the answer is nothing else."""

    def __init__(self, form: ToolFormat, tools: tuple[str, ...], *, forced: bool) -> None:
        super().__init__()
        self._form, self._tools = form, tools
        self._heads = [re.compile(form.header, re.DOTALL), _OBJECT] if form.header else [_OBJECT]
        self._state = "text" if form.trigger else "detect"
        self._called = forced
        self._value, self._read = _Value(), 0

    def _read_detect(self, last: bool) -> bool:
        """For formats without a marker: the whole answer is calls, or there are none."""
        text, tags = self._buffer.lstrip(), [tag for tag in self._form.skipped if len(tag) > 1]
        if not last and (not text or any(tag.startswith(text) and tag != text for tag in tags)):
            return False
        tag = next((one for one in tags if text.startswith(one)), "")
        if tag or text.startswith("{"):
            self._marker, self._buffer = tag, text[len(tag) :]
            return self._expect_name()
        self._state = "text_only"
        return True

    def _read_text_only(self, last: bool) -> bool:
        return self._emit("content", len(self._buffer))

    def _read_text(self, last: bool) -> bool:
        marker = self._emit_until("content", (self._form.trigger,), last and not (self.is_cut and self._called))
        if marker:
            self._marker, self._state = marker, "after_call"
        return bool(marker)

    def _read_after_call(self, last: bool) -> bool:
        """After a call, or after the opening marker: the next call, or text."""
        text = self._buffer.lstrip()
        if not text:
            self._buffer = "" if last else self._buffer
            return False
        listed = sorted((*self._form.heads, *self._form.skipped), key=len, reverse=True)
        if (not last or self.is_cut) and any(one.startswith(text) and one != text for one in listed):
            return False
        known = next((one for one in listed if text.startswith(one)), "")
        if known:
            self._buffer = text[len(known) :]
            if known in self._form.heads:
                self._marker = known
                self._expect_name()
        elif text[0] == "{" or self._marker == self._form.trigger:
            self._buffer = text
            self._expect_name()
        else:
            self._state = "text" if self._form.trigger else "text_only"
        return True

    def _expect_name(self) -> bool:
        self._state, self._value, self._read = "name", _Value(), 0
        return True

    def _read_name(self, last: bool) -> bool:
        """Up to the arguments: the tool's name."""
        text = self._buffer.lstrip()
        if self._form.name == "mistral" and text.startswith("["):
            self._buffer = text[1:]
            return True
        for pattern in self._heads:
            if found := pattern.match(self._buffer):
                name = _text_of(found[1]) if pattern is _OBJECT else found[1]
                self._parts.append(Part("call", name))
                self._marker, self._called = "", True
                self._buffer, self._value, self._state = self._buffer[found.end() :], _Value(), "arguments"
                return True
        if text.startswith("{") and not ((key := _KEY.match(text)) and key[1] not in _KEYS):
            self._buffer = text
            end = self._value.feed(text[self._read :])
            if end and self._whole(text[: self._read + end]):
                self._buffer, self._state = text[self._read + end :], "after_call"
                return True
            self._read = len(text)
            if end:
                return self._none()
        elif text.startswith("{") or len(text) > _NAME_CHARACTERS:
            return self._none()
        if last and self.is_cut:
            return self._cut_short()
        return self._none() if last else False

    def _read_arguments(self, last: bool) -> bool:
        end = self._value.feed(self._buffer)
        if end:
            self._state = "after_call"
        return self._emit("arguments", end or len(self._buffer))

    def _whole(self, text: str) -> bool:
        """A call whose name does not come first: parsed once it is complete."""
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
        self._marker, self._called = "", True
        return True

    def _cut_short(self) -> bool:
        """Of a call before its arguments, the name if that is whole. What neither a marker nor another call precedes is
        text, unless it begins to name a tool.
        """
        found = _BEGUN.match(self._buffer)
        if found and found[2] and found[1] in self._tools:
            self._parts.append(Part("call", found[1]))
        elif not (self._marker or self._called or (found and any(one.startswith(found[1]) for one in self._tools))):
            return self._none()
        self._buffer = ""
        return False

    def _none(self) -> bool:
        """What looked like a call is content."""
        self._parts.append(Part("content", self._marker))
        self._marker, self._state = "", "text_only" if not self._form.trigger else "text"
        if self._buffer.startswith(self._form.trigger or "\0"):
            return True
        return self._emit("content", 1)


class _Harmony(IncrementalParser):
    """Messages in channels: `analysis` is reasoning, a message to a function is a call, all else is content."""

    def __init__(self, *, calls: bool) -> None:
        super().__init__()
        self._takes_calls = calls
        self._kind: Kind | None = None
        self._begun = False

    def _step(self, last: bool) -> bool:
        if self._kind is not None:
            ends = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
            if not self._emit_until(self._kind, ends, last):
                return False
            self._kind = None
            return True
        if not self._begun and not self._buffer.lstrip().startswith("<"):
            self._kind, self._begun = "content", True  # no channel at all
            return bool(self._buffer)
        self._begun = True
        head, marker, rest = self._buffer.partition("<|message|>")
        if not marker:
            self._buffer = "" if last else self._buffer
            return False
        self._buffer = rest
        called = re.search(r"to=(?:functions\.)?([\w.-]+)", head)
        if called and self._takes_calls:
            self._parts.append(Part("call", called[1]))
            self._kind = "arguments"
        else:
            self._kind = "reasoning" if "analysis" in head else "content"
        return True


class _Value:
    """Finds the end of a JSON object or list."""

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = self._escaped = False

    def feed(self, text: str) -> int:
        """How many characters of `text` belong to it, if it ends in `text`; else 0."""
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
