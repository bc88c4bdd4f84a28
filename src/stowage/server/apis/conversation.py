"""Converts the messages of a conversation from OpenAI's form to the one that chat templates take."""

from __future__ import annotations

from typing import Any, Final

from stowage.server.api_errors import bad
from stowage.server.fields import Fields
from stowage.server.tools.request_tools import check_kind, parse_arguments

_ROLES: Final = {role: role for role in ("system", "user", "assistant", "tool")} | {"developer": "system"}


def messages(raw: Any) -> list[dict[str, Any]]:
    """The messages of a request. Raises ApiError."""
    found, names = [], {}
    for fields in listed(raw):
        message = _message(fields)
        for call in message.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
        if message["role"] == "tool" and "name" not in message:
            message["name"] = names.get(message["tool_call_id"], "")
        found.append(message)
    return found


def listed(raw: Any) -> list[Fields]:
    """The messages of a request, of which nothing is read yet. Raises ApiError."""
    if not isinstance(raw, list) or not raw:
        raise bad("'messages' must be a list of messages with 'role' and 'content'; it may not be empty.", "messages")
    for at, item in enumerate(raw):
        if not isinstance(item, dict):
            raise bad(f"'messages[{at}]' must be an object with 'role' and 'content'.", f"messages[{at}]")
    return [Fields(item, f"messages[{at}]") for at, item in enumerate(raw)]


def _message(fields: Fields) -> dict[str, Any]:
    role, where = fields.needed_text("role"), fields.path("role")
    if role not in _ROLES:
        known = ", ".join(sorted(_ROLES))
        raise bad(f"{where!r} is {role[:40]!r}, which this server does not support; use one of {known}.", where)
    for name in ("function_call", "audio"):
        fields.neutral(name, [])
    fields.without_effect("refusal", "annotations")
    message: dict[str, Any] = {"role": _ROLES[role]}
    if author := fields.text("name"):
        message["name"] = author
    if role == "assistant":
        message |= _spoken(fields)
    else:
        fields.neutral("tool_calls", [])
        if role == "tool":
            message["tool_call_id"] = fields.needed_text("tool_call_id")
        message["content"] = texts(fields)
    fields.finish()
    return message


def _spoken(fields: Fields) -> dict[str, Any]:
    """An assistant's message: content, reasoning and tool calls."""
    thought = fields.text("reasoning_content") or fields.text("reasoning") or ""
    fields.without_effect("reasoning")
    raw = fields.take("tool_calls")
    if raw is not None and not isinstance(raw, list):
        raise fields.wrong("tool_calls", raw, "a list of calls")
    where = fields.path("tool_calls")
    calls = [_call(one, f"{where}[{at}]") for at, one in enumerate(raw or ())]
    content = texts(fields) if fields.given("content") or not calls else ""
    fields.take("content")
    found: dict[str, Any] = {"content": content}
    if thought:
        found |= {"reasoning_content": thought, "thinking": thought}  # as gpt-oss calls it
    return found | ({"tool_calls": calls} if calls else {})


def _call(raw: Any, where: str) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise bad(f"{where!r} must be an object with 'id', 'type' and 'function'.", where)
    fields = Fields(raw, where)
    fields.without_effect("index")
    identity = fields.text("id", "") or ""
    check_kind(fields, "function", "function")
    inside = fields.needed_inside("function")
    name, arguments = inside.needed_text("name"), inside.text("arguments", "") or ""
    inside.finish()
    fields.finish()
    parsed = parse_arguments(arguments, f"{where}.function.arguments")
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": parsed}}


def texts(fields: Fields, name: str = "content", kinds: tuple[str, ...] = ("text",)) -> str:
    """The text of a message; parts of the types `kinds` are joined with line breaks. Raises ApiError."""
    where, raw = fields.path(name), fields.take(name)
    if isinstance(raw, str):
        return fields.as_text(name, raw)
    shown = f"type {kinds[0]!r}"
    if not isinstance(raw, list) or not raw:
        raise bad(f"{where!r} must be text, or a list of parts of {shown}.", where)
    found = []
    for at, part in enumerate(raw):
        inside = Fields(part, f"{where}[{at}]") if isinstance(part, dict) else None
        if inside is None or inside.text("type") not in kinds:
            raise bad(f"'{where}[{at}]' is no part of {shown}, and others are not supported by this server.", where)
        found.append(inside.needed_text("text"))
        inside.without_effect("annotations", "logprobs", "cache_control", "citations")
        inside.finish()
    return "\n".join(found)
