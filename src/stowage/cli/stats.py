"""``stowage stats DIR``: what a cache directory holds. Reads indexes, never payloads, and changes nothing."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stowage.cli.options import Debug, Json
from stowage.cli.output import print_json
from stowage.config.memory import format_size
from stowage.errors import FormatError

if TYPE_CHECKING:
    from stowage.storage.disk.directory import Directory, SegmentFile
    from stowage.storage.format.segment import SegmentName

_STATES = ("sealed", "open", "torn", "empty", "unusable")


@dataclass(slots=True)
class Quota:
    """What was found. ``bytes`` is what the limit of a disk tier is compared with: everything in the directory.

    Segments by state: ``open`` ones are being written, ``torn`` ones were left by a killed writer (the next tier that
    opens the directory finishes them), ``unusable`` ones have no valid header.
    """

    bytes: int = 0
    segments: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_STATES, 0))
    chunks: int = 0
    payload_bytes: int = 0
    namespaces: dict[str, int] = field(default_factory=dict)
    protections: dict[str, int] = field(default_factory=dict)
    other_files: int = 0


def stats(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The directory of a disk tier.")],
    *,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Show what a cache directory holds."""
    found = quota(directory.expanduser().absolute())
    if json:
        print_json(
            {
                "directory": str(directory),
                "bytes": found.bytes,
                "segments": found.segments,
                "chunks": found.chunks,
                "payload_bytes": found.payload_bytes,
                "namespaces": [{"namespace": name, "chunks": count} for name, count in found.namespaces.items()],
                "protections": found.protections,
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
    if trouble := found.segments["torn"] + found.segments["unusable"]:
        print(f"  trouble     {trouble} torn or unusable: `stowage scrub {directory}` repairs or removes them")
    if found.protections.keys() - {"checksum"}:
        kinds = ", ".join(f"{count} {label}" for label, count in found.protections.items())
        print(f"  protection  {kinds} (segments; a disk tier reads those of its own method and keys)")
    if found.other_files:
        print(f"  {found.other_files} files that are not Stowage's count towards the limit and are never touched")


def quota(directory: Path) -> Quota:
    """Read the directory. Raises DirectoryError where there is no cache in it."""
    from stowage.storage.disk.inspector import open_existing
    from stowage.storage.disk.system import System

    opened = open_existing(directory, System(), direct=False)
    try:
        return _read(opened)
    finally:
        opened.close()


def _read(directory: "Directory") -> Quota:
    from stowage.storage.disk.inspector import FILE_BYTES_MAX
    from stowage.storage.disk.recovery import State, scan_segment

    found = Quota()
    strangers = -2  # the directory itself and its lock are entries as well
    for entry in directory.entries():
        found.bytes += entry.bytes
        if entry.name is None:
            strangers += 1
            continue
        try:
            with directory.open_segment(entry.name) as file:
                seen = scan_segment(file, entry.name, FILE_BYTES_MAX)
                torn = seen.state is State.OPEN and _is_torn(directory, file, entry.name)
        except FileNotFoundError:
            continue  # reclaimed meanwhile by whoever writes
        except (OSError, FormatError):
            found.segments["unusable"] += 1
            continue
        found.segments["torn" if torn else seen.state.name.lower()] += 1
        if seen.state in (State.SEALED, State.OPEN):
            label = _label(seen.header.mark.method)
            found.protections[label] = found.protections.get(label, 0) + 1
        for batch in seen.batches:
            name = seen.header.namespace.hex()
            found.namespaces[name] = found.namespaces.get(name, 0) + len(batch)
            found.chunks += len(batch)
            found.payload_bytes += int(batch["length"].sum())
    found.other_files = max(0, strangers)
    return found


def _is_torn(directory: "Directory", file: "SegmentFile", name: "SegmentName") -> bool:
    """Whether nobody writes this segment any more although it was not finished."""
    from stowage.storage.disk.allocator import LOCK_TIMEOUT_S
    from stowage.storage.disk.recovery import is_sealed

    with directory.locked(LOCK_TIMEOUT_S) as held:  # so that nobody is disturbed while making a segment
        return held and file.lock() and not is_sealed(file, name)


def _label(method: int) -> str:
    from stowage.storage.format.protection import Method

    return Method(method).label if method in set(Method) else "unknown"
