"""The documentation names what there is: every file, every setting, every command; and no link leads nowhere."""

import re
from pathlib import Path

import pytest

from stowage.config.settings import SETTINGS

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]


def test_every_file_has_one_line_in_the_architecture() -> None:
    listed = re.findall(r"^\| `([\w/]+\.py)` \|", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE)
    source = ROOT / "src" / "stowage"
    assert sorted(listed) == sorted(str(path.relative_to(source)) for path in source.rglob("*.py"))


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
