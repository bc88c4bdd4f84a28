"""Writes the generated parts of ``docs/reference``: flags, settings, metrics and the file map.

    python scripts/reference.py            # make reference runs this, and scripts/models_doc.py for the models
    python scripts/reference.py --check    # writes nothing; status 1 where a page is out of date

A generated part stands between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``; everything else on a page is written
by hand and left alone. Each part comes from the code that the program itself uses: flags from the command line's own
parser, settings from ``config``'s table, metrics from their rows, the file map from the modules' docstrings.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import typer

from stowage import metrics
from stowage.cli.app import app
from stowage.config.settings import SETTINGS, Setting

ROOT: Final = Path(__file__).parents[1]
PAGES: Final = ROOT / "docs" / "reference"
SOURCE: Final = ROOT / "src" / "stowage"
PART: Final = re.compile(r"(<!-- begin ([\w -]+) -->\n)(.*?)(<!-- end \2 -->)", re.DOTALL)


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


# -- commands --------------------------------------------------------------------------------------------------------


def commands() -> dict[str, Any]:
    """Every command by its full name: ``run``, ``key new``."""
    found: dict[str, Any] = {}
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        below = getattr(command, "commands", None)
        found |= {f"{name} {under}": one for under, one in below.items()} if below else {name: command}
    return found


def flags(name: str) -> str:
    """Arguments and flags of one command. Settings are named in one line, because all commands share them."""
    command, rows, shared = commands()[name], [], []
    for parameter in command.params:
        if getattr(parameter, "hidden", False):
            continue
        if _is_setting(parameter):
            shared.append(parameter.name)
        elif parameter.name not in ("help", "debug"):
            rows.append((_written(parameter), _meaning(parameter)))
    text = table(("Argument or flag", "Meaning"), rows) if rows else ""
    groups = [group for group, names in setting_groups().items() if set(shared) & set(names)]
    if not groups:
        return text
    links = ", ".join(f"[{group}](settings.md#{_anchor(group)})" for group in groups)
    return f"{text}\nAlso the settings under {links}.\n" if text else f"The settings under {links}.\n"


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-")


def _is_setting(parameter: Any) -> bool:
    """A flag of a setting's name may mean something else: ``plan --disk`` is a size."""
    setting = SETTINGS.get(parameter.name)
    return setting is not None and (parameter.help or "").lower().startswith(setting.about.lower())


def _meaning(parameter: Any) -> str:
    text, default = getattr(parameter, "help", None) or "", getattr(parameter, "default", None)
    given = isinstance(default, str | int | float) and default not in ("", False) and "[default" not in text
    return f"{text} [default: {default}]" if given else text


def _written(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{parameter.metavar or parameter.name.upper()}`"
    metavar = f" {parameter.metavar}" if parameter.metavar else ""
    return ", ".join(f"`{flag}{metavar}`" for flag in (*parameter.opts, *parameter.secondary_opts))


def command_list() -> str:
    rows = [(f"[`{n}`](#{_anchor(n)})", (one.help or "").split("\n")[0]) for n, one in commands().items()]
    return table(("Command", "What it does"), rows)


# -- settings --------------------------------------------------------------------------------------------------------


def setting_groups() -> dict[str, list[str]]:
    """As ``--help`` groups them; what stands there without a group comes first."""
    group_of: dict[str, str] = {}
    for command in commands().values():
        for parameter in command.params:
            if _is_setting(parameter):
                group_of.setdefault(parameter.name, getattr(parameter, "rich_help_panel", None) or "Common")
    groups: dict[str, list[str]] = {}
    for name in SETTINGS:
        groups.setdefault(group_of[name], []).append(name)
    return groups


def settings() -> str:
    parts = []
    for group, names in setting_groups().items():
        rows = [_setting(SETTINGS[name]) for name in names]
        parts.append(f"## {group}\n\n" + table(("Setting", "Value", "Default", "Meaning"), rows))
    return "\n".join(parts)


def _setting(setting: Setting) -> tuple[str, ...]:
    unset = setting.default in (None, "", (), {})
    default = "" if unset else f"`{str(setting.default).lower() if setting.default is False else setting.default}`"
    return f"`{setting.name}`", f"`{setting.metavar}`" if setting.metavar else "switch", default, setting.about


# -- metrics ---------------------------------------------------------------------------------------------------------


def metric_rows(rows: tuple[metrics.Row, ...]) -> str:
    return table(("Metric", "Statistic", "Meaning"), [(f"`{r.metric}`", f"`{r.stat}`", r.help) for r in rows])


# -- files -----------------------------------------------------------------------------------------------------------


def sentence(path: Path) -> str:
    """The first sentence of a module's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    first = " ".join(text.split("\n\n")[0].split()).replace("``", "`")
    return re.split(r"(?<=[.?!]) ", first)[0]


def files() -> str:
    """One table for each package, in the order of the alphabet, the top one first."""
    parts = []
    for folder in sorted({path.parent for path in SOURCE.rglob("*.py")}):
        name = str(folder.relative_to(SOURCE))
        own = sorted(folder.glob("*.py"))
        about = next((sentence(path) for path in own if path.name == "__init__.py"), "")
        rows = [(f"`{path.relative_to(SOURCE)}`", sentence(path)) for path in own if path.name != "__init__.py"]
        title = "stowage" if name == "." else name
        parts.append(f"## {title}\n\n{about}\n" + (f"\n{table(('File', 'What it is'), rows)}" if rows else ""))
    return "\n".join(parts)


# -- pages -----------------------------------------------------------------------------------------------------------


def parts() -> dict[str, Callable[[], str]]:
    made: dict[str, Callable[[], str]] = {"commands": command_list, "settings": settings, "files": files}
    made |= {f"command {name}": lambda name=name: flags(name) for name in commands()}
    groups = {"engine": metrics.ENGINE, "weights": metrics.WEIGHTS, "graphs": metrics.GRAPHS, "pool": metrics.POOL}
    groups |= {"store": metrics.STORE, "tier": metrics.TIER, "vllm": metrics.VLLM}
    return made | {f"metrics {name}": lambda rows=rows: metric_rows(rows) for name, rows in groups.items()}


def pages() -> Iterator[tuple[Path, str, str]]:
    """Each page with a generated part: its path, what it says, what it should say."""
    made = parts()
    for path in sorted(PAGES.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        yield path, text, PART.sub(lambda found: f"{found[1]}\n{made[found[2]]()}\n{found[4]}", text)


def main() -> int:
    stale = [(path, wanted) for path, text, wanted in pages() if text != wanted]
    for path, wanted in stale:
        if "--check" not in sys.argv[1:]:
            path.write_text(wanted, encoding="utf-8")
        print(path.relative_to(ROOT), file=sys.stderr)
    return int("--check" in sys.argv[1:] and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
