"""`/v1/chat/completions`, as OpenAI defines it: answers a conversation, also with calls of tools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stowage.engine.prompts import Begin, unasked
from stowage.engine.request import Completion, Delta
from stowage.engine.sampling import TokenLogprob
from stowage.server.api_errors import bad
from stowage.server.apis.answer import Event, OpenAIAnswer, Scores, number
from stowage.server.apis.conversation import messages
from stowage.server.apis.generation_request import GenerationRequest
from stowage.server.apis.parsed_output import ChoiceParsers, ParsedOutput
from stowage.server.apis.reader import LOGPROBS_MAX, TOKENS_MOST, Conversation, Reader
from stowage.server.fields import Fields, parse_object
from stowage.server.structured import structured_outputs
from stowage.server.tools.incremental_parser import Part
from stowage.server.tools.request_tools import (
    RequestTools,
    Tool,
    check_kind,
    checked_tools,
    read_function,
    read_tool_choice,
    read_tools,
)
from stowage.server.vocabulary import Vocabulary


def read(reader: Reader, body: bytes | bytearray, begin: Begin = unasked) -> GenerationRequest:
    """Parse a request. `begin`: see `Prompts.read`. Raises ApiError."""
    fields = Fields(parse_object(body))
    fields.without_effect("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "metadata")
    fields.without_effect("store", "service_tier", "prediction")
    fields.neutral("functions", [])
    fields.neutral("function_call", "none", "auto")
    fields.neutral("modalities", ["text"])
    fields.neutral("verbosity", "medium")
    for name in ("audio", "web_search_options"):
        fields.neutral(name)
    template = reader.template_options(fields)
    model, n = reader.model(fields), reader.n(fields)
    old = fields.whole("max_tokens", None, 1, TOKENS_MOST)
    new_tokens = fields.whole("max_completion_tokens", old, 1, TOKENS_MOST)
    if old not in (None, new_tokens):
        raise bad("'max_tokens' and 'max_completion_tokens' differ; give one of them.", "max_tokens")
    wants, top = fields.flag("logprobs"), fields.whole("top_logprobs", None, 0, LOGPROBS_MAX)
    if top is not None and not wants:
        raise bad("'top_logprobs' needs 'logprobs' to be true.", "top_logprobs")
    logprobs = (top or 0) if wants else None
    params, wanted = reader.sampling(fields, logprobs), structured_outputs(fields)
    stream, include_usage = reader.stream(fields)
    tools = chat_tools(fields)
    cache_salt, raw = fields.text("cache_salt", "") or "", fields.take("messages")
    fields.finish()
    reader.count_choices(1, n)
    chat = Conversation(messages(raw), "messages", new_tokens, tools, template, wanted)
    prompt, params, syntax = reader.conversation(chat, params, begin)
    return GenerationRequest(
        model, (prompt,), n, params, cache_salt, stream, include_usage, logprobs, syntax=syntax, tools=tools
    )


def chat_tools(fields: Fields) -> RequestTools:
    """The tools of a request, in OpenAI's form. Raises ApiError."""
    found = tuple(_tool(one) for one in read_tools(fields))
    choice, name = read_tool_choice(fields, "function")
    return checked_tools(found, choice, name, parallel=fields.flag("parallel_tool_calls", True))


def _tool(fields: Fields) -> Tool:
    check_kind(fields, "function", "function")
    inside = fields.needed_inside("function")
    fields.finish()
    return read_function(inside)


class ChatAnswer(OpenAIAnswer):
    """Answers of /v1/chat/completions."""

    prefix, whole_object, piece_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, request: GenerationRequest, vocabulary: Vocabulary, *, exact: bool = True) -> None:
        super().__init__(request, vocabulary, exact=exact)
        self._parsers = ChoiceParsers(request, "call_")

    def opening(self) -> list[Event]:
        start = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return [("", self._piece([{"index": choice} | start])) for choice in range(self.request.choices)]

    def _choice(self, index: int, completion: Completion, scores: Scores) -> dict[str, Any]:
        spoken = self._parsers.whole(index, completion)
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in spoken.calls
        ]
        content = None if calls and not spoken.content else spoken.content
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        message |= {"reasoning_content": spoken.reasoning} if spoken.reasoning else {}
        message |= {"tool_calls": calls} if calls else {}
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(completion.logprobs or ()),
            "finish_reason": self._ending(completion, spoken),
        }

    def _grown(self, choice: int, delta: Delta, scores: Scores) -> list[dict[str, Any]]:
        logprobs = self._logprobs(delta.logprobs) if delta.logprobs else None
        before = len(self._parsers.spoken(choice).calls)
        deltas = self._deltas(choice, self._parsers.push(choice, delta), before)
        if not deltas and logprobs is None and delta.completion is None:
            return []
        found: list[dict[str, Any]] = [
            {"delta": one, "logprobs": None, "finish_reason": None} for one in deltas or [{}]
        ]
        found[0]["logprobs"] = logprobs
        found[-1]["finish_reason"] = self._ending(delta.completion, self._parsers.spoken(choice))
        return found

    def _deltas(self, choice: int, parts: list[Part], calls: int) -> list[dict[str, Any]]:
        """`calls`: how many tool calls had begun before these parts."""
        found: list[dict[str, Any]] = []
        for part in parts:
            if part.kind == "call":
                call = self._parsers.spoken(choice).calls[calls]
                begun = {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": ""}}
                found.append({"tool_calls": [{"index": calls} | begun]})
                calls += 1
            elif part.kind == "arguments":
                found.append({"tool_calls": [{"index": calls - 1, "function": {"arguments": part.text}}]})
            else:
                found.append({"content" if part.kind == "content" else "reasoning_content": part.text})
        return found

    def _ending(self, completion: Completion | None, spoken: ParsedOutput) -> str | None:
        reason = self._reason(completion)
        return "tool_calls" if reason == "stop" and spoken.calls else reason

    def _logprobs(self, reports: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if self.request.logprobs is None:
            return None
        count = self.request.logprobs
        content = [
            self._named(report.token_id, report.logprob)
            | {"top_logprobs": [self._named(*pair) for pair in report.top[:count]]}
            for report in reports
        ]
        return {"content": content, "refusal": None}

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self._vocabulary.bytes_of(token)
        return {"token": self._vocabulary.text_of(token), "logprob": number(logprob), "bytes": list(raw)}
