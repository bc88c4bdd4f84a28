"""A process of clients: `python clients.py URL MODEL FOLDER`. It has them, and nothing of Stowage.

Asks the server at URL with every client, and writes to FOLDER/found.json what each got: a value, or the error that it
raised. Each is imported where it is tried, so that one which cannot be does not keep the others from it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pydantic

URL, MODEL, FOLDER = sys.argv[1], sys.argv[2], Path(sys.argv[3])
V1 = URL + "/v1"
QUESTION = "Which city is it, and for how many days?"
GREEDY = {"temperature": 0}
CASES: dict[str, Callable[[], Any]] = {}


class Trip(pydantic.BaseModel):
    """A city and a number of days."""

    model_config = pydantic.ConfigDict(extra="forbid")

    city: Literal["Rome", "Oslo"]
    days: int = pydantic.Field(ge=1, le=9)


def case(made: Callable[[], Any]) -> Callable[[], Any]:
    CASES[made.__name__] = made
    return made


@case
def openai_stream_of_tools() -> Any:
    import openai

    client = openai.OpenAI(base_url=V1, api_key="none", max_retries=0)
    with client.chat.completions.stream(
        model=MODEL, messages=[{"role": "user", "content": QUESTION}], max_tokens=80,
        tools=[openai.pydantic_function_tool(Trip)], tool_choice="required", parallel_tool_calls=False,
    ) as stream:  # fmt: skip
        answer = stream.get_final_completion().choices[0]
    return [answer.finish_reason, answer.message.tool_calls[0].function.parsed_arguments.model_dump()]


def _claude() -> Any:
    import anthropic

    return anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)


@case
def anthropic_text() -> Any:
    messages = [{"role": "user", "content": QUESTION}]
    asked = {"model": MODEL, "max_tokens": 12, "messages": messages, "extra_body": GREEDY}
    whole = _claude().messages.create(**asked, system="Be brief.")
    with _claude().messages.stream(**asked, system="Be brief.") as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    counted = _claude().messages.count_tokens(model=MODEL, system="Be brief.", messages=messages).input_tokens
    usage = final.usage
    return [
        text == whole.content[0].text == final.content[0].text != "",
        usage.input_tokens + usage.cache_read_input_tokens == counted,
        usage.output_tokens,
    ]


@case
def anthropic_tools() -> Any:
    tool = {"name": "trip", "description": "A trip.", "input_schema": Trip.model_json_schema()}
    asked = {"model": MODEL, "max_tokens": 80, "tools": [tool], "extra_body": GREEDY}
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    forced = {"type": "any", "disable_parallel_tool_use": True}
    with _claude().messages.stream(**asked, messages=messages, tool_choice=forced) as stream:
        called = stream.get_final_message()
    (block,) = called.content
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "It is booked."}
    messages += [{"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
    answer = _claude().messages.create(**asked | {"max_tokens": 12}, messages=messages)
    return [called.stop_reason, block.input, answer.stop_reason in ("end_turn", "max_tokens", "tool_use")]


@case
def anthropic_schema() -> Any:
    class Stay(pydantic.BaseModel):
        """Of what the client leaves in a schema: it writes ranges of numbers into descriptions instead."""

        city: Literal["Rome", "Oslo"]
        days: Literal[1, 2, 3]

    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 80, "messages": messages, "extra_body": GREEDY}
    schema = {"type": "json_schema", "schema": Trip.model_json_schema()}
    parsed = _claude().messages.parse(**asked, output_format=Stay).parsed_output
    whole = _claude().messages.create(**asked, output_config={"format": schema})
    with _claude().messages.stream(**asked, output_format=Stay) as stream:
        streamed = stream.get_final_message().parsed_output
    return [parsed.model_dump(), json.loads(whole.content[0].text), streamed.model_dump()]


def _langchain(**more: Any) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(model=MODEL, base_url=V1, api_key="none", max_retries=0, max_tokens=80, temperature=0, **more)


@case
def langchain_text() -> Any:
    model = _langchain()
    whole = model.invoke(QUESTION)
    return [
        "".join(piece.content for piece in model.stream(QUESTION)) == whole.content != "",
        whole.usage_metadata["input_tokens"] > 5,
    ]


@case
def langchain_tools() -> Any:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool

    @tool
    def trip(city: Literal["Rome", "Oslo"]) -> str:
        """Book a trip."""
        return f"{city} is booked."

    model = _langchain().bind_tools([trip], tool_choice="required", parallel_tool_calls=False)
    messages: list[Any] = [HumanMessage(QUESTION)]
    called = model.invoke(messages)
    (call,) = called.tool_calls
    messages += [called, ToolMessage(trip.invoke(call["args"]), tool_call_id=call["id"])]
    answer = _langchain().bind_tools([trip]).invoke(messages)
    streamed = [chunk for piece in model.stream(QUESTION) for chunk in piece.tool_call_chunks]
    return [
        call["name"],
        call["args"],
        json.loads("".join(chunk["args"] or "" for chunk in streamed)) == call["args"],
        bool(answer.content or answer.tool_calls),
    ]


@case
def langchain_with_structured_output() -> Any:
    found = []
    for method in ("json_schema", "function_calling"):
        found.append(_langchain().with_structured_output(Trip, method=method).invoke(QUESTION).model_dump())
    return found


@case
def langchain_responses() -> Any:
    model = _langchain(use_responses_api=True)
    return [bool(model.invoke(QUESTION).text), model.with_structured_output(Trip).invoke(QUESTION).model_dump()]


@case
def instructor_models() -> Any:
    import instructor
    import openai

    found = []
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(openai.OpenAI(base_url=V1, api_key="none", max_retries=0), mode=mode)
        messages = [{"role": "user", "content": QUESTION}]
        found.append(
            client.chat.completions.create(
                model=MODEL, messages=messages, response_model=Trip, max_tokens=80
            ).model_dump()
        )
    return found


def _agent(**more: Any) -> Any:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=V1, api_key="none"))
    return Agent(model, model_settings={"max_tokens": 80, "temperature": 0, "parallel_tool_calls": False}, **more)


@case
def pydantic_ai_output() -> Any:
    from pydantic_ai import NativeOutput

    found = []
    for output in (Trip, NativeOutput(Trip)):
        found.append(_agent(output_type=output).run_sync(QUESTION).output.model_dump())
    return found


@case
def pydantic_ai_text() -> Any:
    return [bool(_agent().run_sync(QUESTION).output)]


def _litellm(model: str, base: str, **more: Any) -> Any:
    import litellm

    asked = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 80, "temperature": 0}
    return litellm.completion(model=f"{model}/{MODEL}", api_base=base, api_key="none", **asked | more)


@case
def litellm_both() -> Any:
    import litellm

    tools = [{"type": "function", "function": {"name": "trip", "parameters": Trip.model_json_schema()}}]
    found: list[Any] = []
    for provider, base in (("openai", V1), ("anthropic", URL)):
        whole = _litellm(provider, base, max_tokens=10).choices[0].message.content
        pieces = _litellm(provider, base, max_tokens=10, stream=True)
        text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
        call = _litellm(provider, base, tools=tools, tool_choice="required").choices[0].message.tool_calls[0].function
        found += [text == whole != "", call.name, json.loads(call.arguments)]
        for count in (1, 20_000):  # the answer that is asked for is too long, or the prompt is
            messages = [{"role": "user", "content": "word " * count}]
            try:
                _litellm(provider, base, messages=messages, max_tokens=8192)
            except litellm.ContextWindowExceededError:
                found.append(True)
    return found if len(found) == 10 else "a prompt that is too long is not known as such"


@case
def llm_command() -> Any:
    entry = {"model_id": "here", "model_name": MODEL, "api_base": V1, "supports_tools": True, "supports_schema": True}
    (FOLDER / "extra-openai-models.yaml").write_text(json.dumps([entry]))
    environ = os.environ | {"LLM_USER_PATH": str(FOLDER), "OPENAI_API_KEY": "none"}

    def run(*words: str) -> str:
        command = [sys.executable, "-m", "llm", "prompt", "-m", "here", "-o", "max_tokens", "80", *words]
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL
        )
        assert done.returncode == 0 or "Chain limit" in done.stderr, done.stderr
        return done.stdout or done.stderr

    text = run(QUESTION)
    schema = json.loads(run("--schema", json.dumps(Trip.model_json_schema()), QUESTION))
    return [bool(text.strip()), schema, bool(run("-T", "llm_version", "--chain-limit", "2", "Hello").strip())]


def _try(made: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"found": made()}
    except Exception:  # noqa: BLE001 - told to whoever started this
        return {"error": traceback.format_exc()[-3000:]}


if __name__ == "__main__":
    wanted = sys.argv[4:] or list(CASES)
    (FOLDER / "found.json").write_text(json.dumps({name: _try(CASES[name]) for name in wanted}))
