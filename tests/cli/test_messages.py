"""Wrong inputs of the commands: no traceback, what happened and what to do next, in at most 400 characters."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Stowage

Spoil = Callable[[Path], object]
LONGEST = 400


def with_config(path: Path, **fields: object) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | fields))


def only(name: str) -> Spoil:
    def spoil(path: Path) -> None:
        for file in path.iterdir():
            file.unlink()
        (path / name).write_text("GGUF")

    return spoil


@pytest.mark.parametrize(
    ("spoil", "arguments", "words"),
    [
        (lambda path: (path / "tokenizer.json").write_text("{}"), ("run", "DIR", "-p", "x"), ["Download tokenizer"]),
        (lambda path: with_config(path, hidden_size=65), ("run", "DIR", "-p", "x"), ["config.json", "multiple"]),
        (only("model.gguf"), ("run", "DIR", "-p", "x"), ["no whole GGUF file", "download it again"]),
        (only("model.gguf"), ("run", "DIR/model.gguf", "-p", "x"), ["no whole GGUF file", "download it again"]),
        (only("model.gguf"), ("plan", "DIR/model.gguf"), ["no whole GGUF file", "download it again"]),
        (None, ("run", "DIR/other.gguf", "-p", "x"), ["does not exist", "ORG/NAME:Q4_K_M"]),
        (only("adapter_config.json"), ("plan", "DIR"), ["/model holds no config.json", "hub id"]),
        (None, ("run", "DIR", "-p", "x", "--device", "mps"), ["built without mps", "Use cpu"]),
        (None, ("run", "DIR", "-p", "x", "--kv-cache-memory", "4000TiB"), ["cannot be had", "--kv-cache-memory"]),
        (None, ("run", "no-such/model", "-p", "x"), ["HF_HUB_OFFLINE is set", "Unset"]),
        (None, ("serve", "DIR", "--host", "no such name"), ["STOWAGE_HOST", "--host 127.0.0.1"]),
        (None, ("tiny", "llama", "NEW", "--heads", "0"), ["--heads"]),
        (None, ("tiny", "llama", "NEW", "--kv-heads", "3"), ["3 key-value heads"]),
        (None, ("tiny", "llama", "NEW", "--layers", "-1"), ["--layers"]),
    ],
)
def test_what_it_says(
    spoil: Spoil | None, arguments: tuple[str, ...], words: list[str], call: Stowage, tiny_llama: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(tiny_llama, directory)
    if spoil is not None:
        spoil(directory)
    named = [argument.replace("DIR", str(directory)).replace("NEW", str(tmp_path / "new")) for argument in arguments]
    result = call(*named)
    assert result.exit_code == 2 and "Traceback" not in result.stderr
    said = " ".join(result.stderr.replace("\u2502", " ").split())
    assert all(word in said for word in words), said
    assert len(said.replace(str(tmp_path), "")) <= LONGEST, said
