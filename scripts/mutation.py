"""Changes core and format one spot at a time, and sees whether the tests notice: `make mutation`.

mutmut makes the mutants and runs them (settings: [tool.mutmut] in pyproject.toml); this starts it, and owns what is
kept of a run: `tests/mutation.json` with the score of each file and every survivor, and the line in
`docs/internals.md`. A run goes on where the last one was stopped. What survived is tried again, because there may be
new tests; what was killed is not, unless its function changed. `rm -r mutants` begins anew.

    python scripts/mutation.py                   # everything
    python scripts/mutation.py cache/ledger.py    # one file, all of it
    python scripts/mutation.py --report          # no run: write down what the last one found
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MUTANTS = ROOT / "mutants"
PACKAGE = Path("src") / "stowage"
RESULT = ROOT / "tests" / "mutation.json"
PAGE = ROOT / "docs" / "internals.md"
BEGIN, END = "<!-- mutation: begin -->\n", "<!-- mutation: end -->\n"
SCORE_MIN = 0.90
FILE_SCORE_MIN = 0.80

# Exit codes that mutmut writes down: pytest's for failed tests and for an internal error; a signal, or too late.
KILLED = frozenset({1, 3, -11})
LATE = frozenset({36, 24, -24, 152, 255, -9})


@dataclass
class Score:
    """What became of the mutants of one file; `survivors` as people read them."""

    killed: int = 0
    late: int = 0
    survivors: list[str] = field(default_factory=list)

    @property
    def mutants(self) -> int:
        return self.killed + self.late + len(self.survivors)

    @property
    def score(self) -> float:
        return (self.killed + self.late) / self.mutants

    def as_json(self) -> dict[str, object]:
        numbers = {"mutants": self.mutants, "killed": self.killed, "too_late": self.late, "score": round(self.score, 4)}
        return {**numbers, "survivors": self.survivors}


def forget_survivors() -> None:
    """So that they are tried again, and which tests cover which function is looked up again."""
    (MUTANTS / "mutmut-stats.json").unlink(missing_ok=True)
    for path in MUTANTS.rglob("*.meta"):
        meta = json.loads(path.read_text())
        codes = meta["exit_code_by_key"]
        meta["exit_code_by_key"] = {name: code if code in KILLED | LATE else None for name, code in codes.items()}
        path.write_text(json.dumps(meta, indent=4))


def run(only: str | None) -> None:
    """At the lowest priority and one at a time: it must not disturb what else this machine does."""
    os.nice(19)
    forget_survivors()
    module = [f"stowage.{only.removesuffix('.py').replace('/', '.')}.*"] if only else []
    mutmut = Path(sys.executable).with_name("mutmut")
    subprocess.run([str(mutmut), "run", "--max-children", "1", *module], cwd=ROOT, check=True)


def functions(code: str) -> dict[str, list[str]]:
    """The lines of each function of a mutated file. mutmut's names are unique."""
    lines = code.splitlines()
    nodes = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.FunctionDef)]
    return {node.name: lines[node.lineno : node.end_lineno] for node in nodes}


def described(name: str, lines_of: dict[str, list[str]]) -> str:
    """The function of a mutant, its line, and what became of it; nothing where a default in the signature changed."""
    before = lines_of[re.sub(r"_\d+$", "_orig", name)]
    changes = [line for line in difflib.ndiff(before, lines_of[name]) if line[:2] in ("- ", "+ ")]
    was, became = (" ".join(line[2:].strip() for line in changes if line[0] == sign) for sign in "-+")
    function = re.sub(r"__mutmut_\d+$", "", name).removeprefix("xǁ").removeprefix("x_").replace("ǁ", ".")
    return f"{function}: {was}  ->  {became}"


def score_of(path: Path) -> Score | None:
    """None: not all of its mutants were tried."""
    codes = json.loads((MUTANTS / f"{path}.meta").read_text())["exit_code_by_key"]
    if not codes or None in codes.values():
        return None
    lines_of = functions((MUTANTS / path).read_text())
    score = Score()
    for name, code in codes.items():
        if code in KILLED:
            score.killed += 1
        elif code in LATE:
            score.late += 1
        else:
            score.survivors.append(described(name.rpartition(".")[2], lines_of))
    return score


def report() -> bool:
    """Write down what is known; of a file that was not tried whole, what was known before. Whether it is enough."""
    files = json.loads(RESULT.read_text())["files"] if RESULT.exists() else {}
    present = [path for room in ("core", "format") for path in sorted((ROOT / PACKAGE / room).rglob("*.py"))]
    names = [str(path.relative_to(ROOT / PACKAGE)) for path in present]
    for name in names:
        if (MUTANTS / PACKAGE / f"{name}.meta").exists() and (score := score_of(PACKAGE / name)):
            files[name] = score.as_json()
    files = {name: files[name] for name in names if name in files}
    mutants, survivors = (sum(count(file) for file in files.values()) for count in (_mutants, _survivors))
    total = round(1 - survivors / mutants, 4)
    result = {"tool": f"mutmut {version('mutmut')}", "mutants": mutants, "survivors": survivors, "score": total}
    RESULT.write_text(json.dumps({**result, "files": files}, indent=1, ensure_ascii=False) + "\n")

    rows = [(name, _mutants(file), _survivors(file), file["score"]) for name, file in files.items()]
    rows.append(("together", mutants, survivors, total))
    table = "| File | Mutants | Survived | Score |\n|---|---:|---:|---:|\n"
    table += "".join(f"| {name} | {some:,} | {left} | {score:.1%} |\n" for name, some, left, score in rows)
    line = f"Last run: {mutants:,} mutants, {survivors} survived: {total:.1%} were noticed.\n"
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + line + END + rest.partition(END)[2])
    print(table)
    poor = [name for name, _, _, score in rows if score < FILE_SCORE_MIN]
    print(f"{total:.1%} of {mutants:,} mutants were noticed; at least {SCORE_MIN:.0%} must be.", *poor)
    return total >= SCORE_MIN and not poor


def _mutants(file: dict[str, int]) -> int:
    return file["mutants"]


def _survivors(file: dict[str, list[object]]) -> int:
    return len(file["survivors"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", help="below src/stowage, for example cache/ledger.py")
    parser.add_argument("--report", action="store_true", help="run nothing")
    arguments = parser.parse_args()
    if arguments.file and not (ROOT / PACKAGE / arguments.file).is_file():
        parser.error(f"there is no {PACKAGE / arguments.file}")
    if not arguments.report:
        run(arguments.file)
    sys.exit(not report())


if __name__ == "__main__":
    main()
