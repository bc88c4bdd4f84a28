"""Tools through OpenAI's own client: random weights write calls because grammars make them, and nothing else does."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from transformers import AutoTokenizer

from stowage.engine.engine import Engine
from stowage.engine.sampling_params import SamplingParams
from stowage.server.tools.formats import FORMATS
from stowage.testing import tiny_models
from tests.depth import mostly_rare
from tests.server.process import Server

CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
DAYS = {"type": "object", "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 9}}, "required": ["days"]}
ASKED = [{"role": "user", "content": "How is the weather?"}]


def tool(name: str, parameters: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters or CITY, **more}}


TOOLS = [tool("weather", description="The weather of a city."), tool("forecast", DAYS)]
TEMPLATE = (
    "{{ bos_token }}{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}<tool_call>{% endif %}"
    "{% for message in messages %}{{ '<assistant>' if message.role == 'assistant' else '<user>' }}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function.arguments.city }}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{{ '<think>' if thinking else '' }}{% endif %}"
)
MARKERS = [
    "<think>",
    "</think>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|channel|>",
    "<|message|>",
    "<|start|>",
    "<|end|>",
    "<|constrain|>",
    "<|call|>",
]
MARKERS += [
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
]


MARKERS += ["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]
MARKERS += ["<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"]
MARKERS += ["<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"]


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose template knows tools, and whose tokenizer has the markers of all formats as special tokens."""
    model = tiny_models.write(
        "llama", tmp_path_factory.mktemp("marked") / "tiny", tiny_models.TinySize(hidden=32, layers=1)
    )
    tokenizer = AutoTokenizer.from_pretrained(model)
    data = json.loads((model / "tokenizer.json").read_text())
    names = {entry["content"] for entry in data["added_tokens"]}
    vocabulary = data["model"]["vocab"]
    last = sorted(vocabulary, key=vocabulary.get)[-len(MARKERS) :]
    for marker, old in zip(MARKERS, last, strict=True):
        assert old not in names
        at = vocabulary.pop(old)
        data["added_tokens"].append(
            {
                "id": at,
                "content": marker,
                "special": True,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
            }
        )
    (model / "tokenizer.json").write_text(json.dumps(data))
    (model / "chat_template.jinja").write_text(TEMPLATE)
    assert AutoTokenizer.from_pretrained(model).convert_tokens_to_ids(MARKERS) == [
        vocabulary_id(data, one) for one in MARKERS
    ]
    assert len(AutoTokenizer.from_pretrained(model)) == len(tokenizer)
    return model


def vocabulary_id(data: dict[str, Any], marker: str) -> int:
    return next(entry["id"] for entry in data["added_tokens"] if entry["content"] == marker)


@pytest.fixture(
    params=mostly_rare(
        sorted({*FORMATS} - {"glm45"}), ["hermes", "mistral", "llama3_json", "deepseek_v3", "qwen3_coder"]
    ),
    scope="module",
)
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def tooled(form: str, start: Callable[..., Server], marked: Path) -> Iterator[openai.OpenAI]:
    """A server for each format."""
    server = start("--tool-call-parser", form, model=marked)
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made
    server.stop()


def checked(calls: Any, most: int = 40) -> list[tuple[str, dict[str, Any]]]:
    """Names and arguments of calls, which must be as the schemas say."""
    found = [(call.function.name, json.loads(call.function.arguments)) for call in calls]
    assert 1 <= len(found) <= most and len({call.id for call in calls}) == len(found)
    for name, arguments in found:
        assert name in ("weather", "forecast")
        assert arguments in ({"city": "Rome"}, {"city": "Oslo"}) if name == "weather" else 1 <= arguments["days"] <= 9
    return found


def test_calls_of_every_format(tooled: openai.OpenAI, form: str, marked: Path) -> None:
    """Required, named and single ones, whole and as a stream: the same calls, and nothing beside them."""
    thought, end = AutoTokenizer.from_pretrained(marked).convert_tokens_to_ids(["<think>", "<|end|>"])
    options: dict[str, Any] = {
        "model": "tiny",
        "messages": ASKED,
        "tools": TOOLS,
        "max_tokens": 400,
        "temperature": 1.2,
        "logit_bias": {thought: -100, end: 10},  # random weights would not end gpt-oss's remarks in time
    }
    for seed in range(2):
        required = options | {"tool_choice": "required", "seed": seed}
        answer = tooled.chat.completions.create(**required, parallel_tool_calls=False).choices[0]
        assert answer.finish_reason == "tool_calls"
        assert len(checked(answer.message.tool_calls)) == 1
        assert answer.message.content is None or form == "openai", "there, something may be said before a call"
        for most in (1, 3, 9):
            cut = tooled.chat.completions.create(**required | {"max_tokens": most}).choices[0]
            assert cut.finish_reason == "length"
            assert not cut.message.content or form == "openai", "no half of a call"
        named = {"type": "function", "function": {"name": "forecast"}}
        answer = tooled.chat.completions.create(**options, seed=seed, tool_choice=named).choices[0]
        assert [name for name, _ in checked(answer.message.tool_calls)] == ["forecast"]
        pieces = list(tooled.chat.completions.create(**options, seed=seed, tool_choice=named, stream=True))
        deltas = [call for piece in pieces for call in piece.choices[0].delta.tool_calls or ()]
        assert {call.index for call in deltas} == {0} and deltas[0].id and deltas[0].function.name == "forecast"
        assert not any(call.id for call in deltas[1:])
        streamed = "".join(call.function.arguments for call in deltas)
        assert streamed == answer.message.tool_calls[0].function.arguments
        assert pieces[-1].choices[0].finish_reason == "tool_calls"
        assert form == "openai" or not any(piece.choices[0].delta.content for piece in pieces)


def test_special_tokens_that_mark_no_call_are_left_out_beside_tools(
    tooled: openai.OpenAI, form: str, marked: Path
) -> None:
    other = "[ARGS]" if form.startswith("glm") else "<arg_key>"
    token = AutoTokenizer.from_pretrained(marked).convert_tokens_to_ids(other)
    options: dict[str, Any] = {"model": "tiny", "messages": ASKED, "logit_bias": {token: 100}, "max_tokens": 4}
    for tools in ({}, {"tools": TOOLS}):
        message = tooled.chat.completions.create(**options, **tools).choices[0].message
        assert (message.content, message.tool_calls) == ("", None)
    asked = tooled.chat.completions.create(**options, extra_body={"skip_special_tokens": False}).choices[0].message
    assert asked.content == (4 * other if form != "openai" else ""), "there, it is the head of a message"


def test_several_choices_and_calls(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=ASKED, tools=TOOLS, tool_choice="required", n=3, temperature=1.5, seed=2, max_tokens=300
    )
    for choice in answer.choices:
        if choice.finish_reason == "tool_calls":
            checked(choice.message.tool_calls)
    assert any(choice.finish_reason == "tool_calls" for choice in answer.choices)


def test_the_schema_of_a_strict_tool_holds_wherever_a_call_begins(client: openai.OpenAI, engine: Engine) -> None:
    """`auto`: the answer goes on from the beginning of a call, and random weights can write nothing but that call."""
    history = [*ASKED, {"role": "assistant", "content": '<tool_call>\n{"name": "weather", "arguments": {"'}]
    goes_on = {"continue_final_message": True, "add_generation_prompt": False}
    options: dict[str, Any] = {"model": "tiny", "messages": history, "max_tokens": 30, "temperature": 0}
    loose = client.chat.completions.create(**options, tools=TOOLS, extra_body=goes_on).choices[0]
    assert loose.message.tool_calls is None, "nothing begins in this answer, and nothing is enforced"
    strict = [tool("weather", strict=True)]
    bias = {str(token): 100 for token in engine.tokenizer("<tool_call>")["input_ids"]}
    forced = client.chat.completions.create(
        model="tiny", messages=ASKED, tools=strict, logit_bias=bias, max_tokens=200, temperature=0.5, seed=1
    ).choices[0]
    assert forced.message.content or forced.message.tool_calls


def test_a_regex_beside_tools(client: openai.OpenAI) -> None:
    """Its slashes may be escaped or not; what is wrong with it is said of it."""
    options: dict[str, Any] = {"model": "tiny", "messages": ASKED, "tools": TOOLS, "max_tokens": 200, "seed": 1}
    found = set()
    for text in (r"a\/b/[/]", "a/b/[/]"):
        for seed in range(4):
            body = {"structured_outputs": {"regex": text}}
            answer = client.chat.completions.create(**options | {"seed": seed}, extra_body=body).choices[0].message
            found.add("a call" if answer.tool_calls else answer.content)
    assert "a/b//" in found and found <= {"a/b//", "a call"}
    with pytest.raises(openai.BadRequestError, match=r"'structured_outputs\.regex' cannot be used"):
        client.chat.completions.create(**options, extra_body={"structured_outputs": {"regex": "(a"}})


def test_a_history_with_calls_and_results(client: openai.OpenAI, engine: Engine) -> None:
    """A template that knows no tools gets them as words; the answer is the engine's to these."""
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    history = [
        {"role": "system", "content": "Be brief."},
        *ASKED,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "wind"}]},
    ]
    body = {"ignore_eos": True}
    answer = client.chat.completions.create(
        model="tiny", messages=history, tools=TOOLS[:1], max_tokens=8, temperature=0, extra_body=body
    )
    told = httpx.post(
        str(client.base_url).removesuffix("v1/") + "tokenize",
        json={"model": "tiny", "messages": history, "tools": TOOLS[:1]},
    )
    tokens = told.json()["tokens"]
    text = engine.tokenizer.decode(tokens)
    for words in (
        "Be brief.",
        '"name": "weather"',
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}',
        "<tool_response>\nrain\n</tool_response>\n<tool_response>\nwind",
    ):
        assert words in text
    assert answer.usage.prompt_tokens == len(tokens)
    (expected,) = engine.generate([tokens], SamplingParams(max_new_tokens=8, ignore_eos=True))
    assert answer.choices[0].message.content == expected.text


def test_thoughts_are_free_and_what_follows_is_not(start: Callable[..., Server], marked: Path) -> None:
    """With `<think>` in the prompt, the grammar waits for `</think>`. So it does in a thought that the client began."""
    server = start("--tool-call-parser", "hermes", model=marked)
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        end = AutoTokenizer.from_pretrained(marked).convert_tokens_to_ids("</think>")
        thinking = {"chat_template_kwargs": {"thinking": True}}
        options: dict[str, Any] = {"model": "tiny", "messages": ASKED, "tools": TOOLS, "tool_choice": "required"}
        options |= {"temperature": 1.0, "seed": 4, "max_tokens": 300, "extra_body": thinking}
        answer = client.chat.completions.create(**options, logit_bias={end: 6}).choices[0]
        assert answer.message.reasoning_content
        checked(answer.message.tool_calls)
        pieces = list(client.chat.completions.create(**options, logit_bias={end: 6}, stream=True))
        thought = "".join(getattr(piece.choices[0].delta, "reasoning_content", None) or "" for piece in pieces)
        assert thought == answer.message.reasoning_content
        choice = {"structured_outputs": {"choice": ["port", "starboard"]}}
        answer = client.chat.completions.create(
            model="tiny", messages=ASKED, logit_bias={end: 6}, max_tokens=300, seed=4, extra_body=thinking | choice
        ).choices[0]
        assert answer.message.content in ("port", "starboard") and answer.message.reasoning_content
        never = client.chat.completions.create(**options | {"max_tokens": 5}, logit_bias={end: -100}).choices[0]
        assert never.message.tool_calls is None and never.finish_reason == "length"
        goes_on = {"continue_final_message": True, "add_generation_prompt": False}
        for begun, free in (
            ("<think>\nThe harbour", True),
            ("<think>\nIt is.\n</think>\n\nTo ", False),
            ("To ", False),
        ):
            history: list[Any] = [*ASKED, {"role": "assistant", "content": begun}]
            answer = client.chat.completions.create(
                model="tiny", messages=history, logit_bias={end: 6}, max_tokens=300, seed=4, extra_body=goes_on | choice
            ).choices[0]
            assert answer.message.content in ("port", "starboard")
            assert bool(getattr(answer.message, "reasoning_content", None)) == free, begun
    server.stop()


def test_a_grammar_changes_nothing_that_is_kept(start: Callable[..., Server], tiny_llama: Path) -> None:
    """An answer with forced calls reuses a prefix that one without has stored, and the other way round."""
    server = start("--host-memory", "16MiB", "--disk", "", model=tiny_llama)
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        messages = [{"role": "user", "content": "The holds are full. " * 40}]
        options: dict[str, Any] = {
            "model": "tiny",
            "messages": messages,
            "tools": TOOLS,
            "max_tokens": 60,
            "temperature": 0,
        }
        first = client.chat.completions.create(**options, tool_choice="required")
        plain = client.chat.completions.create(**options)
        again = client.chat.completions.create(**options, tool_choice="required")
        assert first.usage.prompt_tokens_details.cached_tokens == 0
        assert min(one.usage.prompt_tokens_details.cached_tokens for one in (plain, again)) > 500
        calls = [[call.function.arguments for call in one.choices[0].message.tool_calls] for one in (first, again)]
        assert calls[0] == calls[1]
    fresh = start("--host-memory", "0", model=tiny_llama)
    with openai.OpenAI(base_url=fresh.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        assert client.chat.completions.create(**options).choices == plain.choices
    server.stop()
    fresh.stop()


RECURSIVE = {
    "type": "object",
    "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}},
    "properties": {"x": {"$ref": "#/$defs/a"}},
    "required": ["x"],
}
ODD = {"type": "object", "properties": {"x": {"type": "string", "pattern": "("}}}
NO_JSON = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{x"}}],
}


@pytest.mark.parametrize(
    ("path", "odd"),
    [
        ("tools", {"tools": [tool(f"t{n}") for n in range(10_000)]}),
        ("tools[1].function.name", {"tools": [tool("a"), tool("a")]}),
        ("tools[0].function.name", {"tools": [tool("a b")]}),
        ("tools[1].function.parameters", {"tools": [tool("a"), tool("b", {"type": "array"})]}),
        ("tools[1].function.parameters", {"tools": [tool("a"), tool("b", RECURSIVE)], "tool_choice": "required"}),
        ("tools[0].function.parameters", {"tools": [tool("a", ODD, strict=True)]}),
        ("structured_outputs", {"tools": TOOLS, "structured_outputs": {"grammar": 'start: "a"'}}),
        ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}),
        ("tool_choice.function", {"tools": TOOLS, "tool_choice": {"type": "function"}}),
        ("messages[1].tool_calls[0].function.arguments", {"messages": [*ASKED, NO_JSON]}),
        ("messages[0].tool_calls", {"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_refused_with_its_path(path: str, odd: dict[str, Any], server: Server) -> None:
    """And quickly, while others are served."""
    body = {"model": "tiny", "messages": ASKED, "max_tokens": 5} | odd
    answer = httpx.post(server.url + "/v1/chat/completions", json=body, timeout=60)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == path, error
    assert path in error["message"] and len(error["message"]) < 700
    kinds = [f"{path}.{kind}" for kind in odd.get("structured_outputs", ())]
    assert all(kind in error["message"] for kind in kinds), "what was given is named as it was given"


@pytest.mark.rare
def test_many_tools_do_not_hold_the_engine(client: openai.OpenAI) -> None:
    """While a grammar of 300 tools is compiled, the tokens of another request go on."""
    many = [
        tool(f"tool_{n}", {"type": "object", "properties": {f"p{n}_{m}": {"type": "string"} for m in range(8)}})
        for n in range(100)
    ]
    stream = client.completions.create(
        model="tiny", prompt="x", max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    began = time.monotonic()
    with pytest.raises(openai.BadRequestError, match="at most 4096 tokens"):
        client.chat.completions.create(model="tiny", messages=ASKED, tools=many, tool_choice="required", max_tokens=5)
    assert sum(1 for _ in stream) > 100 and time.monotonic() > began
