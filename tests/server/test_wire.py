"""Clients that do not speak HTTP, send too much or too slowly, read nothing, or leave: each costs only itself."""

from __future__ import annotations

import contextlib
import json
import threading
import time

import httpx
import pytest

from tests.depth import mostly_rare
from tests.nursery import wait_until
from tests.server.process import Server
from tests.server.wire import answer, closed, connected, request, until

TEXT = "/v1/completions"
SHORT = {"model": "tiny", "prompt": "x", "max_tokens": 1}
LONG = {"model": "tiny", "prompt": "x" * 100, "max_tokens": 3990, "ignore_eos": True}
"""Takes many seconds."""
HASTY = ["--header-timeout-s", "1", "--body-timeout-s", "1", "--stall-timeout-s", "1", "--keep-alive-s", "1.5"]


@pytest.fixture(scope="module")
def server(start) -> Server:
    return start("--max-body-size", "256KiB", "--max-header-size", "4KiB", "--max-connections", "40")


@pytest.fixture(scope="module")
def hasty(start) -> Server:
    """One that does not wait long for anybody."""
    return start(*HASTY)


@pytest.fixture(autouse=True)
def _lives_on(server: Server):
    yield
    assert httpx.post(server.url + TEXT, json=SHORT).status_code == 200
    wait_until(server.idle, "idle again", 30)
    assert server.err.read_text() == ""


def error_of(body: bytes) -> dict[str, str]:
    (error,) = json.loads(body).values()
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(
    "sent",
    [
        b"hello\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64) + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
        b"GET /health HTTP/one\r\nhost: a\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost : a\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip\r\n\r\n",
    ],
    ids=range(9),
)
def test_what_is_no_http(server: Server, sent: bytes) -> None:
    with connected(server) as connection:
        connection.sendall(sent)
        status, headers, body = answer(connection)
        assert status in (400, 501) and error_of(body)["code"] == "invalid_http" and headers["connection"] == "close"
        assert closed(connection)


def test_a_head_that_is_too_large(server: Server) -> None:
    with connected(server) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\n" + b"x-filler: " + b"y" * 5000)
        status, _, body = answer(connection)
        assert status == 431 and "4096 bytes" in error_of(body)["message"]
        assert closed(connection)


@pytest.mark.parametrize("filler_bytes", [4096, 60_000, 200_000])
def test_a_head_that_is_too_large_and_comes_at_once(server: Server, filler_bytes: int) -> None:
    """Whole heads were let through, whatever their size."""
    with connected(server) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\nx-filler: " + b"y" * filler_bytes + b"\r\n\r\n")
        status, _, body = answer(connection)
        assert status == 431 and "4096 bytes" in error_of(body)["message"]
        assert closed(connection)
    with connected(server) as connection:
        connection.sendall(b"GET /health?" + b"q" * filler_bytes + b" HTTP/1.1\r\nhost: a\r\n\r\n")
        assert answer(connection)[0] == 431


def test_a_head_that_is_just_small_enough(server: Server) -> None:
    head = b"GET /health HTTP/1.1\r\nhost: a\r\nx-filler: %s\r\n\r\n"
    with connected(server) as connection:
        connection.sendall(head % (b"y" * (4096 - len(head) + 2)))
        assert answer(connection)[0] == 200


@pytest.mark.parametrize(
    "beginning", mostly_rare([b"", b"GET /hea", b"GET /health HTTP/1.1\r\nhost: a\r\nx: "], [b"GET /hea"])
)
def test_a_head_that_does_not_end(hasty: Server, beginning: bytes) -> None:
    """However slowly it trickles in, and after a first request too."""
    for first in (b"", b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n"):
        with connected(hasty) as connection:
            if first:
                connection.sendall(first)
                assert answer(connection)[0] == 200
            connection.sendall(beginning)
            stop = threading.Event()

            def trickle(connection=connection, stop=stop) -> None:
                try:
                    while not stop.wait(0.1):
                        connection.sendall(b"a")
                except OSError:
                    pass

            trickling = threading.Thread(target=trickle)
            if beginning:
                trickling.start()
            assert closed(connection)
            stop.set()
            if beginning:
                trickling.join()


@pytest.mark.parametrize("trickle", mostly_rare([False, True], [True]))
def test_a_body_that_does_not_end(hasty: Server, trickle: bool) -> None:
    with connected(hasty) as connection:
        connection.sendall(request(TEXT, SHORT, length=100_000))
        until_s = time.monotonic() + 0.7
        while trickle and time.monotonic() < until_s:
            connection.sendall(b" ")
            time.sleep(0.05)
        status, headers, body = answer(connection)
        assert (status, error_of(body)["code"], headers["connection"]) == (408, "timeout", "close")
        assert closed(connection)


def test_a_body_that_is_too_large(server: Server) -> None:
    """Declared or not; and one that is just small enough is read."""
    big = {"model": "tiny", "prompt": "x" * 300_000}
    response = httpx.post(server.url + TEXT, json=big)
    assert response.status_code == 413 and error_of(response.content)["code"] == "body_too_large"
    parts = (part for part in [b'{"model": "tiny", "prompt": "'] + [b"x" * 10_000] * 40)
    response = httpx.post(server.url + TEXT, content=parts, headers={"content-type": "application/json"})
    assert response.status_code == 413
    most = json.dumps({"model": "tiny", "prompt": ""}).encode()
    padded = most + b" " * (256 * 1024 - len(most))
    headers = {"content-type": "application/json"}
    assert httpx.post(server.url + TEXT, content=padded, headers=headers).status_code == 400
    assert httpx.post(server.url + TEXT, content=padded + b" ", headers=headers).status_code == 413


@pytest.mark.parametrize("chunked", [False, True])
def test_a_client_that_sends_all_of_a_large_body_first(server: Server, chunked: bool) -> None:
    """It is told, however much it still has to send: closing at once would reset the connection, and the answer."""
    sent = [b"x" * 65_536] * 150
    for _ in range(5):
        content = (part for part in sent) if chunked else b"".join(sent)
        response = httpx.post(server.url + TEXT, content=content, headers={"content-type": "application/json"})
        assert response.status_code == 413 and error_of(response.content)["code"] == "body_too_large"


def test_an_answer_before_the_body_was_sent(hasty: Server) -> None:
    """A client that goes on sending what nobody wants does not stay for ever."""
    with connected(hasty) as connection:
        connection.sendall(request("/v1/nothing", SHORT, length=10**9))
        assert answer(connection)[0] == 404
        assert closed(connection)


def test_two_requests_in_one_packet(server: Server) -> None:
    with connected(server) as connection:
        connection.sendall(request(TEXT, SHORT) + request(TEXT, SHORT | {"max_tokens": 2}))
        counts = [json.loads(answer_of)["usage"]["completion_tokens"] for answer_of in _two(connection)]
        assert counts == [1, 2]


def _two(connection) -> list[bytes]:
    read = b""
    while read.count(b'"total_tokens"') < 2:
        part = connection.recv(65536)
        assert part
        read += part
    return [part[part.index(b"{") :] for part in read.split(b"HTTP/1.1 200 OK\r\n")[1:]]


@pytest.mark.parametrize(
    ("target", "host", "status"),
    [
        (b"http://localhost:8000/v1/models?after=x", b"localhost:8000", 200),
        (b"HTTPS://127.0.0.1/v1/mod%65ls", b"evil.example", 200),  # the header says nothing beside it
        (b"http://localhost/health", b"x", 200),
        (b"http://localhost/v1/nothing", b"localhost", 404),
        (b"http://evil.example/v1/models", b"localhost", 403),
        (b"http://localhost", b"localhost", 200),
        (b"http:///v1/models", b"localhost", 404),
    ],
)
def test_a_whole_uri_in_the_request_line(server: Server, target: bytes, host: bytes, status: int) -> None:
    """As clients send it to a proxy, and every server has to take it (RFC 9112, section 3.2.2)."""
    with connected(server) as connection:
        connection.sendall(b"GET " + target + b" HTTP/1.1\r\nhost: " + host + b"\r\n\r\n")
        assert answer(connection)[0] == status
        whole = request(TEXT, SHORT).replace(b"POST /", b"POST http://localhost/")
        connection.sendall(whole)
        assert answer(connection)[0] == 200


def test_expect_continue(server: Server) -> None:
    whole = request(TEXT, SHORT, "expect: 100-continue")
    head, _, body = whole.partition(b"\r\n\r\n")
    with connected(server) as connection:
        connection.sendall(head + b"\r\n\r\n")
        assert until(connection, b"\r\n\r\n").startswith(b"HTTP/1.1 100")
        connection.sendall(body)
        assert answer(connection)[0] == 200


def test_too_many_connections(server: Server) -> None:
    """Those that are there are served; one more is told, and there is room again when some leave."""
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(connected(server)) for _ in range(40)]
        for connection in held:
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
            assert answer(connection)[0] == 200
        with connected(server) as one_more:
            status, _, body = answer(one_more)
            assert status == 503 and error_of(body)["code"] == "too_many_connections"
            assert closed(one_more)
        held[0].sendall(b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert answer(held[0])[0] == 200
    wait_until(lambda: _asked(server), "room again")


def _asked(server: Server) -> bool:
    try:
        return httpx.get(server.url + "/health").status_code == 200
    except httpx.HTTPError:
        return False


def test_an_idle_connection_is_closed(hasty: Server) -> None:
    with connected(hasty) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
        assert answer(connection)[0] == 200
        assert closed(connection)


# leaving


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_takes_its_requests_along(server: Server, stream: bool) -> None:
    """All choices stop, and their blocks are free long before they would have ended."""
    ended = server.total("stowage_choices_total")
    computed = server.total("stowage_tokens_computed_total")
    with connected(server) as connection:
        connection.sendall(request(TEXT, LONG | {"stream": stream, "n": 3}))
        if stream:
            until(connection, b'"text"')
        wait_until(lambda: not server.idle(), "running")
    wait_until(server.idle, "cancelled", 30)
    assert server.total("stowage_choices_total") == ended
    assert server.total("stowage_tokens_computed_total") - computed < 3 * 3990
    assert server.total("stowage_http_requests_total", route=TEXT, status="499" if not stream else "200") > 0


def test_a_client_that_leaves_while_it_waits(server: Server) -> None:
    """Behind sixteen others, so nothing of it has been computed."""
    with connected(server) as running:
        running.sendall(request(TEXT, LONG | {"n": 16}))
        wait_until(lambda: server.total("stowage_choices_open") == 16, "running")
        with connected(server) as waiting:
            waiting.sendall(request(TEXT, LONG | {"n": 2}))
            wait_until(lambda: server.total("stowage_choices_open") == 18, "waiting")
        wait_until(lambda: server.total("stowage_choices_open") == 16, "gone")
    wait_until(server.idle, "all gone", 30)


def test_a_client_that_leaves_in_the_middle_of_its_body(server: Server) -> None:
    with connected(server) as connection:
        connection.sendall(request(TEXT, SHORT, length=5000))
    wait_until(lambda: server.total("stowage_http_requests_total", status="499") > 0, "counted")


def test_a_client_that_reads_nothing(hasty: Server) -> None:
    """What it does not read fills the socket's buffers; then its connection ends, and its requests with it."""
    ended, begun = hasty.total("stowage_choices_total"), hasty.total("stowage_request_prompt_tokens_count")
    asked = {"prompt": "x" * 3000, "max_tokens": 1000, "echo": True, "logprobs": 20, "n": 4, "stream": True}
    with connected(hasty, receive_bytes=4096) as connection:
        connection.sendall(request(TEXT, LONG | asked))
        wait_until(lambda: hasty.total("stowage_request_prompt_tokens_count") > begun, "begun")
        wait_until(hasty.idle, "cut off", 60)
        assert closed(connection)
    assert hasty.total("stowage_choices_total") == ended
