"""Every HTTP field with every kind of odd value, as bytes on the wire: answered or refused by name, never a fault."""

from __future__ import annotations

import json
import random
from itertools import product

import httpx
import pytest

from tests.depth import few_or_all
from tests.server.process import Server

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
ODD = [
    "null", "true", "false", "0", "-0", "-1", "1", "2", "3.5", "1e-38", "5e-324", "1e308", "1e400", "-1e400", "NaN",
    "Infinity", "-Infinity", "9" * 30, "9" * 5000, "-" + "9" * 400, "0.1e-400", '""', '" "', '"x"', '"nan"',
    '"\\ud800"', '"\\u0000"', '"\\ud83d\\udea2"', '"\u202e"', json.dumps("x" * 100_000), json.dumps("漢" * 5000), "[]",
    "[null]", "[[]]", "[[1]]", "[1]",
    "[-1]", "[1.5]", "[true]", "[99999999999999999999]", '[""]', '["x"]', '["\\udfff"]',
    json.dumps(["x"] * 200), "[" * 300 + "]" * 300, "{}", '{"x": 1}', '{"type": "text"}', '{"": null}',
    '{"include_usage": 5}', '{"include_usage": true, "x": 1}', '[{}]', '[{"role": "user"}]',
    '[{"role": "user", "content": null}]', '[{"role": "user", "content": []}]',
    '[{"role": "user", "content": [{"type": "text", "text": "\\ud800"}]}]', '[{"role": [], "content": "x"}]',
    '[{"role": "tool", "content": "x", "tool_call_id": 5}]', '[{"role": "user", "content": [{"type": "image_url"}]}]',
    '[{"role": "assistant", "content": "x", "tool_calls": [{"id": 1}]}]',
]  # fmt: skip
BOTH = (
    "model n max_tokens temperature top_p top_k min_p seed stop stop_token_ids ignore_eos logprobs stream "
    "stream_options cache_salt user logit_bias presence_penalty frequency_penalty response_format "
    "structured_outputs guided_json guided_choice guided_regex repetition_penalty min_tokens nonsense"
).split()
FIELDS = {
    TEXT: [*BOTH, "prompt", "echo", "best_of", "suffix"],
    CHAT: [
        *BOTH, "messages", "max_completion_tokens", "top_logprobs", "tools", "tool_choice", "functions",
        "function_call", "parallel_tool_calls", "modalities", "audio", "reasoning_effort", "metadata", "store",
        "chat_template_kwargs", "continue_final_message", "add_generation_prompt",
    ],
}  # fmt: skip


def plain(path: str) -> dict[str, str]:
    given = {"model": '"tiny"', "max_tokens": "1"}
    return given | ({"prompt": '"ab"'} if path == TEXT else {"messages": '[{"role": "user", "content": "ab"}]'})


def cases() -> list[tuple[str, dict[str, str]]]:
    """One field at a time, and three at once."""
    found = [(path, {name: value}) for path in FIELDS for name, value in product(FIELDS[path], ODD)]
    chance = random.Random(11)
    found = chance.sample(found, few_or_all(len(found) // 3, len(found)))
    for _ in range(few_or_all(100, 400)):
        path = chance.choice([TEXT, CHAT])
        found.append((path, {name: chance.choice(ODD) for name in chance.sample(FIELDS[path], 3)}))
    return found


def body(path: str, odd: dict[str, str]) -> bytes:
    given = plain(path) | odd
    return ("{" + ", ".join(f"{json.dumps(name)}: {value}" for name, value in given.items()) + "}").encode()


@pytest.mark.exhaustive
def test_every_field(server: Server) -> None:
    headers = {"content-type": "application/json"}
    taken = refused = 0
    with httpx.Client(base_url=server.url, timeout=60, headers=headers) as client:
        expected = client.post(TEXT, content=body(TEXT, {"temperature": "0"})).json()["choices"][0]["text"]
        for path, odd in cases():
            answer = client.post(path, content=body(path, odd))
            where = f"{path} {str(odd)[:200]}"
            assert answer.status_code in (200, 400, 404), f"{where}: {answer.status_code} {answer.text[:300]}"
            if answer.status_code == 200:
                taken += 1
                assert '"error"' not in answer.text, where
                continue
            refused += 1
            error = answer.json()["error"]
            assert error["message"] and len(error["message"]) < 1000 and "Traceback" not in error["message"], where
            said = str(error["param"]) + error["message"]
            near = any(name in said for name in odd) or error["code"] == "invalid_json" or "prompt" in said
            assert near or "messages" in said, f"{where}: {error}"
        assert client.get("/health").json() == {"status": "ok"}
        again = client.post(TEXT, content=body(TEXT, {"temperature": "0"})).json()["choices"][0]["text"]
        assert again == expected and taken > 100 and refused > 500
    assert "Traceback" not in server.err.read_text() and server.total("stowage_choices_open") == 0


@pytest.mark.parametrize(
    "junk", [b"", b"\xff\xfe", b"\x00" * 100, b"{" * 100_000, b'{"a":' * 50_000, b"\xed\xa0\x80", b"[1]"]
)
def test_bodies_that_are_no_objects(server: Server, junk: bytes) -> None:
    for path in (TEXT, CHAT):
        answer = httpx.post(server.url + path, content=junk, headers={"content-type": "application/json"})
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_json"
    assert httpx.get(server.url + "/health").json() == {"status": "ok"}
