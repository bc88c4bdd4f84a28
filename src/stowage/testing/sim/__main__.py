"""Runs worlds on several cores, and reports what broke and what happened in them.

Exit status: 0 all promises held, 1 a seed failed (or, with --complete, something was never reached), 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from stowage.testing.sim.runner import Report, report_of, run

FAILURES_SHOWN: Final = 3


def show(report: Report, console: Console) -> None:
    """The report for people."""
    for _, text in report.failures[:FAILURES_SHOWN]:
        console.print(text, markup=False, highlight=False)
    rate = report.seeds / max(report.seconds, 1e-9)
    console.print(
        f"{report.seeds} worlds ({rate:.0f}/s): {report.steps} steps, {report.simulated_s / 3600:.1f} simulated hours, "
        f"{len(report.failures)} failed",
        highlight=False,
    )
    names = sorted(report.happened, key=lambda name: (name.startswith("fault "), name))
    for name in names:
        console.print(f"  {name:<28}{report.happened[name]:>14}", markup=False, highlight=False)
    if report.never():
        console.print("never happened: " + ", ".join(report.never()), markup=False, highlight=False)


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m stowage.testing.sim", description=__doc__)
    parser.add_argument("--engine", action="store_true", help="worlds of the engine, not of the disk tier")
    parser.add_argument("--seeds", type=int, default=1000, help="how many worlds (default 1000)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one per core)")
    parser.add_argument("--complete", action="store_true", help="fail too if a fault or branch was never reached")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    if options.seeds < 1 or options.first < 0 or options.jobs < 1:
        parser.error("--seeds and --jobs are at least 1, --first is at least 0")
    total = report_of(options.engine, options.first)
    began_s = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("worlds", total=options.seeds)
        for part in run(options.first, options.seeds, options.jobs, engine=options.engine):
            total.add(part)
            failed = f"worlds ({len(total.failures)} failed)" if total.failures else "worlds"
            progress.update(task, advance=part.seeds, description=failed)
    total.failures.sort()
    total.seconds = time.monotonic() - began_s
    if options.json:
        print(
            json.dumps(
                {
                    "first": total.first,
                    "seeds": total.seeds,
                    "steps": total.steps,
                    "simulated_s": total.simulated_s,
                    "seconds": total.seconds,
                    "failures": [{"seed": seed, "text": text} for seed, text in total.failures],
                    "happened": dict(sorted(total.happened.items())),
                    "never": total.never(),
                }
            )
        )
    else:
        show(total, Console())
    return 1 if total.failures or (options.complete and total.never()) else 0


if __name__ == "__main__":
    sys.exit(main())
