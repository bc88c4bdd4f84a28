"""`/v1/responses`, as OpenAI defines it: input items in, output items out, with named events.

Reads its items; the shapes of its answers are in `response_events`. Nothing is kept between requests:
`previous_response_id` is refused, and `store` has no effect. A client sends the earlier items again, and their prefix
comes from the cache.
"""

from __future__ import annotations

from typing import Any, Final

from stowage.engine.prompts import Begin, unasked
from stowage.engine.sampling_params import StructuredOutputs
from stowage.server.api_errors import bad
from stowage.server.apis.conversation import texts
from stowage.server.apis.generation_request import GenerationRequest
from stowage.server.apis.reader import TOKENS_MOST, Conversation, Reader
from stowage.server.fields import Fields, parse_object
from stowage.server.structured import made_of, of_schema
from stowage.server.tools.request_tools import (
    RequestTools,
    Tool,
    check_kind,
    checked_tools,
    parse_arguments,
    read_function,
    read_tool_choice,
    read_tools,
)

_ROLES: Final = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_TEXTS: Final = ("input_text", "output_text", "text")
_LOGPROBS: Final = "message.output_text.logprobs"
_KEPT: Final = ("previous_response_id", "conversation")


def read(reader: Reader, body: bytes | bytearray, begin: Begin = unasked) -> GenerationRequest:
    """Parse a request. `begin`: see `Prompts.read`. Raises ApiError."""
    raw = parse_object(body)
    fields = Fields(raw)
    fields.without_effect("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "metadata")
    fields.without_effect("store", "service_tier", "max_tool_calls")
    if _LOGPROBS in (fields.take("include") or ()):
        what = f"'include' has {_LOGPROBS!r}, which is not supported by this server; ask /v1/chat/completions for it."
        raise bad(what, "include", "unsupported_parameter")
    for name in _KEPT:
        if fields.take(name) is not None:
            what = f"{name!r} cannot be used: this server keeps no responses. Send the earlier items in 'input' again."
            raise bad(what, name, "unsupported_parameter")
    fields.neutral("background", False)
    fields.neutral("truncation", "disabled")
    fields.neutral("prompt")
    fields.neutral("top_logprobs", 0)
    template = _reasoning(fields.inside("reasoning"), reader) | reader.template_options(fields)
    model = reader.model(fields)
    new_tokens = fields.whole("max_output_tokens", None, 1, TOKENS_MOST)
    wanted = _format(fields.inside("text"))
    params = reader.sampling(fields)
    stream, _ = reader.stream(fields)
    tools = _tools(fields)
    instructions, cache_salt = fields.text("instructions"), fields.text("cache_salt", "") or ""
    messages = _input(fields)
    fields.finish()
    if instructions:
        messages.insert(0, {"role": "system", "content": instructions})
    chat = Conversation(messages, "input", new_tokens, tools, template, wanted)
    prompt, params, syntax = reader.conversation(chat, params, begin)
    said = {name: raw[name] for name in _REPEATED if raw.get(name) is not None}
    return GenerationRequest(
        model, (prompt,), 1, params, cache_salt, stream, False, syntax=syntax, tools=tools, said=said
    )


_REPEATED: Final = (
    "instructions max_output_tokens parallel_tool_calls reasoning temperature text tool_choice tools top_p metadata "
    "user"
).split()


def _reasoning(inside: Fields | None, reader: Reader) -> dict[str, Any]:
    if inside is None:
        return {}
    inside.without_effect("summary", "generate_summary")
    found = reader.effort(inside.text("effort"), "reasoning.effort")
    inside.finish()
    return found


def _format(inside: Fields | None) -> tuple[str, StructuredOutputs] | None:
    if inside is None:
        return None
    inside.neutral("verbosity", "medium")
    form = inside.inside("format")
    inside.finish()
    if form is None:
        return None
    kind = form.needed_text("type")
    if kind == "json_schema":
        return made_of("text.format", of_schema(form))
    form.finish()
    if kind not in ("text", "json_object"):
        raise bad(f"'text.format.type' is {kind[:40]!r}; use text, json_object or json_schema.", "text.format.type")
    return made_of("text.format", {"json_object": True}) if kind == "json_object" else None


def _tools(fields: Fields) -> RequestTools:
    found = tuple(_tool(one) for one in read_tools(fields))
    choice, name = read_tool_choice(fields, None)
    return checked_tools(found, choice, name, parallel=fields.flag("parallel_tool_calls", True))


def _tool(inside: Fields) -> Tool:
    check_kind(inside, None, "function")
    return read_function(inside)


def _input(fields: Fields) -> list[dict[str, Any]]:
    """Messages for the chat template; calls and reasoning that follow each other are one message."""
    raw = fields.take("input")
    if isinstance(raw, str):
        return [{"role": "user", "content": fields.as_text("input", raw)}]
    if not isinstance(raw, list) or not raw or not all(isinstance(item, dict) for item in raw):
        raise bad("'input' must be text, or a list of items; it may not be empty.", "input")
    found: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    for at, item in enumerate(raw):
        _add(found, Fields(item, f"input[{at}]"), names)
    return found


def _add(found: list[dict[str, Any]], item: Fields, names: dict[str, str]) -> None:
    kind = item.text("type", "message")
    item.without_effect("id", "status", "phase")
    if kind == "message":
        role = item.needed_text("role")
        if role not in _ROLES:
            raise bad(f"{item.path('role')!r} must be one of {', '.join(_ROLES)}.", item.path("role"))
        said = {"role": _ROLES[role], "content": texts(item, kinds=_TEXTS)}
        if role == "assistant":
            _spoken(found).update(said)
        else:
            found.append(said)
    elif kind == "function_call":
        name, identity = item.needed_text("name"), item.needed_text("call_id")
        arguments = parse_arguments(item.text("arguments", "") or "", item.path("arguments"))
        names[identity] = name
        call = {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}
        _spoken(found).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        identity = item.needed_text("call_id")
        content = texts(item, "output", _TEXTS)
        name = names.get(identity, "")
        found.append({"role": "tool", "tool_call_id": identity, "name": name, "content": content})
    elif kind == "reasoning":
        item.without_effect("summary", "encrypted_content")
        parts = item.take("content")
        thought = "".join(str(part.get("text", "")) for part in parts or () if isinstance(part, dict))
        if thought:
            _spoken(found, new=True).update(reasoning_content=thought, thinking=thought)
    else:
        where = item.path("type")
        raise bad(f"{where!r} is {str(kind)[:40]!r}, which this server does not support.", where)
    item.finish()


def _spoken(found: list[dict[str, Any]], *, new: bool = False) -> dict[str, Any]:
    """The message that the model is in the middle of."""
    last = found[-1] if found else {}
    if new or last.get("role") != "assistant":
        found.append({"role": "assistant", "content": ""})
    return found[-1]
