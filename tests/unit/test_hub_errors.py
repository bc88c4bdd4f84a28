"""What is told when the hub gives no model: for each trouble what failed, why, and what to do, in one sentence each."""

import errno
import os
import re
import subprocess
import sys
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
)

from stowage.models.hub import _from_hub
from stowage.models.hub_errors import why_not

REQUEST = httpx.Request("HEAD", "https://huggingface.co/org/model/resolve/main/config.json")


def answered(status: int, kind: type[HfHubHTTPError] = HfHubHTTPError) -> HfHubHTTPError:
    return kind(f"{status} Client Error.\n\nRequest ID: x", response=httpx.Response(status, request=REQUEST))


def wrapped(inner: Exception) -> Exception:
    """As the hub's client raises what it met."""
    try:
        try:
            raise inner
        except Exception as error:
            raise LocalEntryNotFoundError(f"Got: {type(error).__name__}: {error}") from error
    except LocalEntryNotFoundError as outer:
        return outer


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            httpx.ConnectError("[Errno 111] Connection refused"),
            "huggingface.co cannot be reached (Connection refused). Check the network",
        ),
        (httpx.ReadTimeout("The read operation timed out"), "huggingface.co cannot be reached (The read"),
        (httpx.ConnectTimeout(""), "huggingface.co cannot be reached (ConnectTimeout). Check"),
        (answered(404, RepositoryNotFoundError), "huggingface.co has no such model, or a private one. Check the sp"),
        (answered(403, GatedRepoError), "Do so at huggingface.co/org/model, and set HF_TOKEN"),
        (answered(404, RemoteEntryNotFoundError), "it holds no config.json"),
        (answered(401), "does not take the key that it was given (status 401). Set HF_TOKEN"),
        (answered(429), "has been asked too often (status 429). Wait"),
        (answered(503), "answers with an error of its own (status 503). Try again later"),
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device ("),
        (HFValidationError("Repo id must use ..."), "ids are ORG/NAME"),
        (RuntimeError("Data processing error: CAS service error"), "its client says: "),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else type(value).__name__,
)
def test_it_is_told_what_failed_why_and_what_to_do(
    error: Exception, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "https://huggingface.co")

    def ask() -> str:
        raise found

    for found in (error, wrapped(error)):
        said = why_not("org/model:Q4_K_M", found)
        assert told in said and "Client Error" not in said, said
        assert re.search(r"\b(Check|Set|Do so|Wait|Try again)\b", said) and "\n" not in said and ".." not in said, said
        with pytest.raises(Exception, match="the hub did not give it") as raised:
            _from_hub("org/model:Q4_K_M", ask)
        assert len(str(raised.value)) <= 400 and type(raised.value).__name__ == "CheckpointError"


def test_offline_nobody_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "Unset HF_HUB_OFFLINE" in why_not("org/model", wrapped(httpx.ConnectError("x")))


class _Busy(BaseHTTPRequestHandler):
    """A hub that answers nothing but that it cannot."""

    def __init__(self, asked: list[str], *args: object) -> None:
        self.asked = asked
        super().__init__(*args)  # type: ignore[arg-type]

    def log_message(self, *_args: object) -> None:
        """Nothing."""

    def do_HEAD(self) -> None:
        self.asked.append(self.path)
        self.send_response(503)
        self.end_headers()


def test_a_config_is_asked_for_once_where_the_hub_has_trouble(tmp_path: Path) -> None:
    """Its client would ask again for half a minute."""
    asked: list[str] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Busy, asked))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    environment = os.environ | {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    code = "from stowage.models.hub import find_config; find_config('org/name')"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    server.shutdown()
    server.server_close()
    assert "answers with an error of its own (status 503). Try again later" in done.stderr
    assert asked == ["/org/name/resolve/main/config.json"]
