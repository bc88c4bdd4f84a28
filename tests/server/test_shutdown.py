"""Stopping: nobody new, the running ones end, the tiers are written; or, told twice, at once."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

import stowage
from stowage.engine.engine import Engine
from stowage.engine.sampling_params import SamplingParams
from tests.depth import mostly_rare
from tests.engine.conftest import random_prompt
from tests.nursery import QUICKLY, wait_until
from tests.server.wire import answer, closed, connected, request, until

TEXT = "/v1/completions"
SHORT = {"model": "tiny", "prompt": "x", "max_tokens": 1}


def some(new_tokens: int, **more: object) -> dict[str, object]:
    return {"model": "tiny", "prompt": "x" * 50, "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True} | more


@pytest.mark.parametrize("number", mostly_rare([signal.SIGTERM, signal.SIGHUP, signal.SIGINT], [signal.SIGTERM]))
def test_running_requests_end_and_new_ones_are_refused(start, engine: Engine, number: int) -> None:
    server = start()
    (expected,) = engine.generate(["x" * 50], SamplingParams(max_new_tokens=500, ignore_eos=True))
    with connected(server) as idle, connected(server) as waiting, connected(server) as streaming:
        idle.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
        assert answer(idle)[0] == 200
        waiting.sendall(request(TEXT, some(500)))
        streaming.sendall(request(TEXT, some(500, stream=True)))
        read = until(streaming, b'"text"')
        wait_until(lambda: server.total("stowage_choices_open") == 2, "both run")
        server.signal(number)
        assert closed(idle), "a connection on which nobody waits is closed"
        with pytest.raises(httpx.ConnectError):
            httpx.post(server.url + TEXT, json=SHORT)
        status, _, body = answer(waiting)
        assert (status, json.loads(body)["choices"][0]["text"]) == (200, expected.text)
        read += until(streaming, b"\r\n0\r\n\r\n")
        events = [json.loads(e[6:]) for e in read.decode().split("\n") if e.startswith("data: {")]
        assert "".join(event["choices"][0]["text"] for event in events) == expected.text
        assert b"data: [DONE]" in read
        assert closed(waiting) and closed(streaming)
    assert server.child.wait() == 0
    assert server.err.read_text() == "Stopping.\n"


def test_what_does_not_end_in_time_is_told(start) -> None:
    server = start("--shutdown-timeout-s", "0.5")
    with connected(server) as waiting, connected(server) as streaming, connected(server) as sending:
        sending.sendall(request(TEXT, some(1), length=5000))
        waiting.sendall(request(TEXT, some(4000)))
        streaming.sendall(request(TEXT, some(4000, stream=True)))
        until(streaming, b'"text"')
        wait_until(lambda: server.total("stowage_choices_open") == 2, "both run")
        server.signal(signal.SIGTERM)
        status, _, body = answer(waiting)
        assert (status, json.loads(body)["error"]["code"]) == (503, "shutting_down")
        read = until(streaming, b"\r\n0\r\n\r\n")
        assert b'"code": "shutting_down"' in read and b"[DONE]" not in read
        assert closed(sending)
    assert server.child.wait() == 0


def test_a_second_signal_ends_it_at_once(start) -> None:
    server = start("--shutdown-timeout-s", "600")
    with connected(server) as waiting:
        waiting.sendall(request(TEXT, some(4000, n=8)))
        wait_until(lambda: not server.idle(), "running")
        server.signal(signal.SIGTERM)
        wait_until(lambda: _refuses(server.url), "stopping")
        server.signal(signal.SIGTERM)
        assert server.child.wait() == signal.SIGTERM


def _refuses(url: str) -> bool:
    try:
        return httpx.get(url + "/health").status_code != 200
    except httpx.HTTPError:
        return True


@pytest.mark.slow
def test_what_was_computed_is_on_disk_afterwards(start, tmp_path: Path) -> None:
    flags = ["--host-memory", "32MiB", "--disk", f"{tmp_path / 'cache'}:256MiB"]
    prompts = [random_prompt(1500, seed=n) for n in range(6)]
    first = start(*flags)
    with httpx.Client(base_url=first.url, timeout=60) as client:
        before = [client.post(TEXT, json=some(3) | {"prompt": prompt}).json() for prompt in prompts]
    first.stop()
    second = start(*flags)
    with httpx.Client(base_url=second.url, timeout=60) as client:
        after = [client.post(TEXT, json=some(3) | {"prompt": prompt}).json() for prompt in prompts]
    assert [a["choices"] for a in after] == [b["choices"] for b in before]
    found = second.metrics()
    assert found["stowage_tier_chunks", (("tier", "disk"),)] >= 6 * (1500 // 64), "all of them, the last one too"
    assert found["stowage_chunk_hits_total", (("tier", "disk"),)] > 0
    second.stop()


def test_a_server_that_was_stopped_leaves_its_port(start) -> None:
    first = start()
    with connected(first) as connection:
        connection.sendall(request(TEXT, SHORT))
        assert answer(connection)[0] == 200
        first.stop()
    second = start("--port", str(first.port))
    assert second.port == first.port
    second.stop()


def test_a_port_in_use_is_told_before_the_model_is_loaded(start, tiny_llama: Path, tmp_path: Path) -> None:
    """And the exit status is 2, as for all that cannot be done."""
    server = start()
    command = [sys.executable, "-m", "stowage", "serve", str(tmp_path / "no model"), "--port", str(server.port)]
    environment = {"PYTHONPATH": str(Path(stowage.__file__).parents[1]), "HOME": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "another program listens there" in done.stderr and done.stdout == ""
    server.stop()


@pytest.mark.rare
def test_signals_while_clients_come_and_go(start) -> None:
    """Whatever the moment, no request gets half an answer without being told."""
    for delay_s in (0.0, 0.05, 0.2):
        server = start("--shutdown-timeout-s", "20")
        outcomes: list[object] = []

        def ask(server=server, outcomes=outcomes) -> None:
            with httpx.Client(base_url=server.url, timeout=60) as client:
                while True:
                    try:
                        response = client.post(TEXT, json=some(20))
                        outcomes.append(response.status_code)
                        assert len(response.json()["choices"]) == 1 if response.status_code == 200 else True
                    except httpx.TransportError as error:
                        outcomes.append(type(error))
                    if outcomes[-1] != 200:
                        return

        asking = [threading.Thread(target=ask) for _ in range(6)]
        for thread in asking:
            thread.start()
        time.sleep(delay_s)
        server.stop()
        for thread in asking:
            thread.join(60)
            assert not thread.is_alive()
        # a connection that is closed between two requests, or was never taken, is no lost answer
        assert set(outcomes) <= {
            200,
            503,
            httpx.ConnectError,
            httpx.RemoteProtocolError,
            httpx.ReadError,
            httpx.WriteError,
        }


_FAILING = """
import sys
from stowage.executor.runner import Runner
real, failed = Runner.run, []
def run(self, work):
    failed.extend(w for w in work if hasattr(w.sequence, "params") and w.sequence.params.max_new_tokens == 77)
    if failed:
        raise ZeroDivisionError("a bug")
    return real(self, work)
Runner.run = run
from stowage.cli.app import app
app(sys.argv[1:])
"""


@pytest.mark.slow
def test_an_engine_that_has_failed_ends_the_server(tiny_llama, tmp_path) -> None:
    """With a status on which supervisors start it anew, unlike that of wrong use."""
    arguments = ["serve", str(tiny_llama), "--host", "127.0.0.1", "--port", "0", "--json", "--kv-cache-memory", "8MiB"]
    environment = {"PYTHONPATH": str(Path(stowage.__file__).parents[1]), "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", QUICKLY + _FAILING, *arguments]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as served:
        assert served.stdout is not None
        told = json.loads(served.stdout.readline())
        with httpx.Client(base_url=told["url"], timeout=60) as client:
            asked = SHORT | {"model": told["model"]}
            assert client.post(TEXT, json=asked).status_code == 200
            assert client.post(TEXT, json=asked | {"max_tokens": 77}).status_code == 500
        _, errors = served.communicate(timeout=60)
    assert served.returncode == 70, errors
    assert "The engine has failed" in errors
