"""A conversation of ten turns with a real server that is restarted after each: the same bits as without restarts and
tiers.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.real_model.test_exact import MODEL, ROOT, pages

TURNS = 10
ANSWER_TOKENS = 12

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not (MODEL / "config.json").exists(), reason="there is no real model here: make real-model"),
]


@contextmanager
def server(*flags: str) -> Iterator[httpx.Client]:
    command = [sys.executable, "-m", "stowage", "serve", str(MODEL), "--host", "127.0.0.1", "--port", "0", "--json"]
    command += ["--kv-cache-memory", "256MiB", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        try:
            with httpx.Client(base_url=told["url"], timeout=300) as client:
                yield client
        finally:
            process.terminate()
            process.wait(60)


def turn(client: httpx.Client, messages: list[dict[str, str]]) -> dict[str, Any]:
    asked = {
        "model": MODEL.name,
        "messages": messages,
        "temperature": 0,
        "max_tokens": ANSWER_TOKENS,
        "logprobs": True,
        "top_logprobs": 3,
    }
    answer = client.post("/v1/chat/completions", json=asked)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def test_a_chat_over_restarts(tmp_path: Path) -> None:
    text = pages()
    questions = [f"What does this say?\n\n{text[at : at + 700]}" for at in range(0, TURNS * 700, 700)]
    messages: list[dict[str, str]] = []
    expected = []
    with server() as plain:
        for number, question in enumerate(questions):
            messages.append({"role": "user", "content": question})
            told = turn(plain, messages)
            assert not told["system_fingerprint"].endswith("batch-dependent")
            expected.append(told["choices"])
            messages.append({"role": "assistant", "content": told["choices"][0]["message"]["content"]})
            assert number or told["usage"]["prompt_tokens"] > 100
    reused = 0
    for number in range(TURNS):
        with server("--host-memory", "256MiB", "--disk", f"{tmp_path / 'kv'}:1GiB") as tiered:
            told = turn(tiered, messages[: 2 * number + 1])
        assert told["choices"] == expected[number], f"turn {number + 1}"
        reused += told["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert reused > 1000, "the turns before came from disk"
