"""GGUF files on the hub: which file a name means, and that it is downloaded once, from a hub on this machine."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest
from gguf import GGMLQuantizationType as Kind

from stowage.errors import CheckpointError
from stowage.models.hub import find_gguf
from stowage.models.hub_gguf import files_of, parse
from tests.weights import gguf_files
from tests.weights.gguf_models import made

COMMIT = "1" * 40
NAMES = (
    "README.md",
    "mmproj-F16.gguf",
    "imatrix_unsloth.gguf",
    "Tiny-0.6B-Q8_0.gguf",
    "Tiny-0.6B-Q4_K_M.gguf",
    "Tiny-0.6B-UD-Q4_K_M.gguf",
    "Tiny-0.6B.i1-IQ4_XS.gguf",
    "BF16/Tiny-0.6B-BF16-00001-of-00002.gguf",
    "BF16/Tiny-0.6B-BF16-00002-of-00002.gguf",
    "tiny.q6_k.gguf",
)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("org/tiny-GGUF:Q4_K_M", ("org/tiny-GGUF", "Q4_K_M")),
        ("org/tiny-0.6B-GGUF:Tiny-Q8_0.gguf", ("org/tiny-0.6B-GGUF", "Tiny-Q8_0.gguf")),
        ("org/tiny", None),
        ("tiny:Q8_0", None),
        ("./org/tiny:Q8_0", None),
        ("C:/tiny:Q8_0", None),
    ],
)
def test_names_with_a_tag(name: str, found: tuple[str, str] | None) -> None:
    assert parse(name) == found


@pytest.mark.parametrize(
    ("tag", "found"),
    [
        ("", ["Tiny-0.6B-Q4_K_M.gguf"]),
        ("Q4_K_M", ["Tiny-0.6B-Q4_K_M.gguf"]),
        ("q8_0", ["Tiny-0.6B-Q8_0.gguf"]),
        ("Q6_K", ["tiny.q6_k.gguf"]),
        ("IQ4_XS", ["Tiny-0.6B.i1-IQ4_XS.gguf"]),
        ("UD-Q4_K_M", ["Tiny-0.6B-UD-Q4_K_M.gguf"]),
        ("BF16", [name for name in NAMES if "BF16" in name]),
        ("Tiny-0.6B-BF16-00002-of-00002.gguf", [name for name in NAMES if "BF16" in name]),
        ("tiny.q6_k.gguf", ["tiny.q6_k.gguf"]),
    ],
)
def test_the_file_that_a_tag_means(tag: str, found: list[str]) -> None:
    assert files_of("org/tiny", NAMES, tag) == found


def test_what_means_no_file_or_several_is_refused_with_what_there_is() -> None:
    with pytest.raises(CheckpointError, match=r"has no Q2_K \(.*Tiny-0\.6B-Q8_0\.gguf.*name one by its type"):
        files_of("org/tiny", NAMES, "Q2_K")
    with pytest.raises(CheckpointError, match="2 GGUF models"):
        files_of("org/tiny", ["a-Q8_0.gguf", "b-Q6_K.gguf"])
    with pytest.raises(CheckpointError, match=r"several models that :Q8_0 may mean.*org/tiny:a-Q8_0\.gguf"):
        files_of("org/tiny", ["a-Q8_0.gguf", "b-Q8_0.gguf"], "Q8_0")
    with pytest.raises(CheckpointError, match="give it without :Q8_0"):
        files_of("org/tiny", ["model.safetensors"], "Q8_0")
    assert files_of("org/tiny", ["model.safetensors"]) == []
    assert files_of("org/tiny", ["any.gguf", "mmproj-F16.gguf"]) == ["any.gguf"]


def test_a_name_that_no_repository_can_have_is_refused_as_one_that_is_not_there() -> None:
    for name in ("org/a b-GGUF", "org/--x-GGUF"):
        with pytest.raises(CheckpointError, match="the hub did not give it"):
            find_gguf(name)


class _Hub(BaseHTTPRequestHandler):
    """What the hub's client asks of one, of repositories that are directories of ``root``."""

    protocol_version = "HTTP/1.1"

    def __init__(self, root: Path, asked: list[str], *args: object) -> None:
        self.root, self.asked = root, asked
        super().__init__(*args)  # type: ignore[arg-type]

    def log_message(self, *_args: object) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        parts = unquote(urlparse(self.path).path).strip("/").split("/")
        self.asked.append(f"{self.command} {'/'.join(parts)}")
        if parts[:2] == ["api", "models"]:
            self._answer(self._listing("/".join(parts[2:4]), "tree" in parts), {"Content-Type": "application/json"})
            return
        file = self.root.joinpath(*parts[:2], *parts[4:])
        content = file.read_bytes() if file.is_file() else None
        mark = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"'} if content else {"X-Error-Code": "EntryNotFound"}
        self._answer(content, {**mark, "X-Repo-Commit": COMMIT})

    do_HEAD = do_GET

    def _listing(self, repository: str, tree: bool) -> bytes | None:
        directory = self.root / repository
        if not directory.is_dir():
            return None
        files = {str(f.relative_to(directory)): f.stat().st_size for f in directory.rglob("*") if f.is_file()}
        if tree:
            return json.dumps(
                [{"type": "file", "path": f, "size": n, "oid": COMMIT} for f, n in files.items()]
            ).encode()
        return json.dumps({"id": repository, "sha": COMMIT, "siblings": [{"rfilename": f} for f in files]}).encode()

    def _answer(self, content: bytes | None, headers: dict[str, str]) -> None:
        self.send_response(200 if content is not None else 404)
        for name, value in {**headers, "Content-Length": str(len(content or b""))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content or b"")


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[tuple[dict[str, str], list[str]]]:
    """The environment in which a hub on this machine is asked, and what it was asked."""
    repository = tmp_path / "hub" / "org" / "tiny-GGUF"
    repository.mkdir(parents=True)
    model = made("llama", tmp_path / "model")
    for kind in (Kind.Q8_0, Kind.F16):
        gguf_files.write(model, repository / f"tiny-{kind.name}.gguf", kind)
    asked: list[str] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Hub, tmp_path / "hub", asked))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield (
            {
                **os.environ,
                "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
                "HF_HOME": str(tmp_path / "home"),
                "HF_HUB_DISABLE_XET": "1",
                "HF_HUB_OFFLINE": "0",
            },
            asked,
        )
    finally:
        server.shutdown()
        server.server_close()


PROGRAM = """
import sys
from stowage import CheckpointError, Engine, SamplingParams
from stowage.planner.model import read_model

def plan(name):
    try:
        read_model(name)
        print("planned")
    except CheckpointError as error:
        print("refused:", " ".join(str(error).split()))

_, name, other = sys.argv
plan(name)
with Engine(name) as engine:
    print(len(engine.generate([[1, 2, 3, 4]], SamplingParams(max_new_tokens=4, ignore_eos=True))[0].token_ids))
plan(name)
plan(other)
"""
FIND = "import sys; from stowage.models.hub import find; print(find(sys.argv[1]))"


def ran(environment: dict[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_the_file_that_is_named_is_downloaded_once_and_answers(hub: tuple[dict[str, str], list[str]]) -> None:
    environment, asked = hub
    name = "org/tiny-GGUF:Q8_0"
    answered = ran(environment, "-c", PROGRAM, name, "org/tiny-GGUF:F16")
    assert answered.returncode == 0, answered.stderr
    before, tokens, plan, other = answered.stdout.splitlines()
    assert "hf download org/tiny-GGUF --include '*Q8_0*.gguf'" in before, "plan downloads nothing"
    assert (tokens, plan) == ("4", "planned")
    assert other.startswith("refused: ") and "was not downloaded" in other
    got = [one for one in asked if one.startswith("GET org/")]
    assert [one.rpartition("/")[2] for one in got] == ["tiny-Q8_0.gguf"], "once, and no other file"
    offline = {**environment, "HF_HUB_OFFLINE": "1"}
    unreachable = {**environment, "HF_ENDPOINT": "http://127.0.0.1:9"}
    for one in (offline, unreachable):
        assert ran(one, "-c", FIND, name).stdout.endswith("tiny-Q8_0.gguf\n")


def test_a_repository_of_several_without_a_type_says_which_there_are(hub: tuple[dict[str, str], list[str]]) -> None:
    said = ran(hub[0], "-c", FIND, "org/tiny-GGUF").stderr
    assert "org/tiny-GGUF has 2 GGUF models (tiny-F16.gguf, tiny-Q8_0.gguf)" in said
