"""Structured output through OpenAI's own client: formats, vLLM's names, streams, and what is refused."""

from __future__ import annotations

import json

import openai
import pydantic
import pytest

MESSAGES = [{"role": "user", "content": "Which ship?"}]


class Ship(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    name: str = pydantic.Field(max_length=8)
    tons: int = pydantic.Field(ge=0, le=99)
    afloat: bool


def test_a_model_of_pydantic_is_parsed(client: openai.OpenAI) -> None:
    """As ``client.chat.completions.parse`` sends it; of random weights, so nothing but the schema makes it right."""
    for seed in range(6):
        answer = client.chat.completions.parse(
            model="tiny", messages=MESSAGES, response_format=Ship, max_tokens=200, seed=seed, temperature=1.5
        )
        (choice,) = answer.choices
        assert isinstance(choice.message.parsed, Ship) and choice.finish_reason == "stop"


@pytest.mark.parametrize(
    ("body", "allowed"),
    [
        ({"guided_choice": ["port", "starboard"]}, {"port", "starboard"}),
        ({"structured_outputs": {"regex": "(ab){2}"}}, {"abab"}),
        ({"structured_outputs": {"grammar": 'start: "x" | "yy"'}}, {"x", "yy"}),
        ({"guided_json": {"enum": [1, "two"]}}, {"1", '"two"'}),
        ({"structured_outputs": {"json": '{"const": true}'}}, {"true"}),
    ],
)
def test_under_the_names_of_vllm(body: dict[str, object], allowed: set[str], client: openai.OpenAI) -> None:
    """Whole and as a stream, of prompts and of chats, several choices at once."""
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, n=3, max_tokens=40, extra_body=body)
    assert {choice.message.content for choice in answer.choices} <= allowed
    texts = client.completions.create(model="tiny", prompt=["a", "b c"], max_tokens=40, extra_body=body)
    assert {choice.text for choice in texts.choices} <= allowed
    pieces = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=40, stream=True, extra_body=body
    )
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert text in allowed


def test_any_object(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=60, response_format={"type": "json_object"}, temperature=0.5, seed=1
    )
    text, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
    assert text is not None and text.lstrip().startswith("{")
    assert reason == "length" or isinstance(json.loads(text), dict)


@pytest.mark.parametrize("schema", [{"type": "objec"}, {"$ref": "#/x"}, {"type": "string", "pattern": "("}])
def test_what_cannot_be_compiled_is_a_bad_request(schema: dict[str, str], client: openai.OpenAI) -> None:
    response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="tiny", messages=MESSAGES, response_format=response_format)
    assert refused.value.param == "response_format.json_schema" and len(str(refused.value)) < 700
