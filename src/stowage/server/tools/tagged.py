"""Calls whose arguments stand between tags, each as text: they become the JSON object that clients are told of.

    <function=f><parameter=city>Rome</parameter><parameter=days>3</parameter></function>
    {"city": "Rome", "days": 3}

The tool's schema says what a value is: text where it allows strings (sent on as it is written), else JSON (sent when it
is whole). What is no JSON stays text. A call that is cut off leaves its JSON unfinished, as in formats that are JSON.
"""

from __future__ import annotations

import json
import re
from collections import ChainMap
from collections.abc import Mapping
from typing import Any, Final

from stowage.engine.endless_schema import pointed
from stowage.server.tools.formats import Tags, ToolFormat
from stowage.server.tools.incremental_parser import CallParser, Part

_HEAD_CHARACTERS: Final = 256
_PARTS_MOST: Final = 16
"""References in a row that are followed, and members of an `allOf` that are looked at."""
_PYTHON: Final = {"True": True, "False": False, "None": None}
"""What templates that print values as Python does teach a model to write."""


class TaggedCalls(CallParser):
    """The calls of one answer. schemas: of each tool's arguments, by tool name. forced: it is nothing else."""

    def __init__(self, form: ToolFormat, tags: Tags, schemas: Mapping[str, Mapping[str, Any]], *, forced: bool) -> None:
        super().__init__()
        self._forced = forced
        self._form, self._tags, self._schemas = form, tags, schemas
        self._name, self._key = re.compile(tags.name), re.compile(tags.key)
        self._ends = ("\n" + tags.end, tags.end) if tags.lines else (tags.end,)
        self._schema: Mapping[str, Any] = {}
        self._properties: Mapping[str, Any] = {}
        self._first = self._is_text = self._entered = False

    def _read_text(self, last: bool) -> bool:
        marker = self._emit_until("content", (self._form.trigger,), last and not (self.is_cut and self._forced))
        if marker:
            self._marker, self._state = marker, "name"
        return bool(marker)

    def _read_name(self, last: bool) -> bool:
        """The tool's name; without one, what looked like a call is content."""
        found = self._name.match(self._buffer[:_HEAD_CHARACTERS])
        if found is None:
            if (not last or self.is_cut) and len(self._buffer) < _HEAD_CHARACTERS:
                return False
            self._parts.append(Part("content", self._marker))
            self._marker, self._state = "", "text"
            return True
        self._parts.append(Part("call", found[1]))
        self._buffer = self._buffer[found.end() :]
        self._schema = self._schemas.get(found[1], {})
        self._properties, _ = fields_of(self._schema)
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
            self._is_text = allows_text(self._properties.get(found[1]), self._schema)
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
        if (not last or self.is_cut) and any(one.startswith(text) and one != text for one in known):
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


def allows_text(schema: Any, whole: Any, seen: set[str] | None = None) -> bool:
    """Whether a value of this schema, a part of `whole`, may be a string. Then it is one: tags do not tell `null` from
    "null". seen: references that were looked at.
    """
    seen = set() if seen is None else seen
    name = schema.get("$ref") if isinstance(schema, Mapping) else None
    if not isinstance(schema, Mapping) or name in seen:
        return False
    if isinstance(name, str):
        seen.add(name)
    known = view(schema, whole)
    for several in ("anyOf", "oneOf"):
        if isinstance(known.get(several), list):
            return any(allows_text(option, whole, seen) for option in known[several])
    kind = known.get("type")
    if kind is not None:
        return kind == "string" or (isinstance(kind, list) and "string" in kind)
    values = known["enum"] if isinstance(known.get("enum"), list) else [known.get("const")]
    return any(isinstance(value, str) for value in values)


def view(schema: Any, whole: Any) -> ChainMap[str, Any]:
    """What a schema says, with what it refers to in `whole` and lists in `allOf`: what is nearest comes first."""
    parts = _followed(schema, whole)
    listed = ChainMap(*parts).get("allOf")
    for part in listed[:_PARTS_MOST] if isinstance(listed, list) else ():
        parts += _followed(part, whole)
    return ChainMap(*parts)


def fields_of(schema: Any) -> tuple[dict[str, Any], list[Any]]:
    """The properties of an object, and the names of those that it must have."""
    properties: dict[str, Any] = {}
    required: list[Any] = []
    for part in view(schema, schema).maps:
        if isinstance(part.get("properties"), dict):
            properties = properties | part["properties"]
        required += part["required"] if isinstance(part.get("required"), list) else []
    return properties, required


def _followed(schema: Any, whole: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while isinstance(schema, dict) and len(found) < _PARTS_MOST:
        found.append(schema)
        name = schema.get("$ref")
        schema = pointed(whole, name) if isinstance(name, str) else None
    return found


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
