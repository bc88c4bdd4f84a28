"""OpenAI's Responses API and Anthropic's messages: the same answers as chats give, in each API's own form."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from stowage.engine.request import Completion, Delta
from stowage.engine.sampling_params import SamplingParams
from stowage.server.apis.answer import Answer
from stowage.server.apis.generation_request import GenerationRequest, Prompt
from stowage.server.apis.messages import MessageAnswer
from stowage.server.apis.response_events import ResponseAnswer
from stowage.server.tools.formats import FORMATS
from stowage.server.tools.parser import OutputSyntax
from stowage.server.vocabulary import Vocabulary
from tests.server.process import Server

CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
FUNCTION = {"type": "function", "name": "weather", "description": "Of a city.", "parameters": CITY}
CLAUDES = {"name": "weather", "description": "Of a city.", "input_schema": CITY}
ASKED = "What is needed first lies on top, and nothing shifts. " * 4
GREEDY = {"temperature": 0, "extra_body": {"ignore_eos": True}}


def said(client: openai.OpenAI, messages: list[Any], tokens: int = 12, **more: Any) -> str:
    """What the chat API answers."""
    answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=tokens, **GREEDY, **more)
    return answer.choices[0].message.content or ""


def claude(server: Server, **body: Any) -> httpx.Response:
    asked = {"model": "tiny", "max_tokens": 12, "temperature": 0, "ignore_eos": True} | body
    return httpx.post(server.url + "/v1/messages", json=asked, timeout=60)


def events(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Of a stream: names and what they say, which must agree."""
    found = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    assert all(name == told["type"] for name, told in found)
    return found


def test_responses_are_what_chats_say(client: openai.OpenAI) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": ASKED}]
    expected = said(client, messages)
    answer = client.responses.create(
        model="tiny", instructions="Be brief.", input=ASKED, max_output_tokens=12, **GREEDY
    )
    assert (answer.output_text, answer.status, answer.object) == (expected, "incomplete", "response")
    assert answer.incomplete_details.reason == "max_output_tokens" and answer.instructions == "Be brief."
    assert answer.usage.input_tokens_details.cached_tokens > 0 and answer.usage.output_tokens == 12
    listed = [{"role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]}, messages[1]]
    assert client.responses.create(model="tiny", input=listed, max_output_tokens=12, **GREEDY).output_text == expected


def test_a_stream_of_a_response_adds_up(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "input": ASKED, "max_output_tokens": 20, **GREEDY}
    whole = client.responses.create(**options)
    found = list(client.responses.create(**options, stream=True))
    assert [event.sequence_number for event in found] == list(range(len(found)))
    names = [event.type for event in found]
    first = "created in_progress output_item.added content_part.added".split()
    assert names[:4] == [f"response.{name}" for name in first]
    assert names[-1] == "response.incomplete"
    assert "".join(event.delta for event in found if event.type == "response.output_text.delta") == whole.output_text
    assert found[-1].response.output_text == whole.output_text


def test_calls_in_responses(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "input": ASKED, "tools": [FUNCTION], "tool_choice": "required"}
    options |= {"parallel_tool_calls": False, "max_output_tokens": 200, "temperature": 1, "extra_body": {"seed": 5}}
    (call,) = client.responses.create(**options).output
    assert (call.type, call.name, call.status) == ("function_call", "weather", "completed")
    assert json.loads(call.arguments)["city"] in ("Rome", "Oslo")
    found = list(client.responses.create(**options, stream=True))
    deltas = [event.delta for event in found if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call.arguments == found[-1].response.output[0].arguments
    history = [
        {"role": "user", "content": ASKED},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        call.to_dict(),
        {"type": "function_call_output", "call_id": call.call_id, "output": "rain"},
    ]
    answer = client.responses.create(model="tiny", input=history, tools=[FUNCTION], max_output_tokens=12, **GREEDY)
    called = {"id": call.call_id, "type": "function", "function": {"name": "weather", "arguments": call.arguments}}
    messages = [
        {"role": "user", "content": ASKED},
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": call.call_id, "content": "rain"},
    ]
    tool = {"type": "function", "function": {key: FUNCTION[key] for key in ("name", "description", "parameters")}}
    assert answer.output_text == said(client, messages, tools=[tool])


def test_a_schema_in_responses(client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "name": "city", "schema": CITY | {"additionalProperties": False}, "strict": True}
    options: dict[str, Any] = {"model": "tiny", "input": ASKED, "text": {"format": form}, "max_output_tokens": 100}
    answer = client.responses.create(**options, temperature=0)
    assert json.loads(answer.output_text)["city"] in ("Rome", "Oslo") and answer.status == "completed"
    with client.responses.stream(**options, temperature=0) as stream:  # OpenAI's own reader of events
        assert stream.get_final_response().output_text == answer.output_text


def test_messages_are_what_chats_say(client: openai.OpenAI, server: Server) -> None:
    expected = said(client, [{"role": "system", "content": "Be brief."}, {"role": "user", "content": ASKED}])
    body = {"system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]}
    body |= {"messages": [{"role": "user", "content": [{"type": "text", "text": ASKED}]}]}
    answer = claude(server, **body).json()
    assert answer["content"] == [{"type": "text", "text": expected}] and answer["stop_reason"] == "max_tokens"
    usage = answer["usage"]
    assert usage["cache_read_input_tokens"] > 0 and usage["output_tokens"] == 12
    counted = httpx.post(server.url + "/v1/messages/count_tokens", json={"model": "tiny", **body}).json()
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted["input_tokens"]
    found = events(claude(server, **body, stream=True).text)
    names = [name for name, _ in found]
    assert names[:2] == ["message_start", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    deltas = [told["delta"]["text"] for name, told in found if name == "content_block_delta"]
    assert "".join(deltas) == expected
    assert found[-2][1]["usage"]["output_tokens"] == 12 and found[-2][1]["delta"]["stop_reason"] == "max_tokens"


def test_stop_sequences_and_beginnings(client: openai.OpenAI, server: Server) -> None:
    expected = said(client, [{"role": "user", "content": ASKED}], 30)
    stop = expected[8:10]
    answer = claude(
        server, messages=[{"role": "user", "content": ASKED}], stop_sequences=["never", stop], max_tokens=30
    )
    told = answer.json()
    assert (told["stop_reason"], told["stop_sequence"]) == ("stop_sequence", stop)
    assert told["content"][0]["text"] == expected[: expected.index(stop)]
    begun = [{"role": "user", "content": ASKED}, {"role": "assistant", "content": "It is"}]
    goes_on = {"ignore_eos": True, "continue_final_message": True, "add_generation_prompt": False}
    chat = client.chat.completions.create(
        model="tiny", messages=begun, max_tokens=12, temperature=0, extra_body=goes_on
    )
    assert claude(server, messages=begun).json()["content"][0]["text"] == chat.choices[0].message.content


@pytest.mark.slow
def test_calls_in_messages(client: openai.OpenAI, server: Server) -> None:
    options: dict[str, Any] = {"messages": [{"role": "user", "content": ASKED}], "tools": [CLAUDES], "max_tokens": 200}
    options |= {"tool_choice": {"type": "tool", "name": "weather"}, "temperature": 1.0, "seed": 3, "ignore_eos": False}
    answer = claude(server, **options).json()
    (block,) = answer["content"]
    assert (block["type"], block["name"], answer["stop_reason"]) == ("tool_use", "weather", "tool_use")
    assert block["input"]["city"] in ("Rome", "Oslo")
    seen = []
    for most in range(1, answer["usage"]["output_tokens"] - 1, 4):
        cut = claude(server, **options | {"max_tokens": most}).json()
        ((*kinds, given),) = [(one["type"], one.get("text"), one.get("input")) for one in cut["content"]]
        assert cut["stop_reason"] == "max_tokens" and kinds in (["text", ""], ["tool_use", None]), "no half of a call"
        seen.append(given)
    assert seen[0] is None and {} in seen
    found = events(claude(server, **options, stream=True).text)
    partial = "".join(told["delta"]["partial_json"] for name, told in found if name == "content_block_delta")
    assert json.loads(partial) == block["input"]
    result = {"type": "tool_result", "tool_use_id": block["id"], "content": [{"type": "text", "text": "rain"}]}
    history = [{"role": "user", "content": ASKED}, {"role": "assistant", "content": [block]}]
    history += [{"role": "user", "content": [result, {"type": "text", "text": "And?"}]}]
    text = claude(server, messages=history, tools=[CLAUDES]).json()["content"][0]["text"]
    function = {"name": "weather", "arguments": json.dumps(block["input"])}
    messages = [
        {"role": "user", "content": ASKED},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "x", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "x", "content": "rain"},
        {"role": "user", "content": "And?"},
    ]
    tool = {"type": "function", "function": {key: FUNCTION[key] for key in ("name", "description", "parameters")}}
    assert text == said(client, messages, tools=[tool])


def test_a_schema_in_messages(client: openai.OpenAI, server: Server) -> None:
    """Under today's name and the beta's, whole and as a stream: what a chat with that schema says."""
    schema = CITY | {"additionalProperties": False}
    chat_form: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
    asked = [{"role": "user", "content": ASKED}]
    chat = client.chat.completions.create(
        model="tiny", messages=asked, max_tokens=100, temperature=0, response_format=chat_form
    )
    expected = chat.choices[0].message.content
    form = {"type": "json_schema", "schema": schema}
    for body in ({"output_config": {"format": form}}, {"output_format": form}):
        options: dict[str, Any] = {"messages": asked, "max_tokens": 100, "ignore_eos": False, **body}
        answer = claude(server, **options).json()
        assert answer["content"] == [{"type": "text", "text": expected}] and answer["stop_reason"] == "end_turn"
        assert json.loads(answer["content"][0]["text"])["city"] in ("Rome", "Oslo")
        found = events(claude(server, **options, stream=True).text)
        assert "".join(told["delta"]["text"] for name, told in found if name == "content_block_delta") == expected


@pytest.mark.parametrize("api", [MessageAnswer, ResponseAnswer])
def test_what_is_said_around_calls_stays_where_it_was_said(api: type[Answer]) -> None:
    """Text and calls come in the model's order, as a stream and whole."""
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
    syntax = OutputSyntax(FORMATS["hermes"], thinks=True, schemas={"weather": CITY})
    request = GenerationRequest("m", (Prompt([1], "", 9),), 1, SamplingParams(), "", False, False, syntax=syntax)
    pieces = ["<think>Hm.</think>First ", call[:30], call[30:], " and then ", call + " that is all"]
    done = Completion("".join(pieces), [5] * 9, "stop", 1, {}, 0.0, 0.0)
    whole, streamed = api(request, Vocabulary(None)), api(request, Vocabulary(None))
    whole.ended(0, done)
    found = whole.whole({})
    for piece in pieces[:-1]:
        streamed.events(0, Delta(piece, [5]), ())
    last = streamed.events(0, Delta(pieces[-1], [5], done), ())
    streamed.ended(0, done)
    closed = [*last, *streamed.closing()]
    if api is MessageAnswer:
        parts = [block.get("text", block["type"]) for block in found["content"]]
        assert parts == ["thinking", "First ", "tool_use", " and then ", "tool_use", " that is all"]
        assert found["content"][2]["input"] == {"city": "Rome"} and found["stop_reason"] == "tool_use"
        assert [told["index"] for name, told in closed if name == "content_block_stop"][-1] == 5
    else:
        items = [item.get("content", [{"text": item["type"]}])[0]["text"] for item in found["output"]]
        assert items == ["Hm.", "First ", "function_call", " and then ", "function_call", " that is all"]
        begun = [told["item"] for name, told in last if name == "response.output_item.added"]
        assert [item["status"] for item in begun] == ["in_progress"] * 2 and begun[0]["arguments"] == ""
        told = closed[-1][1]["response"]["output"]
        unnamed = [[item | {"id": 0, "call_id": 0} for item in output] for output in (found["output"], told)]
        assert unnamed[0] == unnamed[1]


USER = [{"role": "user", "content": "x"}]
BEGUN = [*USER, {"role": "assistant", "content": "{"}]
FORM = {"type": "json_schema", "schema": CITY}
ONE: dict[str, Any] = {"messages": USER, "max_tokens": 1}
IMAGE = [{"role": "user", "content": [{"type": "image"}]}]
NO_JSON = {"type": "function_call", "name": "f", "call_id": "1", "arguments": "{"}
NO_SCHEMA = {"type": "json_schema", "schema": {"type": "objec"}}


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("messages", {"messages": USER}, "max_tokens"),
        ("messages", ONE | {"tools": [{"name": "a"}]}, "tools[0].input_schema"),
        ("messages", {"messages": [{"role": "system", "content": "x"}], "max_tokens": 1}, "messages[0].role"),
        ("messages", {"messages": IMAGE, "max_tokens": 1}, "content[0].type"),
        ("messages", ONE | {"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ("messages", ONE | {"output_config": {"format": NO_SCHEMA}}, "output_config.format"),
        ("messages", ONE | {"output_config": {"format": {"type": "json"}}}, "format.type"),
        ("messages", ONE | {"output_config": {"effort": "low"}}, "reasoning_effort"),
        ("messages", ONE | {"output_config": {"colour": 1}}, "output_config.colour"),
        ("messages", ONE | {"output_format": {"type": "json_schema"}}, "output_format.schema"),
        ("messages", ONE | {"output_config": {"format": FORM}, "output_format": FORM}, "exclude"),
        ("messages", {"messages": BEGUN, "max_tokens": 1, "output_config": {"format": FORM}}, "may not end"),
        ("responses", {"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        ("responses", {"input": "x", "text": {"verbosity": "low"}}, "text.verbosity"),
        ("responses", {"input": "x", "include": ["message.output_text.logprobs"]}, "/v1/chat/completions"),
        ("responses", {"input": []}, "input"),
        ("responses", {"input": [{"type": "item_reference"}]}, "input[0].type"),
        ("responses", {"input": [NO_JSON]}, "input[0].arguments"),
        ("responses", {"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ("responses", {"input": "x", "text": {"format": NO_SCHEMA}}, "text.format"),
        ("embeddings", {"input": "x"}, "--embedding-model"),
    ],
)  # fmt: skip
def test_what_is_refused(path: str, body: dict[str, Any], words: str, server: Server) -> None:
    answer = httpx.post(f"{server.url}/v1/{path}", json={"model": "tiny"} | body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and words in error["message"], error
    if path == "messages":
        assert answer.json()["type"] == "error" and error["type"] == "invalid_request_error"


def test_a_key_as_anthropics_clients_send_it(start: Callable[..., Server]) -> None:
    server = start(STOWAGE_API_KEYS="0123456789abcdef0123")
    body = {"model": "tiny", "max_tokens": 2, "messages": USER}
    given = {"x-api-key": "0123456789abcdef0123", "anthropic-version": "2023-06-01"}
    assert httpx.post(server.url + "/v1/messages", json=body, headers=given).status_code == 200
    for wrong in ({}, {"x-api-key": "x"}):
        refused = httpx.post(server.url + "/v1/messages", json=body, headers=wrong)
        assert refused.status_code == 401 and refused.json()["error"]["type"] == "authentication_error"
    server.stop()


NEEDED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x", "max_tokens": 1},
    "/v1/chat/completions": {"messages": USER, "max_tokens": 1},
    "/v1/responses": {"input": "x", "max_output_tokens": 1},
    "/v1/messages": {"messages": USER, "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": USER},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [65]},
}


def test_the_document_of_all_routes(server: Server) -> None:
    """Each route is there, and knows every field that the document lists."""
    document = httpx.get(server.url + "/openapi.json").json()
    assert document["openapi"] == "3.1.0" and set(NEEDED) < set(document["paths"])
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for path, methods in document["paths"].items():
            if "get" in methods:
                assert client.get(path.replace("{model}", "tiny")).status_code == 200, path
                continue
            fields = methods["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"]
            body = {"model": "tiny"} | NEEDED.get(path, {})
            assert client.post(path, json=body).status_code == (200 if path in NEEDED else 400)
            assert "Unrecognized" in client.post(path, json=body | {"colour": 1}).text or path == "/v1/embeddings"
            for field in set(fields) - set(body):
                if path == "/tokenize":
                    body = {"model": "tiny"} | ({} if field == "content" else {"messages": USER})
                answer = client.post(path, json=body | {field: {"odd": 1}})
                assert "Unrecognized" not in answer.text or f": {field}.odd" in answer.text, (path, field, answer.text)
