"""The documentation names what there is: every file, every setting, every command; and no link leads nowhere."""

import ast
import re
from pathlib import Path

import pytest

from stowage.config.settings import SETTINGS

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]


def test_every_file_says_what_it_owns() -> None:
    source = ROOT / "src" / "stowage"
    silent = [path for path in source.rglob("*.py") if not ast.get_docstring(ast.parse(path.read_text()))]
    assert silent == []


def test_every_setting_is_documented() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()
    assert [name for name in SETTINGS if f"`{name}`" not in text] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    assert [t for t in targets if not t.startswith("http") and not (page.parent / t).exists()] == []


def test_make_targets_in_the_documentation_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {name for page in PAGES for name in re.findall(r"`make ([a-z-]+)`|^make ([a-z-]+)", page.read_text(), re.M)}
    assert {a or b for a, b in named} <= targets
