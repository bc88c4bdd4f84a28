"""Answers of `/v1/responses`: output items, and the events of their stream.

response.created  response.output_item.added  ...delta  ...done  response.output_item.done  response.completed
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any, Final

from stowage.engine.request import Completion, Delta
from stowage.server.api_errors import ApiError
from stowage.server.apis.answer import Answer, Event, Scores
from stowage.server.apis.generation_request import GenerationRequest
from stowage.server.apis.parsed_output import Call, ChoiceParsers
from stowage.server.vocabulary import Vocabulary

_DEFAULTS: Final[dict[str, Any]] = {
    "instructions": None, "max_output_tokens": None, "parallel_tool_calls": True, "temperature": 1.0, "top_p": 1.0,
    "reasoning": {"effort": None, "summary": None}, "text": {"format": {"type": "text"}}, "tool_choice": "auto",
    "tools": [], "metadata": {}, "user": None, "previous_response_id": None, "store": False, "truncation": "disabled",
    "background": False, "service_tier": "default", "error": None,
}  # fmt: skip


class ResponseAnswer(Answer):
    """One choice, as items: reasoning, messages and function calls, in the order in which the model wrote them."""

    def __init__(self, request: GenerationRequest, vocabulary: Vocabulary, *, exact: bool = True) -> None:
        super().__init__(request, vocabulary, exact=exact)
        self._id = "resp_" + secrets.token_hex(16)
        self._parsers = ChoiceParsers(request, "call_")
        self._number = 0
        self._items: list[dict[str, Any]] = []
        self._open = ""
        self._text = ""

    def whole(self, scores: Mapping[int, Scores]) -> dict[str, Any]:
        completion = self._ended[0]
        self.events(0, Delta(completion.text, [], completion), ())
        response: dict[str, Any] = self.closing()[-1][1]["response"]
        return response

    def opening(self) -> list[Event]:
        begun = self._response([], None)
        return [self._event("response.created", response=begun), self._event("response.in_progress", response=begun)]

    def events(self, choice: int, delta: Delta, scores: Scores) -> list[Event]:
        spoken, found = self._parsers.spoken(0), list[Event]()
        calls = len(spoken.calls)
        for part in self._parsers.push(0, delta):
            if part.kind == "call":
                found += self._begin("call", _called(spoken.calls[calls]))
                calls += 1
            elif part.kind == "arguments":
                found.append(self._delta("response.function_call_arguments.delta", part.text))
            elif part.kind == "reasoning":
                found += self._begin("thought", _thought())
                found.append(self._delta("response.reasoning_text.delta", part.text, content_index=0))
            else:
                found += self._begin("text", _message())
                found.append(self._delta("response.output_text.delta", part.text, content_index=0, logprobs=[]))
        return found

    def closing(self) -> list[Event]:
        completion = self._ended[0]
        ended = [] if self._items or self._open else self._begin("text", _message())
        ended += self._end()
        response = self._response(self._items, completion)
        return [*ended, self._event(f"response.{response['status']}", response=response)]

    def failure(self, error: ApiError) -> Event:
        return self._event("error", code=error.code, message=error.message, param=error.param)

    def _begin(self, kind: str, item: dict[str, Any]) -> list[Event]:
        """Begin an item, unless one of that kind is open; every call is an item of its own."""
        if self._open == kind != "call":
            return []
        ended = self._end()
        self._open, self._text = kind, ""
        self._items.append(item)
        at = len(self._items) - 1
        shown = item | ({"content": []} if "content" in item else {})  # as it is now: it grows
        found = [*ended, self._event("response.output_item.added", output_index=at, item=shown)]
        if kind == "text":
            found.append(self._part("response.content_part.added", item["content"][0]))
        return found

    def _end(self) -> list[Event]:
        """End the open item."""
        if not self._open:
            return []
        kind, item, text = self._open, self._items[-1], self._text
        self._open = ""
        done: list[Event] = []
        if kind == "call":
            item["arguments"] = text
            done.append(self._told("response.function_call_arguments.done", arguments=text, name=item["name"]))
        elif kind == "thought":
            item["content"] = [{"type": "reasoning_text", "text": text}]
            done.append(self._told("response.reasoning_text.done", content_index=0, text=text))
        else:
            item["content"] = [_said(text)]
            done.append(self._told("response.output_text.done", content_index=0, text=text, logprobs=[]))
            done.append(self._part("response.content_part.done", item["content"][0]))
        item["status"] = "completed"
        at = len(self._items) - 1
        return [*done, self._event("response.output_item.done", output_index=at, item=item)]

    def _delta(self, name: str, text: str, **more: Any) -> Event:
        self._text += text
        return self._told(name, delta=text, **more)

    def _part(self, name: str, part: dict[str, Any]) -> Event:
        return self._told(name, content_index=0, part=part)

    def _told(self, event: str, /, **more: Any) -> Event:
        """An event of the open item."""
        at = len(self._items) - 1
        return self._event(event, item_id=self._items[at]["id"], output_index=at, **more)

    def _event(self, event: str, /, **told: Any) -> Event:
        self._number += 1
        return event, {"type": event, "sequence_number": self._number - 1} | told

    def _response(self, output: list[dict[str, Any]], completion: Completion | None) -> dict[str, Any]:
        cut = completion is not None and completion.finish_reason == "length"
        status = "in_progress" if completion is None else "incomplete" if cut else "completed"
        return {
            **_DEFAULTS,
            **self.request.said,
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "model": self.request.model,
            "output": list(output),
            "usage": None if completion is None else self._usage(),
        }

    def _usage(self) -> dict[str, Any]:
        thought = self._vocabulary.count(self._parsers.spoken(0).reasoning)
        return {
            "input_tokens": self.request.prompt_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens},
            "output_tokens": self.answer_tokens,
            "output_tokens_details": {"reasoning_tokens": min(thought, self.answer_tokens)},
            "total_tokens": self.request.prompt_tokens + self.answer_tokens,
        }


def _message() -> dict[str, Any]:
    identity = "msg_" + secrets.token_hex(16)
    return {"id": identity, "type": "message", "status": "in_progress", "role": "assistant", "content": [_said("")]}


def _said(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _thought() -> dict[str, Any]:
    identity, content = "rs_" + secrets.token_hex(16), [{"type": "reasoning_text", "text": ""}]
    return {"id": identity, "type": "reasoning", "summary": [], "content": content, "status": "in_progress"}


def _called(call: Call) -> dict[str, Any]:
    named = {"call_id": call.id, "name": call.name, "arguments": "", "status": "in_progress"}
    return {"id": "fc_" + secrets.token_hex(16), "type": "function_call"} | named
