"""docs/transformers.md and its example run as they are written."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import sys
from pathlib import Path

import pytest

from docs.examples import chat_prefixes
from stowage import Memory
from stowage.cache import cost_model
from stowage.plugins.transformers import prefix_cache
from stowage.plugins.transformers.prefix_cache import _NOT_OURS
from stowage.testing import tiny_models
from tests.library.conftest import SIZE

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "transformers.md").read_text()


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine so busy that no disk is as quick as computing would be at best."""
    monkeypatch.setattr(cost_model, "_DEADLINE_LEAST_S", 0.0)
    monkeypatch.setattr(prefix_cache, "prefill_tokens_per_s_most", lambda _model: 1e15)


@pytest.mark.usefixtures("busy")
def test_the_conversation_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second time every turn is restored up to its last boundary; the answers are the same."""
    path = tiny_models.write("qwen3_next", tmp_path / "model", dataclasses.replace(SIZE, context_tokens=2048))
    runs = []
    for _ in range(2):
        chat_prefixes.main(str(path), str(tmp_path / "prefixes"))
        lines = capsys.readouterr().out.strip().splitlines()
        turns = [re.fullmatch(r"(\d+) tokens, (\d+) of them restored, \d+ ms: (.*)", line) for line in lines]
        runs.append([(int(turn[1]), int(turn[2]), turn[3]) for turn in turns if turn])
    first, again = runs
    assert len(first) == len(chat_prefixes.QUESTIONS)
    assert [(tokens, text) for tokens, _, text in first] == [(tokens, text) for tokens, _, text in again]
    assert first[0][1] == 0 and all(found > 0 for _, found, _ in first[1:])
    assert all(found == (tokens - 1) // 64 * 64 for tokens, found, _ in again)


def test_the_first_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    program, *_ = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert program == (DOCS / "examples" / "first_prefix.py").read_text()
    tiny_models.write("llama", tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    importlib.import_module("docs.examples.first_prefix")
    assert re.fullmatch(r"256 of \d+ tokens need not be computed", capsys.readouterr().out.strip())


def test_the_settings_that_are_named_exist() -> None:
    """Every setting in the page's list is one that a PrefixCache takes."""
    (listed,) = re.findall(r"^`valkey`, .*\n", PAGE, re.MULTILINE)
    known = {field.name for field in dataclasses.fields(Memory)} - set(_NOT_OURS)
    named = set(re.findall(r"`(\w+)`", listed))
    assert named and named <= known


@pytest.mark.usefixtures("busy")
def test_the_notebook_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its cells in order, as a kernel runs them; the second time the document comes from disk."""
    cells = json.loads((DOCS / "examples" / "long_document.ipynb").read_text())["cells"]
    program = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    tiny_models.write("qwen3_next", tmp_path / "tiny", dataclasses.replace(SIZE, context_tokens=2048))
    (tmp_path / "long_document_cells.py").write_text(program)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    runs = []
    for _ in range(2):
        sys.modules.pop("long_document_cells", None)
        importlib.import_module("long_document_cells")
        told = re.findall(r"(\d+) tokens, (\d+) of them restored", capsys.readouterr().out)
        runs.append([(int(tokens), int(restored)) for tokens, restored in told])
    first, again = runs
    assert first[0][1] == 0 and first[1][1] > 0 and again[0][1] > 0
    assert [tokens for tokens, _ in first] == [tokens for tokens, _ in again]
