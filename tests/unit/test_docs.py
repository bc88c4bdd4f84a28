"""The documentation names what there is, leads somewhere, is up to date where it is generated, and can be read."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from stowage.config.settings import SETTINGS

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
PROSE = [page for page in PAGES if page.name != "CHANGELOG.md"]
PARAGRAPH_WORDS_MAX = 80
PRIVATE_WORDS = (
    r"meetings?|arrivals|residency|siblings|underway|cargo|berths?|crews?|surveys?|parcels?|weather|rooms"
    r"|(?:the|a|an|each|every|which|these|those) holds?(?= (?:and|or|of|in|is|are|has|have|that|below|above)\b|[.,;:)])"
)


def paragraphs(text: str) -> list[str]:
    """The prose of a page: each paragraph and each item of a list. No code, tables or headings."""
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
    found: list[list[str]] = [[]]
    for line in re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL).splitlines():
        if not line.strip() or line.startswith(("|", "#", "    ")):
            found.append([])
        elif re.match(r"\s*([-*]|\d+\.) ", line):
            found.append([line])
        else:
            found[-1].append(line)
    return [" ".join(" ".join(lines).split()) for lines in found if lines]


def anchors(page: Path) -> set[str]:
    """As GitHub makes them from headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def test_the_reference_is_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/reference.py", "--check"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, f"make reference: {done.stderr}"


def test_every_setting_is_in_the_reference() -> None:
    text = (ROOT / "docs" / "reference" / "settings.md").read_text()
    assert [name for name in SETTINGS if f"| `{name}` |" not in text] == []


def test_every_file_says_what_it_is() -> None:
    """The file map is made of these first sentences."""
    rows = re.findall(r"^\| `[\w/]+\.py` \| (.*) \|$", (ROOT / "docs" / "reference" / "files.md").read_text(), re.M)
    assert len(rows) > 100 and all(len(row.split()) >= 2 for row in rows)


def test_files_that_internals_names_exist() -> None:
    """Paths below ``src/stowage`` stand there without it."""
    text = (ROOT / "docs" / "internals.md").read_text()
    named = set(re.findall(r"`((?:tests/|scripts/)?[a-z_]+(?:/[\w]+)+\.(?:py|c|json))`", text))
    assert len(named) > 40
    homes = {name: ROOT if name.startswith(("tests/", "scripts/")) else ROOT / "src" / "stowage" for name in named}
    assert sorted(name for name, home in homes.items() if not (home / name).exists()) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text()):
        if target.startswith("http"):
            continue
        other = page.parent / target if target else page
        assert other.exists(), target
        assert not anchor or anchor in anchors(other), f"{target}#{anchor}"


@pytest.mark.parametrize("page", PROSE, ids=lambda page: page.name)
def test_paragraphs_are_short(page: Path) -> None:
    long = [text for text in paragraphs(page.read_text()) if len(text.split()) > PARAGRAPH_WORDS_MAX]
    assert long == []


@pytest.mark.parametrize("page", PROSE, ids=lambda page: page.name)
def test_words_are_those_of_the_field(page: Path) -> None:
    """No names that only this project ever gave to things. What stands in code, such as a key of JSON, may stay."""
    prose = "\n".join(re.sub(r"`[^`]*`", "", text) for text in paragraphs(page.read_text()))
    assert re.findall(rf"\b(?:{PRIVATE_WORDS})", prose, re.IGNORECASE) == []


def test_pages_that_the_code_names_exist() -> None:
    folders = ("src", "scripts", "benchmarks", "deploy", "docs/examples")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.*") if path.suffix in (".py", ".yml")]
    named = {name for path in files for name in re.findall(r"\bdocs/[\w/-]+\.md", path.read_text())}
    assert len(named) > 10
    assert sorted(name for name in named if not (ROOT / name).exists()) == []


def test_make_targets_in_the_documentation_exist() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        name for page in PAGES for name in re.findall(r"`make ([a-z0-9-]+)`|^make ([a-z0-9-]+)", page.read_text(), re.M)
    }
    assert {a or b for a, b in named} <= targets
