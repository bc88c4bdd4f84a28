"""Plays random cases for some time, and says how to play one that failed again.

Exit status: 0 nothing differed, 1 a case failed, 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import transformers
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from stowage.testing import tiny_models
from stowage.testing.fuzz.case import draw, run
from stowage.testing.sim.runner import quiet


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m stowage.testing.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long (default 60)")
    parser.add_argument("--seed", type=int, default=0, help="the first case (default 0); the others follow")
    parser.add_argument("--cases", type=int, default=sys.maxsize, help="at most so many (1: one case again)")
    parser.add_argument("--family", action="append", help="only this one; repeatable")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    if options.seconds <= 0 or options.cases < 1 or options.seed < 0:
        parser.error("--seconds and --cases are positive, --seed is at least 0")
    unknown = set(options.family or ()) - set(tiny_models.FAMILIES)
    if unknown:
        parser.error(f"no such family: {', '.join(sorted(unknown))}")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with quiet():  # trouble is what some cases are made of
        return _play(options)


def _play(options: argparse.Namespace) -> int:
    until_s, seed = time.monotonic() + options.seconds, options.seed
    happened: Counter[str] = Counter()
    failures: list[tuple[int, str]] = []
    columns = (TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("cases")
        while time.monotonic() < until_s and seed - options.seed < options.cases:
            case = draw(seed, options.family or tiny_models.FAMILIES)
            progress.update(task, description=f"{seed - options.seed} cases, {len(failures)} failed; {case.family}")
            directory = Path(tempfile.mkdtemp(prefix="stowage-fuzz-"))
            try:
                outcome = run(case, directory)
            except Exception as error:  # noqa: BLE001 whatever it is, it is what was looked for
                failures.append((seed, f"{type(error).__name__}: {error}"))
                happened["failed"] += 1
            else:
                happened["answers"] += outcome.answers
                happened["reused tokens"] += outcome.reused_tokens
                happened["preemptions"] += outcome.preemptions
                happened["refused"] += bool(outcome.refused)
                happened["inexact"] += outcome.inexact
                happened["beside Transformers"] += outcome.beside_transformers
            finally:
                shutil.rmtree(directory, ignore_errors=True)
            seed += 1
    return _told(seed - options.seed, happened, failures, as_json=options.json)


def _told(cases: int, happened: Counter[str], failures: list[tuple[int, str]], *, as_json: bool) -> int:
    if as_json:
        listed = [{"seed": seed, "text": text} for seed, text in failures]
        print(json.dumps({"cases": cases, "happened": dict(happened), "failures": listed}))
        return bool(failures)
    for seed, text in failures[:3]:
        print(f"{text}\nAgain: python -m stowage.testing.fuzz --seed {seed} --cases 1\n")
    print(f"{cases} cases: " + ", ".join(f"{count} {name}" for name, count in happened.items()))
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
