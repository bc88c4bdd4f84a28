"""Calls whose arguments stand between tags, each as text: they become the JSON object that clients are told of.

    <function=f><parameter=city>Rome</parameter><parameter=days>3</parameter></function>
    {"city": "Rome", "days": 3}

The tool's schema says what a value is: text where it allows strings (sent on as it is written), else JSON (sent when it
is whole). What is no JSON stays text. A call that is cut off leaves its JSON unfinished, as in formats that are JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from stowage.server.tools.formats import Tags, ToolFormat
from stowage.server.tools.incremental_parser import IncrementalParser, Part

__all__ = ["TaggedCalls", "allows_text"]

_HEAD_CHARACTERS: Final = 256
_PYTHON: Final = {"True": True, "False": False, "None": None}
"""What templates that print values as Python does teach a model to write."""


class TaggedCalls(IncrementalParser):
    """The calls of one answer. schemas: of each tool's arguments, by tool name."""

    def __init__(self, form: ToolFormat, tags: Tags, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__()
        self._form, self._tags, self._schemas = form, tags, schemas
        self._name, self._key = re.compile(tags.name), re.compile(tags.key)
        self._ends = ("\n" + tags.end, tags.end) if tags.lines else (tags.end,)
        self._state = "text"
        self._marker = ""
        self._properties: Mapping[str, Any] = {}
        self._first = self._is_text = self._entered = False

    def feed(self, text: str, *, last: bool) -> list[Part]:
        parts = super().feed(text, last=last)
        if last and self._marker:
            parts.append(Part("content", self._marker))
        return parts

    def _step(self, last: bool) -> bool:
        return bool(getattr(self, f"_read_{self._state}")(last))

    def _read_text(self, last: bool) -> bool:
        marker = self._emit_until("content", (self._form.trigger,), last)
        if marker:
            self._marker, self._state = marker, "name"
        return bool(marker)

    def _read_name(self, last: bool) -> bool:
        """The tool's name; without one, what looked like a call is content."""
        found = self._name.match(self._buffer[:_HEAD_CHARACTERS])
        if found is None:
            if not last and len(self._buffer) < _HEAD_CHARACTERS:
                return False
            self._parts.append(Part("content", self._marker))
            self._marker, self._state = "", "text"
            return True
        self._parts.append(Part("call", found[1]))
        self._buffer = self._buffer[found.end() :]
        properties = self._schemas.get(found[1], {}).get("properties")
        self._properties = properties if isinstance(properties, Mapping) else {}
        self._marker, self._state, self._first = "", "next_argument", True
        return True

    def _read_next_argument(self, last: bool) -> bool:
        """The name of the next argument, or the end of the call; anything else is skipped."""
        text = self._buffer.lstrip()
        end = next((one for one in self._tags.ends if text.startswith(one)), "")
        if end:
            self._parts.append(Part("arguments", "{}" if self._first else "}"))
            self._buffer, self._state = text[len(end) :], "after_call"
            return True
        if found := self._key.match(text[:_HEAD_CHARACTERS]):
            before = "{" if self._first else ", "
            self._parts.append(Part("arguments", f"{before}{json.dumps(found[1], ensure_ascii=False)}: "))
            self._buffer, self._state = text[found.end() :], "argument_value"
            self._is_text = allows_text(self._properties.get(found[1]))
            self._first = self._entered = False
            if self._is_text:
                self._parts.append(Part("arguments", '"'))
            return True
        if not text or (text[0] == "<" and not last and len(text) < _HEAD_CHARACTERS):
            return False
        _, begins, rest = text[1:].partition("<")
        self._buffer = begins + rest
        return True

    def _read_argument_value(self, last: bool) -> bool:
        if self._tags.lines and not self._entered:
            self._buffer = self._buffer.removeprefix("\n")
        self._entered = True
        if self._is_text:
            at = len(self._parts)
            ended = bool(self._emit_until("arguments", self._ends, last))
            self._parts[at:] = [Part(part.kind, _quoted(part.text)) for part in self._parts[at:]]
            if ended:
                self._parts.append(Part("arguments", '"'))
        else:
            ended = self._tags.end in self._buffer
            if not ended and not last:
                return False
            value, _, rest = self._buffer.partition(self._tags.end)
            self._parts.append(Part("arguments", _json_of(value.strip()) if ended else value))
            self._buffer = rest
        self._state = "next_argument" if ended else "argument_value"
        return ended

    def _read_after_call(self, last: bool) -> bool:
        """After a call: the next one, or text."""
        text = self._buffer.lstrip()
        if not text:
            self._buffer = "" if last else self._buffer
            return False
        closing, trigger, again = self._tags.closing, self._form.trigger, self._tags.again
        known = [one for one in (closing, trigger, again) if one]
        if not last and any(one.startswith(text) and one != text for one in known):
            return False
        if again and text.startswith(again):
            self._buffer, self._state = text, "name"
        elif text.startswith(trigger):
            self._buffer, self._state, self._marker = text[len(trigger) :], "name", trigger
        elif closing and text.startswith(closing):
            self._buffer = text[len(closing) :]
        else:
            self._state = "text"
        return True


def allows_text(schema: Any) -> bool:
    """Whether a value of this schema may be a string. Then it is taken as one: tags do not tell `null` from "null"."""
    if not isinstance(schema, Mapping):
        return False
    for several in ("anyOf", "oneOf"):
        if isinstance(schema.get(several), list):
            return any(map(allows_text, schema[several]))
    kind = schema.get("type")
    if kind is not None:
        return kind == "string" or (isinstance(kind, list) and "string" in kind)
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema.get("const")]
    return any(isinstance(value, str) for value in values)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _json_of(text: str) -> str:
    """`text` unchanged if it is JSON, else as a JSON string."""
    if text in _PYTHON:
        return json.dumps(_PYTHON[text])
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return text


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
