"""``stowage top``: what it says when there is nothing to watch, whom it gives its key to, and what a frame looks like.
tests/server/test_top.py watches real servers.
"""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from rich.console import Console

from stowage.cli.frame import frame
from stowage.cli.top import _base
from stowage.errors import ConfigError
from tests.cli.conftest import Stowage

KEY = "k" * 32
STATE = {
    "server": {
        "model": "tiny",
        "started_at": 1.0,
        "now_s": 3725.0,
        "age_s": 0.01,
        "alive": True,
        "stopping": False,
        "choices_open": 1,
        "choices_limit": 144,
    },
    "totals": {
        "tokens_reused": 123456,
        "seconds_saved": 75.5,
        "hit_rate": 0.875,
        "corrupt_chunks": 3,
        "requests": 17.0,
        "prefill_tokens_per_s": 1234.5,
    },
    "memory": {
        "device": {
            "weights_bytes": 1 << 20,
            "groups": [
                {
                    "kind": "sliding",
                    "blocks": 100,
                    "used": 25,
                    "cached": 50,
                    "bytes": 1 << 21,
                    "used_bytes": 1 << 19,
                    "cached_bytes": 1 << 20,
                }
            ],
        },
        "host": {"slabs": [{"kinds": ["full", "sliding"], "bytes_used": 1 << 19, "bytes": 1 << 20}]},
        "tiers": [
            {
                "name": "valkey",
                "shared": True,
                "bytes_used": None,
                "bytes_limit": None,
                "chunks": 7,
                "loads_under_way": 2,
                "stores_under_way": 1,
                "read_bytes": 5 << 20,
                "write_bytes": None,
                "breaker": "open",
            }
        ],
    },
    "transfers": {"transfers_under_way": 3, "spills_waiting": 4, "promoted_bytes": 1 << 20, "spilled_bytes": 2 << 20},
    "requests": {
        "open": [
            {
                "id": "req-0123456789abcdef01234567",
                "state": "answering",
                "prompt_tokens": 1000,
                "reused_tokens": {"device": 500, "host": 0, "valkey": 250},
                "computed_tokens": 250,
                "answer_tokens": 5,
                "arrived_s": 3724.0,
                "times": {"first_token_s": 0.25, "ended_s": None},
            }
        ],
        "ended": [],
    },
    "history": {
        "names": ["at_s", "tokens_reused", "prompt_tokens_computed", "answer_tokens"],
        "samples": [[5.0 * n, 100.0 * n * n, 50.0 * n, 1.0 * n] for n in range(30)],
    },
}


def shown(state: dict, width: int = 160, height: int | None = None, **how: object) -> str:
    console = Console(width=width, height=height, force_terminal=False, highlight=False)
    with console.capture() as caught:
        console.print(frame(state, how.pop("before", None), width=width, height=height, **how))  # type: ignore[arg-type]
    return caught.get()


# frames


def test_a_frame_says_everything() -> None:
    text = shown(STATE)
    for words in (
        "tiny  up 1 h 2 min, 1 of 144 answers open",
        "123,456",
        "1 min 15 s",
        "87.5 %",
        "1,234 tokens/s",
        "512 KiB in use, 1 MiB cached, of 2 MiB",
        "██████▓▓▓▓▓▓▓▓▓▓▓▓░░░░░░",
        "full attention and sliding window",
        "512 KiB of 1 MiB",
        "7 known chunks",
        "left alone for a while",
        "3 under way, 4 chunks to be written, 1 MiB loaded, 2 MiB written",
        "device 500 valkey 250 computed 250",
        "1.00 s",
        "250 ms",
    ):
        assert words in text, words
    assert " 3 " in text, "the corrupt chunks"


def test_speeds_are_between_two_looks() -> None:
    later = copy.deepcopy(STATE)
    later["server"]["now_s"] += 2  # type: ignore[index, operator]
    later["memory"]["tiers"][0]["read_bytes"] += 6 << 20  # type: ignore[index]
    assert "3 MiB/s" in shown(later, before=STATE) and "MiB/s" not in shown(later)
    other = copy.deepcopy(STATE)
    other["server"]["started_at"] = 2.0  # type: ignore[index]
    assert "MiB/s" not in shown(later, before=other), "of a server that was started anew nothing is subtracted"


@pytest.mark.parametrize("width", [60, 80, 100, 160, 250])
@pytest.mark.parametrize("height", [None, 10, 24, 40, 60])
def test_a_frame_fits(width: int, height: int | None) -> None:
    many = copy.deepcopy(STATE)
    many["requests"]["ended"] = [dict(many["requests"]["open"][0], id=f"req-{n:024}") for n in range(300)]  # type: ignore[index]
    lines = shown(many, width, height, trouble="nobody answers").splitlines()
    assert max(map(len, lines)) <= width
    if height is not None and height >= 24:
        assert len(lines) <= height
        assert sum("req-" in line for line in lines) >= 2
    elif height is None:
        assert sum("req-" in line for line in lines) == 12


def test_a_frame_without_tiers_and_requests() -> None:
    small = copy.deepcopy(STATE)
    small["memory"]["host"], small["memory"]["tiers"], small["transfers"] = None, [], None  # type: ignore[index]
    small["requests"]["open"], small["history"]["samples"] = [], []  # type: ignore[index]
    small["totals"]["hit_rate"] = None  # type: ignore[index]
    text = shown(small)
    assert "no host memory" in text and "none yet" in text


def test_what_troubles_a_server_is_told() -> None:
    def told(**changed: object) -> str:
        return shown(STATE | {"server": STATE["server"] | changed})  # type: ignore[operator]

    assert "THE ENGINE HAS STOPPED" in told(alive=False)
    assert "stopping" in told(stopping=True)
    assert "as of 7 s ago" in told(age_s=7.2)
    assert "CONNECTION LOST  gone" in shown(STATE, trouble="gone")


def test_texts_of_a_server_do_not_drive_the_terminal() -> None:
    nasty = "\x1b]0;owned\x07[red]x[/red]\x9b2J\r"
    hostile = json.loads(
        json.dumps(STATE).replace('"tiny"', json.dumps(nasty)).replace("valkey", json.dumps(nasty)[1:-1])
    )
    hostile["requests"]["open"][0]["id"] = hostile["requests"]["open"][0]["state"] = nasty
    hostile["memory"]["device"]["groups"][0]["kind"] = nasty
    text = shown(hostile, trouble=nasty)
    assert not [c for c in text if not c.isprintable() and c != "\n"]
    assert "[red]x[/red]" in text


def test_bars_of_ascii() -> None:
    text = shown(STATE, plain=True)
    assert "######============......" in text and not [c for c in text.replace("╭─┬╮│├┼┤╰┴╯", "") if c in "█▓░▁▂▃▄▅▆▇"]


# whom it asks


class Answers(BaseHTTPRequestHandler):
    """Answers every request as `reply` says: status, headers, body."""

    reply: tuple[int, dict[str, str], bytes] = (200, {}, b"")
    seen: list[tuple[str, str | None]]

    def do_GET(self) -> None:
        type(self).seen.append((self.path, self.headers.get("authorization")))
        status, headers, body = self.reply
        self.send_response(status)
        for name, value in ({"content-length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def answering() -> Iterator[Callable[..., tuple[str, type[Answers]]]]:
    servers: list[HTTPServer] = []

    def start(status: int, body: bytes = b"", **headers: str) -> tuple[str, type[Answers]]:
        handler = type("Handler", (Answers,), {"reply": (status, headers, body), "seen": []})
        server = HTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}", handler

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture(autouse=True)
def _no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STOWAGE_API_KEYS", raising=False)


def refused(call: Stowage, *arguments: str) -> str:
    result = call("top", *arguments)
    assert result.exit_code == 2 and result.stdout == "", result.output
    assert result.stderr.startswith("stowage: ") and result.stderr.count("\n") == 1
    return result.stderr


def test_nobody_answers(call: Stowage, answering) -> None:
    url, _ = answering(200)
    free = url.rpartition(":")[0] + ":9"
    words = refused(call, "--once", free)
    assert f"No server answers at {free} (Connection refused)" in words
    assert "stowage serve MODEL" in words and "stowage top http://HOST:PORT" in words


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (404, b"{}", "no `stowage serve`"),
        (200, b"<html>", "no `stowage serve`"),
        (200, b"[1]", "no `stowage serve`"),
        (200, b'{"server": 1}', "no `stowage serve`"),
        (200, b"\xff", "no `stowage serve`"),
        (200, json.dumps(STATE | {"totals": {}}).encode(), "no `stowage serve`"),
        (500, b"", "status 500"),
        (503, b"", "status 503"),
        (403, b"", "as localhost"),
    ],
)
def test_what_answers_is_something_else(call: Stowage, answering, status: int, body: bytes, words: str) -> None:
    url, _ = answering(status, body)
    assert words in refused(call, "--once", url)


def test_a_key_is_wanted_or_wrong(call: Stowage, answering, monkeypatch: pytest.MonkeyPatch) -> None:
    url, handler = answering(401)
    assert "wants an API key. Give --api-key-file FILE, or set STOWAGE_API_KEYS" in refused(call, url)
    monkeypatch.setenv("STOWAGE_API_KEYS", f"{KEY},{'x' * 20}")
    words = refused(call, url)
    assert "does not know this API key" in words and KEY not in words
    assert handler.seen == [("/v1/stowage/state", None), ("/v1/stowage/state", f"Bearer {KEY}")]


def test_a_key_file(call: Stowage, answering, tmp_path: Path) -> None:
    url, handler = answering(200, json.dumps(STATE).encode())
    (tmp_path / "keys").write_text(f"# ours\n{KEY}\n{'x' * 20}\n")
    (tmp_path / "keys").chmod(0o600)
    result = call("top", url, "--api-key-file", tmp_path / "keys")
    assert result.exit_code == 0 and "tiny" in result.stdout
    assert [key for _, key in handler.seen] == [f"Bearer {KEY}"], "one frame where stdout is no terminal"
    (tmp_path / "keys").chmod(0o644)
    assert "chmod 600" in refused(call, url, "--api-key-file", str(tmp_path / "keys"))


def test_a_key_is_not_handed_on(call: Stowage, answering, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither to whoever a server points to, nor to a proxy when the server is on this machine."""
    monkeypatch.setenv("STOWAGE_API_KEYS", KEY)
    other, stranger = answering(200, json.dumps(STATE).encode())
    url, _ = answering(302, b"", location=f"{other}/v1/stowage/state")
    assert call("top", "--json", url).exit_code == 0
    assert [key for _, key in stranger.seen] == [None]
    monkeypatch.setenv("http_proxy", other)
    direct, handler = answering(200, json.dumps(STATE).encode())
    assert call("top", "--json", direct).exit_code == 0
    assert len(handler.seen) == 1 and len(stranger.seen) == 1


def test_json_is_the_state_itself(call: Stowage, answering) -> None:
    url, _ = answering(200, json.dumps(STATE).encode())
    assert json.loads(call("top", url, "--json").stdout) == STATE


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("localhost:1", "http://localhost:1"),
        ("http://h:8000/v1/", "http://h:8000"),
        ("https://h/stowage", "https://h/stowage"),
        ("https://h/stowage/v1", "https://h/stowage"),
        ("[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_addresses(written: str, meant: str) -> None:
    assert _base(written) == meant


@pytest.mark.parametrize(
    "url", ["", "ftp://h", "http://", "h:port", "h:70000", "h:0", "http://h?x=1", "http://h#x", "h\n:1"]
)
def test_addresses_that_are_none(call: Stowage, url: str) -> None:
    assert "is no address of a server. Write it as http://127.0.0.1:8000" in refused(call, url)


def test_a_key_in_the_address_is_refused_and_not_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        _base(f"http://me:{KEY}@h:1")
    assert KEY not in str(caught.value) and "--api-key-file" in str(caught.value)


@pytest.mark.parametrize("interval", ["0", "-1", "nan", "0.05"])
def test_intervals_that_are_too_short(call: Stowage, interval: str) -> None:
    assert "--interval" in refused(call, "--interval", interval)
