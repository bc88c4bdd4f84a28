"""``stowage scrub DIR``: find and remove every bad chunk in a cache directory. ``tiers.disk.scrub`` does the work."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stowage.cli.options import Debug, Json, read_as
from stowage.cli.output import print_json
from stowage.config.memory import format_size, parse_size
from stowage.errors import ConfigError

if TYPE_CHECKING:
    from stowage.storage.disk.scrub import Report

Progress = Callable[[int, int], None]
_SHOWN_MAX = 20


def scrub(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The directory of a disk tier.")],
    *,
    check: Annotated[bool, typer.Option("--check", help="Only report; change nothing.")] = False,
    key_file: Annotated[
        Path | None, typer.Option("--key-file", metavar="FILE", help="Keys of chunks that are protected by one.")
    ] = None,
    limit_rate: Annotated[
        str, typer.Option("--limit-rate", metavar="SIZE", help="Read at most that much per second.")
    ] = "",
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Read every chunk in a cache directory, verify it, and remove what is bad.

    May be used while engines run. Exit status 1 when something bad is left.
    """
    from stowage.storage import key_file as keys
    from stowage.storage.disk.scrub import scrub as scrub_directory

    rate = float(read_as("--limit-rate", parse_size, limit_rate)) if limit_rate else float("inf")
    if not rate:
        raise ConfigError("--limit-rate is 0: nothing would ever be read. Write a size, such as 100MB.")
    secrets = keys.read(key_file.expanduser().absolute()) if key_file is not None else []
    path = directory.expanduser().absolute()
    with _bar() as progress:
        report = scrub_directory(path, check=check, secrets=secrets, bytes_per_s_max=rate, progress=progress)
    if json:
        value = asdict(report)
        bad = value.pop("listed")
        print_json({"directory": str(directory), "check": check, "clean": report.is_clean, **value, "bad_chunks": bad})
    else:
        _print(report, directory, check)
    if not report.is_clean:
        raise typer.Exit(1)


@contextmanager
def _bar() -> Iterator[Progress]:
    """A progress bar on stderr, for people who watch."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("scrub", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _print(report: "Report", directory: Path, check: bool) -> None:
    size = format_size(report.bytes)
    print(f"{directory}: {report.chunks} chunks in {report.segments} segments, {size} verified, {report.good} good")
    for bad in report.listed[:_SHOWN_MAX]:
        what = "unreadable" if bad.unreadable else "damaged"
        print(f"  {what}: {bad.length} bytes at {bad.offset} of {bad.segment}")
    if report.bad > _SHOWN_MAX:
        print(f"  ... and {report.bad - _SHOWN_MAX} more")
    for error in report.errors:
        print(f"  failed: {error}")
    for count, text in (
        (report.bad, "bad chunks"),
        (report.removed, "of them removed"),
        (report.vanished, "of them gone meanwhile, or good when read again"),
        (report.left, "of them left where they are" + ("" if check else ": in use, or the disk refuses the change")),
        (report.damaged_segments, "segments that nobody can read" + ("" if check else "; removed unless in use")),
        (report.torn_segments, "segments of killed writers" + ("" if check else ", finished")),
        (report.empty_segments, "empty files of killed writers" + ("" if check else ", removed")),
        (report.unchecked, "chunks not checked: give the --key-file that they were written with"),
        (report.other_segments, "segments of another version of Stowage, left alone"),
        (report.segments_in_use, "segments in use by a writer: checked, not changed"),
    ):
        if count:
            print(f"  {count} {text}")
    print(
        "Nothing bad."
        if not report.bad + report.damaged_segments
        else "Clean now."
        if report.is_clean
        else "NOT CLEAN."
    )
