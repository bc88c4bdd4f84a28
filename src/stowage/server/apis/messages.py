"""`/v1/messages`, as Anthropic defines it: conversations in blocks of text, thinking, tool calls and tool results.

Owns its fields and the shapes of its answers. `input_tokens` are those that were computed, `cache_read_input_tokens`
those that were cached. Caching needs no request: `cache_control` has no effect.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Any, Final

from stowage.engine.prompts import Begin, unasked
from stowage.engine.request import Completion, Delta
from stowage.engine.sampling_params import StructuredOutputs
from stowage.server.api_errors import ApiError, anthropic_body, bad
from stowage.server.apis.answer import Answer, Event, Scores
from stowage.server.apis.conversation import listed, texts
from stowage.server.apis.generation_request import GenerationRequest
from stowage.server.apis.parsed_output import ChoiceParsers, ParsedOutput
from stowage.server.apis.reader import TOKENS_MOST, Conversation, Reader
from stowage.server.fields import Fields, parse_object
from stowage.server.structured import made_of, of_schema
from stowage.server.tools.request_tools import RequestTools, Tool, check_kind, checked_tools, read_function, read_tools
from stowage.server.vocabulary import Vocabulary

_CHOICES: Final = {"auto": "auto", "any": "required", "tool": "named", "none": "none"}


def read(reader: Reader, body: bytes | bytearray, begin: Begin = unasked) -> GenerationRequest:
    """Parse a request. `begin`: see `Prompts.read`. Raises ApiError."""
    return _read(reader, body, begin, counted=False)


def count(reader: Reader, body: bytes | bytearray, begin: Begin = unasked) -> dict[str, Any]:
    """`/v1/messages/count_tokens`: how many tokens a request's prompt has. Raises ApiError."""
    return {"input_tokens": len(_read(reader, body, begin, counted=True).prompts[0].tokens)}


def _read(reader: Reader, body: bytes | bytearray, begin: Begin, *, counted: bool) -> GenerationRequest:
    fields = Fields(parse_object(body))
    fields.without_effect("metadata", "service_tier", "inference_geo")
    model = reader.model(fields)
    if not counted:
        fields.need("max_tokens")
    new_tokens = fields.whole("max_tokens", None, 1, TOKENS_MOST)
    template = _thinking(fields.inside("thinking"), reader)
    effort, wanted = _output(fields, reader)
    params = reader.sampling(fields, stop="stop_sequences")
    stream, tools = fields.flag("stream"), _tools(fields)
    system = [{"role": "system", "content": texts(fields, "system")}] if fields.given("system") else []
    cache_salt, raw = fields.text("cache_salt", "") or "", fields.take("messages")
    fields.finish()
    told = _messages(raw)
    goes_on = told[-1]["role"] == "assistant" and not told[-1].get("tool_calls")
    if goes_on and wanted:
        what = f"{wanted[0]!r} makes an answer whole, so 'messages' may not end with the beginning of one."
        raise bad(what, wanted[0])
    template |= effort | {"add_generation_prompt": not goes_on, "continue_final_message": goes_on}
    chat = Conversation([*system, *told], "messages", new_tokens, tools, template, wanted)
    prompt, params, syntax = reader.conversation(chat, params, begin)
    return GenerationRequest(model, (prompt,), 1, params, cache_salt, stream, False, syntax=syntax, tools=tools)


def _thinking(inside: Fields | None, reader: Reader) -> dict[str, Any]:
    """`thinking` as a value for chat templates that have `enable_thinking`."""
    if inside is None:
        return {}
    kind = inside.needed_text("type")
    if kind not in ("enabled", "disabled", "adaptive"):
        raise bad("'thinking.type' must be enabled, disabled or adaptive.", "thinking.type")
    inside.without_effect("budget_tokens", "display")
    inside.finish()
    return {"enable_thinking": kind != "disabled"} if reader.chat_template.knows("enable_thinking") else {}


def _output(fields: Fields, reader: Reader) -> tuple[dict[str, Any], tuple[str, StructuredOutputs] | None]:
    """Of `output_config`: the effort as a value for the chat template, and the structure of the answer.
    `output_format` is what its `format` was called in the beta.
    """
    config, form = fields.inside("output_config"), fields.inside("output_format")
    effort: dict[str, Any] = {}
    if config is not None:
        effort = reader.effort(config.text("effort"), "output_config.effort")
        newer = config.inside("format")
        if newer is not None and form is not None:
            raise bad(
                "'output_config.format' and 'output_format' exclude each other; give one of them.", "output_format"
            )
        form = newer or form
        config.finish()
    if form is None:
        return effort, None
    where, kind = form.path("type"), form.needed_text("type")
    if kind != "json_schema":
        raise bad(f"{where!r} is {kind[:40]!r}; use json_schema.", where)
    return effort, made_of(where.removesuffix(".type"), of_schema(form))


def _tools(fields: Fields) -> RequestTools:
    found = tuple(_tool(one) for one in read_tools(fields))
    choice = fields.inside("tool_choice")
    if choice is None:
        return checked_tools(found, "auto", "", parallel=True)
    kind, name = choice.needed_text("type"), choice.text("name", "") or ""
    if kind not in _CHOICES:
        raise bad(f"'tool_choice.type' is {kind[:40]!r}; use one of {', '.join(_CHOICES)}.", "tool_choice.type")
    parallel = not choice.flag("disable_parallel_tool_use")
    choice.finish()
    return checked_tools(found, _CHOICES[kind], name, parallel=parallel)


def _tool(inside: Fields) -> Tool:
    check_kind(inside, "custom", "custom")
    inside.without_effect("cache_control", "input_examples")
    inside.need("input_schema")
    return read_function(inside, schema="input_schema")


def _messages(raw: Any) -> list[dict[str, Any]]:
    return [message for fields in listed(raw) for message in _message(fields)]


def _message(fields: Fields) -> list[dict[str, Any]]:
    """One message as messages for the chat template: each tool result is a message of its own."""
    role, content = fields.needed_text("role"), fields.take("content")
    if role not in ("user", "assistant"):
        where = fields.path("role")
        raise bad(f"{where!r} is {role[:40]!r}; use user or assistant, and 'system' beside 'messages'.", where)
    fields.finish()
    if isinstance(content, str):
        return [{"role": role, "content": fields.as_text("content", content)}]
    path = fields.path("content")
    if not isinstance(content, list) or not content or not all(isinstance(block, dict) for block in content):
        raise bad(f"{path!r} must be text, or a list of blocks.", path)
    blocks = [_block(Fields(block, f"{path}[{at}]"), role) for at, block in enumerate(content)]
    results = [block for kind, block in blocks if kind == "result"]
    said = {
        "role": role,
        "content": "\n".join(block["text"] for kind, block in blocks if kind == "text"),
        "tool_calls": [block for kind, block in blocks if kind == "call"],
        "reasoning_content": "".join(block["text"] for kind, block in blocks if kind == "thought"),
    }
    kept = {name: value for name, value in said.items() if value or name in ("role", "content")}
    return results + ([kept] if len(kept) > 2 or kept["content"] or not results else [])


def _block(fields: Fields, role: str) -> tuple[str, dict[str, Any]]:
    where = fields.path("type")
    kind = fields.needed_text("type")
    fields.without_effect("cache_control", "citations", "signature", "caller")
    found: tuple[str, dict[str, Any]]
    if kind == "text":
        found = "text", {"text": fields.needed_text("text")}
    elif kind in ("thinking", "redacted_thinking") and role == "assistant":
        fields.without_effect("data")
        found = "thought", {"text": fields.text("thinking", "") or ""}
    elif kind == "tool_use" and role == "assistant":
        called: dict[str, Any] = {"name": fields.needed_text("name"), "arguments": fields.mapping("input")}
        found = "call", {"id": fields.needed_text("id"), "type": "function", "function": called}
    elif kind == "tool_result" and role == "user":
        fields.without_effect("is_error")
        content = texts(fields) if fields.given("content") and fields.peek("content") != [] else ""
        fields.take("content")
        found = "result", {"role": "tool", "tool_call_id": fields.needed_text("tool_use_id"), "content": content}
    else:
        raise bad(f"{where!r} is {kind[:40]!r}, which this server does not support in messages of {role}.", where)
    fields.finish()
    return found


class MessageAnswer(Answer):
    """Answers of /v1/messages: one choice, in content blocks."""

    def __init__(self, request: GenerationRequest, vocabulary: Vocabulary, *, exact: bool = True) -> None:
        super().__init__(request, vocabulary, exact=exact)
        self._id = "msg_" + secrets.token_hex(12)
        self._parsers = ChoiceParsers(request, "toolu_")
        self._open: str = ""
        self._blocks: list[dict[str, Any]] = []
        """Those that have begun; of a call, `input` is text."""

    def whole(self, scores: Mapping[int, Scores]) -> dict[str, Any]:
        completion = self._ended[0]
        self.events(0, Delta(completion.text, [], completion), ())
        content = _content(self._blocks, is_cut=completion.finish_reason == "length")
        return self._frame(content) | self._ending(completion, self._parsers.spoken(0)) | {"usage": self._usage()}

    def opening(self) -> list[Event]:
        usage = {"input_tokens": self.request.prompt_tokens, "output_tokens": 0}
        usage |= {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
        started = self._frame([]) | {"stop_reason": None, "stop_sequence": None, "usage": usage}
        return [_event("message_start", message=started)]

    def events(self, choice: int, delta: Delta, scores: Scores) -> list[Event]:
        spoken, found = self._parsers.spoken(0), list[Event]()
        calls = len(spoken.calls)
        for part in self._parsers.push(0, delta):
            if part.kind == "call":
                call = spoken.calls[calls]
                calls += 1
                found += self._begin("call", {"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
            elif part.kind == "arguments":
                found.append(self._delta("input", "input_json_delta", "partial_json", part.text))
            elif part.kind == "reasoning":
                found += self._begin("thought", {"type": "thinking", "thinking": "", "signature": ""})
                found.append(self._delta("thinking", "thinking_delta", "thinking", part.text))
            else:
                found += self._begin("text", {"type": "text", "text": ""})
                found.append(self._delta("text", "text_delta", "text", part.text))
        return found

    def closing(self) -> list[Event]:
        ending = self._ending(self._ended[0], self._parsers.spoken(0))
        return [*self._end(), _event("message_delta", delta=ending, usage=self._usage()), _event("message_stop")]

    def failure(self, error: ApiError) -> Event:
        return "error", anthropic_body(error)

    def _begin(self, kind: str, block: dict[str, Any]) -> list[Event]:
        """Begin a block, unless one of that kind is open; every call is a block of its own."""
        if self._open == kind != "call":
            return []
        ended = self._end()
        self._open = kind
        self._blocks.append(block | ({"input": ""} if kind == "call" else {}))
        return [*ended, _event("content_block_start", index=len(self._blocks) - 1, content_block=block)]

    def _delta(self, field: str, kind: str, name: str, text: str) -> Event:
        """More of the open block's `field`, as a delta of the type `kind` has it under `name`."""
        self._blocks[-1][field] += text
        return _event("content_block_delta", index=len(self._blocks) - 1, delta={"type": kind, name: text})

    def _end(self) -> list[Event]:
        if not self._open:
            return []
        self._open = ""
        return [_event("content_block_stop", index=len(self._blocks) - 1)]

    def _frame(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._id, "type": "message", "role": "assistant", "model": self.request.model, "content": content}

    def _ending(self, completion: Completion, spoken: ParsedOutput) -> dict[str, Any]:
        reason = "max_tokens" if completion.finish_reason == "length" else "end_turn"
        if completion.stop_text is not None:
            reason = "stop_sequence"
        elif spoken.calls and reason == "end_turn":
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": completion.stop_text}

    def _usage(self) -> dict[str, Any]:
        cached = self.cached_tokens
        return {
            "input_tokens": self.request.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self.answer_tokens,
        }


def _content(blocks: list[dict[str, Any]], *, is_cut: bool) -> list[dict[str, Any]]:
    """Content blocks. A call whose arguments are no JSON object is text, since it was not enforced; in an answer that
    was cut off it is a block without input, as clients look for it there (Anthropic, "Handling stop reasons").
    """
    found: list[dict[str, Any]] = []
    for block in blocks:
        if block["type"] != "tool_use":
            found.append(block)
            continue
        try:
            given = json.loads(block["input"])
        except (ValueError, RecursionError):
            given = {} if is_cut and block is blocks[-1] else None
        if isinstance(given, dict):
            found.append(block | {"input": given})
        else:
            found.append({"type": "text", "text": f"{block['name']}({block['input']}"})
    return found or [{"type": "text", "text": ""}]


def _event(name: str, **told: Any) -> Event:
    return name, {"type": name} | told
