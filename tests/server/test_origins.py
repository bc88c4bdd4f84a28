"""Web pages of other origins: kept out by default, let in by name."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest

from tests.server.process import Server

PAGE = "https://chat.example"
ASKED = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "content-type,x-api-key",
}


def test_no_page_may_read_answers_by_default(server: Server) -> None:
    answer = httpx.get(server.url + "/v1/models", headers={"origin": PAGE})
    assert answer.status_code == 200 and "access-control-allow-origin" not in answer.headers
    assert httpx.options(server.url + "/v1/completions", headers=ASKED).status_code == 405


@pytest.mark.parametrize("listed", [f"http://localhost:3000,{PAGE}", f'["{PAGE}"]'])
def test_pages_that_are_named(listed: str, start: Callable[..., Server]) -> None:
    server = start("--allowed-origins", listed)
    body = {"model": "tiny", "prompt": "x", "max_tokens": 2, "stream": True}
    answer = httpx.post(server.url + "/v1/completions", json=body, headers={"origin": PAGE})
    assert answer.headers["access-control-allow-origin"] == PAGE and "[DONE]" in answer.text
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    wrong = httpx.post(server.url + "/v1/completions", json={"model": "tiny"}, headers={"origin": PAGE})
    assert wrong.status_code == 400 and wrong.headers["access-control-allow-origin"] == PAGE
    asked = httpx.options(server.url + "/v1/chat/completions", headers=ASKED)
    assert asked.status_code == 200 and asked.headers["access-control-allow-origin"] == PAGE
    assert "x-api-key" in asked.headers["access-control-allow-headers"]
    other = httpx.get(server.url + "/v1/models", headers={"origin": "https://other.example"})
    assert "access-control-allow-origin" not in other.headers
    server.stop()
