"""``stowage stats DIR``: what a cache directory holds. Reads indexes, never payloads, and changes nothing."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stowage.cli.options import Debug, Json
from stowage.cli.output import print_json
from stowage.config import format_size
from stowage.errors import DirectoryError, FormatError

if TYPE_CHECKING:
    from stowage.tiers.disk.directory import Directory

_FILE_BYTES_MAX = 1 << 62  # the limit belongs to whoever writes; a reader takes files as they are


@dataclass(slots=True)
class Holdings:
    """What was found. ``bytes`` is what the limit of a disk tier is compared with: everything in the directory."""

    bytes: int = 0
    segments: dict[str, int] = field(default_factory=lambda: {"sealed": 0, "open": 0, "empty": 0, "unusable": 0})
    chunks: int = 0
    payload_bytes: int = 0
    namespaces: dict[str, int] = field(default_factory=dict)
    other_files: int = 0


def stats(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The directory of a disk tier.")],
    *,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Show what a cache directory holds."""
    found = holdings(directory.expanduser().absolute())
    if json:
        print_json(
            {
                "directory": str(directory),
                "bytes": found.bytes,
                "segments": found.segments,
                "chunks": found.chunks,
                "payload_bytes": found.payload_bytes,
                "namespaces": [{"namespace": name, "chunks": count} for name, count in found.namespaces.items()],
                "other_files": found.other_files,
            }
        )
        return
    states = ", ".join(f"{count} {state}" for state, count in found.segments.items() if count) or "none"
    print(f"{directory}: {format_size(found.bytes)} on disk")
    print(f"  segments    {states}")
    print(f"  chunks      {found.chunks} with {format_size(found.payload_bytes)} of keys, values and states")
    print(f"  namespaces  {len(found.namespaces)} (one for each model, precision and geometry)")
    for name, count in found.namespaces.items():
        print(f"    {name[:16]}  {count} chunks")
    if found.other_files:
        print(f"  {found.other_files} files that are not Stowage's count towards the limit and are never touched")


def holdings(directory: Path) -> Holdings:
    """Read the directory. Raises DirectoryError where there is no cache in it."""
    from stowage.tiers.disk.counters import Counters
    from stowage.tiers.disk.directory import Directory
    from stowage.tiers.disk.private import LOCK_NAME
    from stowage.tiers.disk.system import System

    if not directory.is_dir():
        raise DirectoryError(f"{directory} is not a directory: no cache has been stored there yet.")
    if not (directory / LOCK_NAME).exists():
        raise DirectoryError(f"{directory} is not a Stowage cache. Give the directory that --disk was given.")
    opened = Directory(directory, _FILE_BYTES_MAX, System(), Counters(), direct=False)
    try:
        return _read(opened)
    finally:
        opened.close()


def _read(directory: "Directory") -> Holdings:
    from stowage.tiers.disk.survey import survey

    found = Holdings()
    strangers = -2  # the directory itself and its lock are entries as well
    for entry in directory.entries():
        found.bytes += entry.bytes
        if entry.name is None:
            strangers += 1
            continue
        try:
            with directory.open_segment(entry.name) as file:
                seen = survey(file, entry.name, _FILE_BYTES_MAX)
        except FileNotFoundError:
            continue  # reclaimed meanwhile by whoever writes
        except (OSError, FormatError):
            found.segments["unusable"] += 1
            continue
        found.segments[seen.state.name.lower()] += 1
        for batch in seen.batches:
            name = seen.namespace.hex()
            found.namespaces[name] = found.namespaces.get(name, 0) + len(batch)
            found.chunks += len(batch)
            found.payload_bytes += int(batch["length"].sum())
    found.other_files = max(0, strangers)
    return found
