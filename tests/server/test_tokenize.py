"""Tokens without an answer: those that the engine would compute, and back to text."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from stowage.engine.engine import Engine
from tests.server.process import Server

MESSAGES = [{"role": "user", "content": "Grüße, 日本"}]


@pytest.fixture
def ask(server: Server) -> Any:
    return lambda path, **body: httpx.post(server.url + path, json=body, timeout=60)


def test_texts(ask, engine: Engine) -> None:
    expected = engine.tokenizer("Grüße, 日本")["input_ids"]
    told = ask("/tokenize", prompt="Grüße, 日本", return_token_strs=True).json()
    assert told["tokens"] == expected == ask("/tokenize", content="Grüße, 日本").json()["tokens"]
    assert (told["count"], told["max_model_len"]) == (len(expected), 4096)
    assert len(told["token_strs"]) == len(expected) and told["token_strs"][0] == "G"
    assert ask("/detokenize", tokens=expected).json()["prompt"] == "Grüße, 日本"
    assert ask("/tokenize", prompt="").json()["tokens"] == []
    assert ask("/detokenize", tokens=[]).json()["prompt"] == ""


def test_conversations(ask, engine: Engine) -> None:
    told = ask("/tokenize", model="tiny", messages=MESSAGES).json()
    assert told["tokens"] == engine.prompts.read(MESSAGES)
    assert "<assistant>" in ask("/detokenize", tokens=told["tokens"]).json()["prompt"]
    short = ask("/tokenize", messages=MESSAGES, add_generation_prompt=False).json()
    assert short["count"] == told["count"] - 1


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "x" * 100_000}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "x", "colour": 1}, "colour"),
        ("/tokenize", {"prompt": "x", "messages": MESSAGES}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/detokenize", {"tokens": [1] * 5000}, "tokens"),
    ],
)
def test_what_is_refused(path: str, body: dict[str, Any], param: str, ask) -> None:
    answer = ask(path, **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert ask(path, model="other", prompt="x").status_code == 404
