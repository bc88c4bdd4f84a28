"""Chat templates out of GGUF files, behind the server: what they check of tools and calls, and what cannot be used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from stowage.testing import tiny_models
from tests.server.process import Server
from tests.server.test_tools import ASKED, CITY, checked, tool
from tests.weights import gguf_files

CHECKS_CALLS = (
    "{% for m in messages %}{% for call in m.tool_calls or [] %}{% if call.id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
    "[TOOL_CALLS]{{ call.id }}{% endfor %}{% if m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
    "[TOOL_RESULTS]{{ m.tool_call_id }}{% endif %}{{ m.content }}{% endfor %}"
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
)
"""As Mistral's do."""
JOINS_DESCRIPTIONS = (
    "{% for tool in tools or [] %}<tool_call>{{ tool.function.name + ' - ' + tool.function.description }}{% endfor %}"
    "{% for m in messages %}<user>{{ m.content }}{% endfor %}<assistant>"
)
"""As Hermes' does."""


@pytest.fixture
def serve(start: Callable[..., Server], tmp_path: Path) -> Callable[[str], openai.OpenAI]:
    """A server of a tiny GGUF file with this chat template."""

    def begin(template: str) -> openai.OpenAI:
        source = tiny_models.write("llama", tmp_path / "source", tiny_models.TinySize(hidden=32, layers=1))
        known = AutoTokenizer.from_pretrained(source).get_vocab()
        own: dict[str, Any] = {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": sorted(known, key=known.__getitem__),
            "tokenizer.ggml.merges": ["A A"],
            "tokenizer.chat_template": template,
        }
        model = AutoModelForCausalLM.from_pretrained(source)
        server = start(model=gguf_files.write(model, tmp_path / "tiny.gguf", tokens=own))
        return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60)

    return begin


def asked(client: openai.OpenAI, **more: Any) -> Any:
    given = {"model": "tiny.gguf", "messages": ASKED, "max_tokens": 60, "temperature": 1.0, "seed": 3, **more}
    return client.chat.completions.create(**given)


def test_calls_that_another_server_numbered_are_taken(serve: Callable[[str], openai.OpenAI]) -> None:
    """Such as those of a conversation that was begun elsewhere: Mistral's templates refuse their identities."""
    client = serve(CHECKS_CALLS)
    for identity in ("call_abcdefghijklmnopqrstuvwx", "1", "abcDEF123"):
        call = {"id": identity, "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
        result = {"role": "tool", "tool_call_id": identity, "content": "rain"}
        history = [*ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}, result]
        tokens = client.post("../tokenize", body={"model": "tiny.gguf", "messages": history}, cast_to=dict)["tokens"]
        text = client.post("../detokenize", body={"model": "tiny.gguf", "tokens": tokens}, cast_to=dict)["prompt"]
        called, answered = text.partition("[TOOL_CALLS]")[2][:9], text.partition("[TOOL_RESULTS]")[2][:9]
        assert called == answered and called.isalnum() and (called == identity) is (len(identity) == 9)
        asked(client, messages=history, max_tokens=1)


def test_a_tool_without_a_description_is_offered_to_a_template_that_joins_it(
    serve: Callable[[str], openai.OpenAI],
) -> None:
    client = serve(JOINS_DESCRIPTIONS)
    answer = asked(client, tools=[tool("weather", CITY)], tool_choice="required", max_tokens=200).choices[0]
    checked(answer.message.tool_calls)


@pytest.mark.parametrize("template", ["{% for m in messages %}{{ m.content }", "{{ ''.__class__.__mro__ }}"])
def test_a_template_that_cannot_be_used_is_told_with_the_way_out(
    template: str, serve: Callable[[str], openai.OpenAI]
) -> None:
    """It was said to refuse the messages."""
    client = serve(template)
    with pytest.raises(openai.BadRequestError, match=r"cannot be used, whatever the messages.*--chat-template FILE"):
        asked(client)
    assert client.completions.create(model="tiny.gguf", prompt="Hello", max_tokens=1).choices
