"""The pages on serving, planning and trouble say what is: files, messages of the program, bytes of models."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from stowage.config.memory import Memory
from stowage.core.geometry import Kind
from stowage.engine.engine import Engine
from stowage.engine.placement_report import placement
from stowage.testing import tiny_models
from tests.deploy.conftest import ROOT

DOCS = ROOT / "docs"
TROUBLE = (DOCS / "troubleshooting.md").read_text().partition("## What it says")[2]
COMMAND = r"pip install|stowage (?:key|tiny|scrub|serve|doctor|top)\b|chmod|chown|mkdir|openssl|--[a-z]+|STOWAGE_"


def text_of(node: ast.expr) -> str:
    """A text as it stands in the source, with … for what is put in."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(map(text_of, parts))
        case ast.BinOp(left=left, right=right):
            return text_of(left) + text_of(right)
    return "…"


@cache
def texts() -> tuple[tuple[str, bool, str], ...]:
    """File, whether it is what an error says, and the text: all of the program."""
    return tuple(_texts())


def _texts() -> Iterator[tuple[str, bool, str]]:
    for path in sorted((ROOT / "src" / "stowage").rglob("*.py")):
        if "testing" in path.parts or "demo" in path.parts:
            continue
        tree = ast.parse(path.read_text())
        errors = {
            id(node.args[0])
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and node.args and ast.unparse(node.func).endswith("Error")
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr | ast.Constant) and len(text_of(node)) > 8:
                yield path.name, id(node) in errors, text_of(node)


def messages() -> list[list[str]]:
    """What the page quotes: each message in the parts between `…`."""
    cells = re.findall(r"^\| (`[^|]+?) \|", TROUBLE, re.MULTILINE)
    quoted = [one for cell in cells for one in re.findall(r"`([^`]+)`", cell)]
    return [[part.strip() for part in one.split("…") if len(part.strip()) > 3] for one in quoted]


def says(text: str, parts: list[str]) -> bool:
    at = 0
    for part in parts:
        if (found := text.find(part, at)) < 0:
            return False
        at = found + len(part)
    return True


@pytest.mark.slow
def test_every_message_on_the_page_is_one_of_the_program() -> None:
    known = [text for _, _, text in texts()]
    assert len(messages()) > 30
    assert [parts for parts in messages() if not any(says(text, parts) for text in known)] == []


def test_every_error_that_names_a_command_is_on_the_page() -> None:
    """A new one needs a row: why it comes, and what to do."""
    named = {(file, text) for file, is_error, text in texts() if is_error and re.search(COMMAND, text)}
    assert len(named) > 20
    assert sorted(one for one in named if not any(says(one[1], parts) for parts in messages())) == []


@pytest.mark.parametrize("page", ["serving", "planning", "troubleshooting"])
def test_files_and_anchors_exist(page: str) -> None:
    text = (DOCS / f"{page}.md").read_text()
    named = set(re.findall(r"\b(deploy/[\w./-]+\w)", text))
    assert [name for name in named if not (ROOT / name).exists() and not name.endswith(".env")] == []
    for target, anchor in re.findall(r"\]\(([\w./-]*)#([\w-]+)\)", text):
        other = (DOCS / target).read_text() if target else text
        headings = {
            re.sub(r"[^\w -]", "", line).strip().lower().replace(" ", "-")
            for line in re.findall(r"^#+ (.*)$", other, re.MULTILINE)
        }
        assert anchor in headings, f"{target}#{anchor}"


ROWS = re.findall(
    r"^\| `(\w+)` \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) tokens \| ([\d,]+) tokens \|$",
    (DOCS / "planning.md").read_text(),
    re.MULTILINE,
)


def test_every_kind_has_a_row() -> None:
    assert sorted(row[0] for row in ROWS) == sorted(tiny_models.KINDS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_the_bytes_of_each_family(row: tuple[str, ...], tmp_path: Path) -> None:
    family, *numbers = row
    per_token, per_snapshot, device, host = (int(number.replace(",", "")) for number in numbers)
    model = tiny_models.write(family, tmp_path / family)
    with Engine(model, Memory(kv_cache_memory="16MiB", host_memory="32MiB")) as engine:
        groups = engine.parts.layout.groups
        paged = [group for group in groups if group.kind is not Kind.RECURRENT]
        assert per_token == sum(group.bytes_per_chunk // group.chunk_tokens for group in paged)
        assert per_snapshot == sum(group.bytes_per_chunk for group in groups if group.kind is Kind.RECURRENT)
        told = [place for place in placement(engine) if "full" in place.what]
        assert [(place.tier, place.tokens) for place in told] == [("device", device), ("host", host)]


def test_the_arithmetic_of_models() -> None:
    """Products of numbers and sums in brackets."""
    rows = re.findall(
        r"^\| [^|]+ \| ([\d× ()+layers]+ × 2) \| ([\d,]+) \|$", (DOCS / "planning.md").read_text(), re.MULTILINE
    )
    assert len(rows) == 6
    for formula, said in rows:
        plain = re.sub(r"\((\d+) \+ (\d+)\)", lambda sum_: str(int(sum_[1]) + int(sum_[2])), formula)
        assert math.prod(map(int, re.findall(r"\d+", plain))) == int(said.replace(",", "")), formula
