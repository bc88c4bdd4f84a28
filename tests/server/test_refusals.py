"""What is wrong with a request is told by status and OpenAI's error object, which names the field; nothing breaks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import httpx
import openai
import pytest

from tests.engine.conftest import random_prompt
from tests.server.process import Server

USER = [{"role": "user", "content": "hello"}]
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def post(server: Server) -> Iterator[Callable[..., httpx.Response]]:
    with httpx.Client(base_url=server.url, timeout=60) as connection:

        def ask(path: str, value: object, **headers: str) -> httpx.Response:
            body = value if isinstance(value, bytes) else json.dumps(value).encode()
            return connection.post(path, content=body, headers={"content-type": "application/json"} | headers)

        yield ask


def refused(response: httpx.Response, status: int, param: str | None = None, words: str = "", code: str | None = None):
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    (error,) = response.json().values()
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["param"], words in error["message"]) == (param, True), error
    assert error["type"] == {404: "not_found_error"}.get(status, "invalid_request_error")
    assert code is None or error["code"] == code


NESTED = b"[" * 200_000
BODIES = [
    (b"", "empty: send a JSON object"),
    (b"{", "JSON"),
    (b"[]", "object"),
    (b"null", "object"),
    (b'"text"', "object"),
    (b'{"a": NaN}', "NaN"),
    (b'{"a": Infinity}', "Infinity"),
    (b'{"a": -Infinity}', "Infinity"),
    (b"\xff\xfe", "JSON"),
    (b'{"a": "\xff"}', "JSON"),
    (b'{"a": ' + b"9" * 5000 + b"}", "JSON"),
    (NESTED, "nested"),
    (b'{"a": ' + NESTED, "nested"),
    (b"{} {}", "JSON"),
]


@pytest.mark.parametrize(("body", "words"), BODIES, ids=range(len(BODIES)))
@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_what_is_no_json_object(post, path: str, body: bytes, words: str) -> None:
    refused(post(path, body), 400, None, words, "invalid_json")


WRONG = [
    ("model", {"model": None}, "must give"),
    ("model", {"model": 5}, "string"),
    ("n", {"n": 0}, "from 1 to 128"),
    ("n", {"n": 129}, "from 1 to 128"),
    ("n", {"n": True}, "true"),
    ("n", {"n": 1.5}, "whole number"),
    ("n", {"n": 10**30}, "very large"),
    ("n", {"n": "1"}, '"1"'),
    ("temperature", {"temperature": -0.1}, "from 0 to 2"),
    ("temperature", {"temperature": 2.1}, "from 0 to 2"),
    ("temperature", {"temperature": "hot"}, "number"),
    ("top_p", {"top_p": 0}, "top_p"),
    ("top_p", {"top_p": 1.1}, "from 0 to 1"),
    ("top_k", {"top_k": -2}, "from -1"),
    ("min_p", {"min_p": 1}, "min_p"),
    ("seed", {"seed": 2**63}, "whole number"),
    ("seed", {"seed": "x" * 1000}, "..."),
    ("stop", {"stop": 5}, "string"),
    ("stop", {"stop": ["a", ""]}, "empty"),
    ("stop", {"stop": ["a", 5]}, "string"),
    ("stop", {"stop": list("abcdefghijklmnopq")}, "at most 16"),
    ("stop", {"stop": "\ud800"}, "surrogate"),
    ("stop_token_ids", {"stop_token_ids": [1, "2"]}, "list of whole numbers"),
    ("stop_token_ids", {"stop_token_ids": [True]}, "list of whole numbers"),
    ("stop_token_ids", {"stop_token_ids": [[1]]}, "holds a list"),
    ("stop_token_ids", {"stop_token_ids": list(range(65))}, "at most 64"),
    ("stop_token_ids", {"stop_token_ids": [5, -1]}, "no token of this model (0 to 511)"),
    ("stop_token_ids", {"stop_token_ids": [512]}, "no token of this model"),
    ("stream", {"stream": 1}, "true or false"),
    ("stream_options", {"stream_options": {"include_usage": True}}, "only when"),
    ("stream_options", {"stream": True, "stream_options": 5}, "object"),
    ("stream_options.include_usage", {"stream": True, "stream_options": {"include_usage": 1}}, "true or false"),
    ("stream_options.includeusage", {"stream": True, "stream_options": {"includeusage": True}}, "include_usage"),
    ("cache_salt", {"cache_salt": 5}, "string"),
    ("cache_salt", {"cache_salt": "\udfff"}, "surrogate"),
    ("temprature", {"temprature": 1}, "Did you mean 'temperature'"),
    ("wibble", {"wibble": None}, "Unrecognized"),
    ("logit_bias", {"logit_bias": {"x": 1}}, "no token of this model"),
    ("logit_bias", {"logit_bias": {"99999999": 1}}, "no token of this model"),
    ("logit_bias", {"logit_bias": [5]}, "an object of at most 1024"),
    ("logit_bias.5", {"logit_bias": {"5": 101}}, "from -100 to 100"),
    ("presence_penalty", {"presence_penalty": 2.1}, "from -2 to 2"),
    ("frequency_penalty", {"frequency_penalty": False}, "from -2 to 2"),
    ("repetition_penalty", {"repetition_penalty": 0}, "from 0.01 to 10"),
    ("min_tokens", {"min_tokens": 50, "max_tokens": 5}, "may have 5 tokens"),
    ("max_tokens", {"max_tokens": -1}, "whole number"),
    ("max_tokens", {"max_tokens": 10**12}, "whole number"),
]
WRONG_TEXT = [
    ("prompt", {"prompt": None}, "must be text"),
    ("prompt", {"prompt": []}, "must be text"),
    ("prompt", {"prompt": 5}, "must be text"),
    ("prompt", {"prompt": {"a": 1}}, "must be text"),
    ("prompt", {"prompt": [[]]}, "must be text"),
    ("prompt", {"prompt": [1, "a"]}, "must be text"),
    ("prompt", {"prompt": [True]}, "must be text"),
    ("prompt", {"prompt": [1.0]}, "must be text"),
    ("prompt", {"prompt": [[1], "a"]}, "must be text"),
    ("prompt", {"prompt": [[[1]]]}, "must be text"),
    ("prompt", {"prompt": ""}, "empty"),
    ("prompt", {"prompt": ["fine", ""]}, "empty"),
    ("prompt", {"prompt": "\ud800"}, "surrogate"),
    ("prompt", {"prompt": [512]}, "vocabulary"),
    ("prompt", {"prompt": [-1]}, "vocabulary"),
    ("prompt", {"prompt": [10**30]}, "vocabulary"),
    ("prompt", {"prompt": ["a"] * 129}, "at most 128"),
    ("n", {"prompt": ["a"] * 65, "n": 2}, "at most 128"),
    ("logprobs", {"logprobs": 21}, "from 0 to 20"),
    ("logprobs", {"logprobs": True}, "true"),
    ("logprobs", {"logprobs": 20, "echo": True, "n": 100, "prompt": "a" * 200}, "at most 262144"),
    ("echo", {"echo": "yes"}, "true or false"),
    ("best_of", {"best_of": 3}, "not supported"),
    ("suffix", {"suffix": "end"}, "not supported"),
    ("messages", {"messages": USER}, "Unrecognized"),
]
WRONG_CHAT = [
    ("messages", {"messages": None}, "list of messages"),
    ("messages", {"messages": []}, "list of messages"),
    ("messages", {"messages": "hello"}, "list of messages"),
    ("messages[0]", {"messages": ["hello"]}, "object"),
    ("messages[0].role", {"messages": [{"content": "x"}]}, "must give"),
    (
        "messages[0].role",
        {"messages": [{"role": "pirate", "content": "x"}]},
        "assistant, developer, system, tool, user",
    ),
    ("messages[0].tool_call_id", {"messages": [{"role": "tool", "content": "x"}]}, "must give"),
    ("messages[0].content", {"messages": [{"role": "user"}]}, "must be text"),
    ("messages[0].content", {"messages": [{"role": "user", "content": 5}]}, "must be text"),
    ("messages[0].content", {"messages": [{"role": "user", "content": []}]}, "must be text"),
    ("messages[0].content", {"messages": [{"role": "user", "content": ["x"]}]}, "type 'text'"),
    ("messages[0].content", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "type 'text'"),
    ("messages[0].content[0].text", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "must give"),
    ("messages[0].content", {"messages": [{"role": "user", "content": "\ud800"}]}, "surrogate"),
    ("messages[1].colour", {"messages": [*USER, {"role": "user", "content": "x", "colour": 1}]}, "Unrecognized"),
    (
        "messages[0].tool_calls[0].function",
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]},
        "must give",
    ),
    ("tools[0].function", {"tools": [{"type": "function"}]}, "must give"),
    ("tools[0].type", {"tools": [{"type": "web_search"}]}, "only 'function'"),
    ("tool_choice", {"tool_choice": "required"}, "no 'tools'"),
    ("tool_choice", {"tool_choice": "some"}, "none, auto, required"),
    ("functions", {"functions": [{}]}, "not supported"),
    ("response_format.type", {"response_format": {"type": "xml"}}, "json_schema"),
    ("response_format.json_schema", {"response_format": {"type": "json_schema"}}, "must give"),
    (
        "response_format.json_schema",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "objec"}}}},
        "Invalid type",
    ),
    ("structured_outputs", {"structured_outputs": {"regex": "(a"}}, "unclosed"),
    ("structured_outputs", {"structured_outputs": {}}, "it has 0"),
    ("structured_outputs.rgex", {"structured_outputs": {"rgex": "a"}}, "Did you mean"),
    (
        "response_format.json_schema.schema",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "must give",
    ),
    ("guided_regex", {"guided_regex": "(a"}, "'guided_regex' cannot be used"),
    ("structured_outputs", {"structured_outputs": {"regex": "(a"}}, "'structured_outputs.regex' cannot be used"),
    ("chat_template_kwargs.enable_thinkng", {"chat_template_kwargs": {"enable_thinkng": False}}, "knows no"),
    ("verbosity", {"verbosity": "low"}, "not supported"),
    ("guided_choice", {"guided_choice": [], "temperature": 0}, "none of them empty"),
    ("guided_regex", {"guided_regex": "a", "structured_outputs": {"json_object": True}}, "exclude each other"),
    ("modalities", {"modalities": ["text", "audio"]}, "not supported"),
    ("audio", {"audio": {}}, "not supported"),
    ("reasoning_effort", {"reasoning_effort": "low"}, "knows no"),
    ("top_logprobs", {"top_logprobs": 2}, "needs 'logprobs'"),
    ("top_logprobs", {"logprobs": True, "top_logprobs": 21}, "from 0 to 20"),
    ("logprobs", {"logprobs": 2}, "true or false"),
    ("max_tokens", {"max_tokens": 5, "max_completion_tokens": 6}, "differ"),
    ("max_completion_tokens", {"max_completion_tokens": 0}, "whole number"),
    ("prompt", {"prompt": "x"}, "Unrecognized"),
]


@pytest.mark.parametrize(("param", "fields", "words"), WRONG)
@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_wrong_fields(post, path: str, param: str, fields: dict, words: str) -> None:
    asked = {"model": "tiny"} | ({"prompt": "x"} if path == TEXT else {"messages": USER})
    refused(post(path, asked | fields), 400, param, words)


@pytest.mark.parametrize(("param", "fields", "words"), WRONG_TEXT)
def test_wrong_fields_of_a_completion(post, param: str, fields: dict, words: str) -> None:
    refused(post(TEXT, {"model": "tiny", "prompt": "x"} | fields), 400, param, words)


@pytest.mark.parametrize(("param", "fields", "words"), WRONG_CHAT)
def test_wrong_fields_of_a_chat(post, param: str, fields: dict, words: str) -> None:
    refused(post(CHAT, {"model": "tiny", "messages": USER} | fields), 400, param, words)


def test_fields_that_ask_for_nothing_are_taken(post) -> None:
    nothing = {
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "user": "me",
        "stop": None,
        "seed": None,
    }
    text = {"model": "tiny", "prompt": "x", "best_of": 2, "n": 2, "suffix": None, "max_tokens": 1.0}
    chat = {
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "verbosity": "medium",
        "store": True,
    }
    chat |= {"metadata": {"a": "b"}, "service_tier": "auto", "safety_identifier": "x", "parallel_tool_calls": True}
    assert post(TEXT, text | nothing).status_code == 200
    assert post(CHAT, {"model": "tiny", "messages": USER, "max_tokens": 1} | chat | nothing).status_code == 200


def test_more_tokens_than_there_are(post) -> None:
    long = random_prompt(4090)
    asked = {"model": "tiny", "prompt": long, "max_tokens": 7, "temperature": 0}
    answer = post(TEXT, asked).json()
    assert answer["usage"]["completion_tokens"] == 7, "the last token needs no place"
    refused(post(TEXT, asked | {"max_tokens": 8}), 400, "prompt", "at most 7", "context_length_exceeded")
    refused(post(TEXT, asked | {"prompt": long + [5] * 7}), 400, "prompt", "4096", "context_length_exceeded")
    refused(post(TEXT, asked | {"prompt": "x" * 5000}), 400, "prompt", "5000", "context_length_exceeded")
    many = [{"role": "user", "content": "x" * 5000}]
    refused(post(CHAT, {"model": "tiny", "messages": many}), 400, "messages", "4096", "context_length_exceeded")
    assert len(post(TEXT, asked | {"max_tokens": None}).json()["choices"][0]["text"]) > 0, "16 are too many: 7 it is"


def test_what_the_device_cannot_hold(start) -> None:
    """The least of context and device counts, for prompts, for what is asked for, and for chats without a limit."""
    small = start("--kv-cache-memory", "600KiB", "--block-size", "16")
    room = small.told["max_model_len"]
    assert 500 < room < 1300
    with openai.OpenAI(base_url=small.url + "/v1", api_key="none", max_retries=0) as client:
        for prompt, count in ((random_prompt(room + 1), 1), (random_prompt(room - 10), 12)):
            with pytest.raises(openai.BadRequestError) as caught:
                client.completions.create(model="tiny", prompt=prompt, max_tokens=count)
            assert caught.value.code == "context_length_exceeded"
            assert "prompt is too long" in str(caught.value), "the words by which LangChain and LiteLLM know it"
        asked = {"messages": [{"role": "user", "content": "x" * (room - 30)}], "extra_body": {"ignore_eos": True}}
        assert client.chat.completions.create(model="tiny", **asked).usage.total_tokens == room + 1
    small.stop()


def test_an_unknown_model(post, client: openai.OpenAI) -> None:
    refused(post(TEXT, {"model": "gpt-4", "prompt": "x"}), 404, "model", "tiny", "model_not_found")
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="x" * 10000, prompt="x")


def test_paths_and_methods(server: Server) -> None:
    refused(httpx.get(server.url + "/v1/nothing"), 404, None, "no route /v1/nothing. /openapi.json lists")
    refused(httpx.post(server.url + "/chat/completions"), 404, None, "Did you mean /v1/chat/completions?")
    refused(httpx.post(server.url + "/v1/completions/"), 404, None, "Did you mean /v1/completions?")
    refused(httpx.post(server.url + "/"), 405, None, "/ is asked with GET or HEAD, not with POST")
    refused(httpx.get(server.url + "/v1/models/"), 404, "model", "This server has 'tiny'")
    refused(httpx.get(server.url + "/health/"), 404)
    assert httpx.get(server.url + TEXT).headers["allow"] == "POST"
    refused(httpx.get(server.url + TEXT), 405)
    refused(httpx.delete(server.url + "/v1/models"), 405)
    assert httpx.head(server.url + "/health").status_code == 200
    assert httpx.get(server.url + "/health").json() == {"status": "ok"}
    assert set(httpx.get(server.url + "/version").json()) == {"version"}


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "multipart/form-data"])
def test_only_json_is_read(post, kind: str) -> None:
    """A web page may send these to any server without asking it first."""
    body = {"model": "tiny", "prompt": "x", "max_tokens": 1}
    refused(post(TEXT, body, **{"content-type": kind}), 415, None, "application/json")
    assert post(TEXT, body, **{"content-type": "Application/JSON; charset=utf-8"}).status_code == 200
    refused(post(TEXT, body, **{"content-encoding": "gzip"}), 415, None, "compression")


def test_a_model_without_a_chat_template(start, tmp_path) -> None:
    from stowage.testing import tiny_models

    model = tiny_models.write("llama", tmp_path / "plain", tiny_models.TinySize(hidden=32, layers=1))
    (model / "chat_template.jinja").unlink()
    plain = start(model=model)
    response = httpx.post(plain.url + CHAT, json={"model": "plain", "messages": USER})
    refused(response, 400, "messages", "/v1/completions", "no_chat_template")
    assert httpx.post(plain.url + TEXT, json={"model": "plain", "prompt": "x"}).status_code == 200
    plain.stop()


def test_a_template_that_refuses(start, tmp_path) -> None:
    from stowage.testing import tiny_models

    model = tiny_models.write("llama", tmp_path / "strict", tiny_models.TinySize(hidden=32, layers=1))
    rule = "{% if messages[0]['role'] != 'system' %}{{ raise_exception('a system message comes first') }}{% endif %}"
    (model / "chat_template.jinja").write_text(rule + tiny_models.CHAT_TEMPLATE)
    strict = start("--served-model-name", "an/other name", model=model)
    response = httpx.post(strict.url + CHAT, json={"model": "an/other name", "messages": USER})
    refused(response, 400, "messages", "a system message comes first")
    asked = {"model": "an/other name", "messages": [{"role": "system", "content": "x"}], "max_tokens": 1}
    assert httpx.post(strict.url + CHAT, json=asked).status_code == 200
    strict.stop()


def test_a_model_without_a_tokenizer(start, tmp_path) -> None:
    from stowage.testing import tiny_models

    model = tiny_models.write("llama", tmp_path / "mute", tiny_models.TinySize(hidden=32, layers=1))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (model / name).unlink()
    mute = start(model=model)
    asked = {"model": "mute", "prompt": [5, 6], "logprobs": 1, "max_tokens": 2, "echo": True}
    choice = httpx.post(mute.url + TEXT, json=asked).json()["choices"][0]
    assert choice["text"] == "" and choice["logprobs"]["tokens"][:2] == ["token_id:5", "token_id:6"]
    refused(httpx.post(mute.url + TEXT, json=asked | {"prompt": "text"}), 400, "prompt", "token ids")
    refused(httpx.post(mute.url + TEXT, json=asked | {"stop": "x"}), 400, "stop", "stop_token_ids")
    refused(httpx.post(mute.url + CHAT, json={"model": "mute", "messages": USER}), 400, "messages")
    mute.stop()


def test_the_server_has_lived_through_it(server: Server, client: openai.OpenAI) -> None:
    """The last test of this file."""
    assert client.completions.create(model="tiny", prompt="x", max_tokens=1).choices
    assert server.total("stowage_http_requests_total", status="500") == 0
    assert server.idle()
    assert server.err.read_text() == ""
