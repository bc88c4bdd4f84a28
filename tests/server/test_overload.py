"""More than the server can do: who is refused is told when to come again, what takes too long ends, nothing is lost."""

from __future__ import annotations

import contextlib
import json
import time

import httpx
import openai
import pytest

from tests.nursery import wait_until
from tests.server.process import Server
from tests.server.wire import connected, request, until

TEXT = "/v1/completions"
LONG = {"model": "tiny", "prompt": "x" * 100, "max_tokens": 3990, "ignore_eos": True}
SHORT = {"model": "tiny", "prompt": "x", "max_tokens": 1}


@pytest.fixture(scope="module")
def server(start) -> Server:
    return start("--max-queued-requests", "3", "--max-num-seqs", "2")


@pytest.fixture(scope="module")
def hasty(start) -> Server:
    """One whose requests may take a second and a half."""
    return start("--request-timeout-s", "1.5")


def full(server: Server, choices: int) -> None:
    wait_until(lambda: server.total("stowage_choices_open") == choices, f"{choices} choices open")


def test_a_full_queue(server: Server) -> None:
    """Two run and three wait; the sixth is refused, before and after its body is read; then there is room again."""
    with connected(server) as one:
        one.sendall(request(TEXT, LONG | {"n": 5}))
        full(server, 5)
        response = httpx.post(server.url + TEXT, json=SHORT)
        assert response.status_code == 429
        assert 1 <= int(response.headers["retry-after"]) <= 60
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            with pytest.raises(openai.RateLimitError):
                client.completions.create(**SHORT)
            assert client.models.list().data, "what computes nothing is served"
        assert httpx.get(server.url + "/health").status_code == 200
    wait_until(server.idle, "idle", 30)
    with connected(server) as one, connected(server) as another:
        one.sendall(request(TEXT, LONG | {"n": 3}))
        full(server, 3)
        assert httpx.post(server.url + TEXT, json=SHORT | {"n": 3}).status_code == 429
        another.sendall(request(TEXT, LONG | {"n": 2}))
        full(server, 5)
    wait_until(server.idle, "idle", 30)


def test_more_choices_than_could_ever_be_served(server: Server) -> None:
    """Not the client's bad luck but its mistake, so it is not told to try again."""
    response = httpx.post(server.url + TEXT, json=SHORT | {"n": 6})
    assert response.status_code == 400 and response.json()["error"]["param"] == "n"
    response = httpx.post(server.url + TEXT, json=SHORT | {"prompt": ["x"] * 6})
    assert response.status_code == 400 and response.json()["error"]["param"] == "prompt"


def test_a_client_that_tries_again_is_served(server: Server) -> None:
    """OpenAI's client obeys Retry-After by itself."""
    with connected(server) as one:
        one.sendall(request(TEXT, LONG | {"n": 5, "max_tokens": 200}))
        full(server, 5)
        with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=50) as client:
            assert client.completions.create(**SHORT).choices
    wait_until(server.idle, "idle", 30)


@pytest.mark.rare
def test_an_answer_that_takes_too_long(hasty: Server) -> None:
    asked = LONG | {"n": 2}
    response = httpx.post(hasty.url + TEXT, json=asked, timeout=60)
    assert response.status_code == 504 and response.json()["error"]["code"] == "timeout"
    wait_until(hasty.idle, "cancelled", 30)


def test_a_stream_that_takes_too_long(hasty: Server) -> None:
    """It has begun with 200, so the error comes as its last event; no `[DONE]`, since it is not done."""
    began_s = time.monotonic()
    with connected(hasty) as connection:
        connection.sendall(request(TEXT, LONG | {"stream": True, "n": 2}))
        read = until(connection, b"\r\n0\r\n\r\n")
    assert time.monotonic() - began_s >= 1.5
    assert b"[DONE]" not in read and read.count(b'"text"') > 2
    assert b'"code": "timeout"' in read.split(b"data: ")[-1]
    wait_until(hasty.idle, "cancelled", 30)
    with openai.OpenAI(base_url=hasty.url + "/v1", api_key="none", max_retries=0) as client:
        stream = client.completions.create(
            model="tiny", prompt="x", max_tokens=4000, stream=True, n=2, extra_body={"ignore_eos": True}
        )
        with pytest.raises(openai.APIError, match=r"longer than the 1\.5 s"):
            for _ in stream:
                pass
    wait_until(hasty.idle, "cancelled", 30)


def test_a_large_prompt_limit(start) -> None:
    small = start("--max-prompt-tokens", "50", "--max-choices", "3")
    assert httpx.post(small.url + TEXT, json=SHORT | {"prompt": [5] * 50}).status_code == 200
    for prompt in ([5] * 51, "x" * 51, ["x", "x" * 51]):
        error = httpx.post(small.url + TEXT, json=SHORT | {"prompt": prompt}).json()["error"]
        assert error["code"] == "context_length_exceeded" and "at most 50 tokens" in error["message"]
    assert httpx.post(small.url + TEXT, json=SHORT | {"n": 4}).status_code == 400
    small.stop()


def test_bodies_that_lie_in_memory_together(start) -> None:
    """Nine clients send bodies of the largest size and stop short of their ends: eight of them fit."""
    small = start("--max-body-size", "64KiB", "--request-memory", "512KiB")
    whole = json.dumps(SHORT | {"prompt": "x" * 65000}).encode()
    head = f"POST {TEXT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 65530\r\n\r\n"
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(connected(small)) for _ in range(9)]
        for connection in held[:8]:
            connection.sendall(head.encode() + whole)
        full_s = time.monotonic() + 30
        status = 0
        while status != 429 and time.monotonic() < full_s:
            status = httpx.post(
                small.url + TEXT, content=b" " * 65000, headers={"content-type": "application/json"}
            ).status_code
        assert status == 429
    wait_until(lambda: httpx.post(small.url + TEXT, json=SHORT).status_code == 200, "room again")
    small.stop()
