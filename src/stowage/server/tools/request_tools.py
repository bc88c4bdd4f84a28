"""The tools of a request, which the model may call: `tools`, `tool_choice`, `parallel_tool_calls`.

Owns the checks of a tool. APIs read their own fields into these classes, and chat templates get them in OpenAI's form.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Final

from stowage.server.api_errors import bad
from stowage.server.fields import Fields

TOOLS_MAX: Final = 1024
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_DESCRIPTION_CHARACTERS: Final = 1 << 16
_CHOICES: Final = ("none", "auto", "required")


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. parameters: their JSON schema; where: the path of the field that the tool was
    read from; schema: the name of the field with its parameters.
    """

    name: str
    description: str
    parameters: dict[str, Any]
    strict: bool
    where: str
    schema: str = "parameters"

    @property
    def described(self) -> dict[str, Any]:
        """The tool as chat templates take it."""
        told = {"name": self.name} | ({"description": self.description} if self.description else {})
        return {"type": "function", "function": told | {"parameters": self.parameters}}


@dataclass(frozen=True, slots=True)
class RequestTools:
    """The tools of a request. choice: `none`, `auto`, `required`, or `named`: the one called `name`."""

    tools: tuple[Tool, ...] = ()
    choice: str = "none"
    name: str = ""
    parallel: bool = True

    @property
    def is_forced(self) -> bool:
        """Whether the answer must be tool calls."""
        return self.choice in ("required", "named")

    @property
    def callable(self) -> tuple[Tool, ...]:
        """The tools that the answer may call."""
        if self.choice == "none":
            return ()
        return tuple(tool for tool in self.tools if self.choice != "named" or tool.name == self.name)


NO_TOOLS: Final = RequestTools()
"""No tools."""


def checked_tools(tools: tuple[Tool, ...], choice: str, name: str, *, parallel: bool) -> RequestTools:
    """Raises ApiError when two tools have one name, or `tool_choice` asks for one that is not there."""
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        twice = next(tool for at, tool in enumerate(tools) if tool.name in names[:at])
        raise bad(f"'{twice.where}.name': there is another tool called {twice.name!r}.", f"{twice.where}.name")
    if choice in ("required", "named") and not tools:
        raise bad("'tool_choice' wants a tool to be called, and there are no 'tools'.", "tool_choice")
    if choice == "named" and name not in names:
        raise bad(f"'tool_choice' names {name[:80]!r}, which is none of 'tools'.", "tool_choice")
    return RequestTools(tools, choice if tools else "none", name, parallel)


def read_tools(fields: Fields) -> list[Fields]:
    """The entries of `tools`. Raises ApiError."""
    raw = fields.take("tools")
    if raw is None:
        return []
    where = fields.path("tools")
    if not isinstance(raw, list):
        raise fields.wrong("tools", raw, "a list of tools")
    if len(raw) > TOOLS_MAX:
        raise bad(f"{where!r} has {len(raw)} tools; at most {TOOLS_MAX} can be offered.", where)
    wrong = next((at for at, one in enumerate(raw) if not isinstance(one, dict)), None)
    if wrong is not None:
        raise bad(f"'{where}[{wrong}]' must be an object.", f"{where}[{wrong}]")
    return [Fields(one, f"{where}[{at}]") for at, one in enumerate(raw)]


def check_kind(fields: Fields, default: str | None, wanted: str) -> None:
    """Raises ApiError for a tool of another `type` than `wanted`."""
    where, kind = fields.path("type"), fields.text("type", default)
    if kind != wanted:
        raise bad(f"{where!r} is {str(kind)[:40]!r}; only {wanted!r} is supported by this server.", where)


def read_function(inside: Fields, *, schema: str = "parameters") -> Tool:
    """A function's `name`, `description`, `parameters` and `strict`. Raises ApiError."""
    name, where = inside.needed_text("name"), inside.where
    if not _NAME.fullmatch(name):
        what = f"'{where}.name' is {name[:80]!r}; it must be 1 to 128 letters, digits, dots, _ or -."
        raise bad(what, f"{where}.name")
    description = inside.text("description", "") or ""
    if len(description) > _DESCRIPTION_CHARACTERS:
        most = f"{len(description)} characters; at most {_DESCRIPTION_CHARACTERS} can be used."
        raise bad(f"'{where}.description' has {most}", f"{where}.description")
    strict = inside.flag("strict")
    parameters = inside.mapping(schema) or {"type": "object", "properties": {}}
    if parameters.get("type", "object") != "object":
        what = f"'{where}.{schema}' must be a JSON schema of type object."
        raise bad(what, f"{where}.{schema}")
    inside.finish()
    return Tool(name, description, parameters, strict, where, schema)


def read_tool_choice(fields: Fields, inside: str | None) -> tuple[str, str]:
    """Reads OpenAI's `tool_choice` into `RequestTools.choice` and `RequestTools.name`. `inside`: the field of the
    object that holds the name, or None when `tool_choice` itself holds it. Raises ApiError.
    """
    raw, where = fields.take("tool_choice"), fields.path("tool_choice")
    if raw is None:
        return "auto", ""
    if isinstance(raw, str) and raw in _CHOICES:
        return raw, ""
    if not isinstance(raw, dict):
        raise fields.wrong("tool_choice", raw, f"one of {', '.join(_CHOICES)}, or an object that names a function")
    named = Fields(raw, where)
    kind = named.text("type")
    if kind != "function":
        shown = json.dumps(kind)[:40]
        raise bad(f"'{where}.type' is {shown}, which is not supported by this server; use 'function'.", f"{where}.type")
    holder = named if inside is None else named.needed_inside(inside)
    name = holder.needed_text("name")
    if holder is not named:
        holder.finish()
    named.finish()
    return "named", name


def parse_arguments(text: str, where: str) -> dict[str, Any]:
    """The arguments of a call in an earlier message. Raises ApiError for what is no JSON object."""
    if not text.strip():
        return {}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise bad(f"{where!r} is no JSON: {str(error)[:200]}.", where) from error
    if not isinstance(found, dict):
        raise bad(f"{where!r} must be a JSON object, as text.", where)
    return found
