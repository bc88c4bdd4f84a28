"""`stowage top` on real servers: its numbers are those of /metrics; a live one goes on when its server comes back."""

from __future__ import annotations

import functools
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner, Result

from stowage.cli.app import app
from stowage.config.memory import format_size
from tests.engine.conftest import random_prompt
from tests.nursery import wait_until
from tests.server.process import Server

SOURCE = Path(__file__).parents[2] / "src"
KEY, OTHER = "key-of-somebody-0123456789", "key-of-another-0123456789"


@pytest.fixture(scope="module")
def guarded(start) -> Server:
    return start("--host-memory", "16MiB", STOWAGE_API_KEYS=f"{KEY},{OTHER}")


def top(*arguments: str, key: str = KEY) -> Result:
    return CliRunner(env={"STOWAGE_API_KEYS": key, "HOME": "/nowhere"}).invoke(app, ["top", *arguments])


def test_its_numbers_are_those_of_the_metrics(guarded: Server) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    body = {"model": "tiny", "prompt": random_prompt(200), "max_tokens": 3, "ignore_eos": True}
    for _ in range(2):
        answer = httpx.post(guarded.url + "/v1/completions", json=body, headers=headers, timeout=60).raise_for_status()
    metrics = guarded.metrics(**headers)
    wait_until(lambda: "done" in top("--json", guarded.url).stdout, "the request has ended")

    shown = top("--once", guarded.url)
    assert shown.exit_code == 0 and shown.stderr == ""
    reused = int(metrics["stowage_tokens_reused_total", ()])
    computed = int(metrics["stowage_prompt_tokens_computed_total", ()])
    assert reused == 192 and re.search(rf"│ {reused} +│", shown.stdout)
    assert f"{100 * reused / (reused + computed):.1f} %" in shown.stdout
    labels = (("group", "0"), ("kind", "full"))
    used, kept, blocks = (int(metrics["stowage_device_blocks" + name, labels]) for name in ("_used", "_cached", ""))
    pool = int(metrics["stowage_device_bytes", labels])
    sizes = (format_size(part) for part in (used * (pool // blocks), kept * (pool // blocks), pool))
    assert "{} in use, {} cached, of {}".format(*sizes) in shown.stdout
    identity = answer.headers["x-request-id"]
    (line,) = [line for line in shown.stdout.splitlines() if identity in line]
    assert "done" in line and "device 192 computed 8" in line

    state = json.loads(top("--json", guarded.url + "/v1").stdout)
    assert state["totals"]["tokens_reused"] == reused and state["requests"]["ended"][0]["id"] == identity
    assert not json.loads(top("--json", guarded.url, key=OTHER).stdout)["requests"]["ended"]


def test_a_wrong_key(guarded: Server) -> None:
    refused = top(guarded.url, key="key-of-nobody-0123456789")
    assert refused.exit_code == 2 and "does not know this API key" in refused.stderr
    assert top(guarded.url, key="").stderr.count("wants an API key") == 1


@pytest.mark.slow
def test_live_in_a_terminal(start) -> None:
    """It says when the server has gone, looks again when there is one, and ends with Ctrl-C."""
    server = start("--host-memory", "1MiB")
    terminal, inner = pty.openpty()
    command = [sys.executable, "-m", "stowage", "top", "--interval", "0.1", server.url]
    environment = {"PYTHONPATH": str(SOURCE), "HOME": "/nowhere", "TERM": "xterm", "LC_ALL": "C.UTF-8"}
    sizes = {"COLUMNS": "120", "LINES": "45"}
    heard = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a job in the background is deaf to it
    process = subprocess.Popen(
        command, env=environment | sizes, stdin=inner, stdout=inner, stderr=inner, preexec_fn=heard
    )
    os.close(inner)
    os.set_blocking(terminal, False)
    screen = bytearray()

    def seen(words: bytes) -> bool:
        try:
            screen.extend(os.read(terminal, 1 << 20))
        except BlockingIOError:
            time.sleep(0.02)
        return words in screen

    try:
        wait_until(lambda: seen(b"answers open"), "a first frame")
        screen.clear()
        wait_until(lambda: seen(b"answers open"), "another one")
        server.stop()
        wait_until(lambda: seen(b"CONNECTION LOST"), "it says that the server has gone")
        screen.clear()
        wait_until(lambda: seen(b"none yet"), "what was known is still there")
        again = start("--port", str(server.port))
        assert again.url == server.url
        wait_until(lambda: seen(b"no host memory"), "it shows the new server")
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
