"""``stowage probe``: how fast this machine is, measured once."""

from pathlib import Path
from typing import Annotated

import typer

from stowage.cli.options import Debug, Json
from stowage.cli.output import note, print_json, print_table
from stowage.errors import DirectoryError


def probe(
    *,
    refresh: Annotated[bool, typer.Option("--refresh", help="Measure again, although it was measured before.")] = False,
    directory: Annotated[
        Path | None, typer.Option("--dir", metavar="DIR", help="Measure the disk of this directory.")
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure this machine: memory, disk, and what torch computes.

    Takes a minute or two. The result is remembered, and `stowage plan` uses it. What was measured while others took
    the cores is measured again.
    """
    from stowage.planner.probe import measure, remembered, rows
    from stowage.planner.report import busy_hint

    measured = directory.expanduser().absolute() if directory is not None else None
    if measured is not None and not measured.is_dir():
        raise DirectoryError(f"{measured} is not a directory: give one of the disk that is to be measured, or make it.")
    machine = None if refresh else remembered(measured)
    if machine is None or machine.busy:
        machine = measure(measured, say=lambda text: note(f"measuring {text}"))
    if machine.busy:
        note(busy_hint(machine))
    if json:
        print_json(machine.to_json())
        return
    print_table(machine.name, ("what", "speed"), rows(machine))
