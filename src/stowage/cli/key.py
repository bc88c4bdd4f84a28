"""``stowage key``: make, change and list the key file that data at rest is protected with. Never prints a secret."""

from pathlib import Path
from typing import Annotated

import typer

from stowage.cli.options import Debug, Json
from stowage.cli.output import note, print_json

File = Annotated[Path, typer.Argument(metavar="FILE", help="The key file.")]


def new(file: File, *, json: Json = False, debug: Debug = False) -> None:
    """Make a key file with one key, readable by you alone.

    Keep a copy of it where the cache directory is not, or the cache is lost with it (which costs time, never data).
    """
    from stowage.storage import key_file

    path = _absolute(file)
    made = key_file.make(path)
    if json:
        print_json({"file": str(path), "key": made.id.hex()})
    else:
        note(f"Wrote {path} with key {made.id.hex()}. Use it: --disk-protection aes-256-gcm --disk-key-file {path}")


def rotate(file: File, *, json: Json = False, debug: Debug = False) -> None:
    """Put a new key in front: new data is written with it, old data stays readable.

    Engines read the file when they start: restart them afterwards.
    """
    from stowage.storage import key_file

    path = _absolute(file)
    made = key_file.rotate(path)
    if json:
        print_json({"file": str(path), "key": made.id.hex()})
    else:
        note(f"Key {made.id.hex()} is in front of {path} now. Restart the engines that use the file.")


def drop(
    file: File,
    key_id: Annotated[str, typer.Argument(metavar="KEYID", help="The key's id, as `stowage key show` prints it.")],
    *,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Remove a key. What was written with it cannot be read any more, and makes room in turn."""
    from stowage.storage import key_file

    path = _absolute(file)
    key_file.drop(path, key_id)
    if json:
        print_json({"file": str(path), "dropped": key_id.lower()})
    else:
        note(f"Key {key_id.lower()} is gone from {path}. Restart the engines that use the file.")


def show(file: File, *, json: Json = False, debug: Debug = False) -> None:
    """List the ids of the keys: the first is for writing, all are for reading. Secrets are not shown."""
    from stowage.storage import key_file

    path = _absolute(file)
    ids = [key.id.hex() for key in key_file.read(path)]
    if json:
        print_json({"file": str(path), "keys": ids})
        return
    for at, key_id in enumerate(ids):
        print(f"{key_id}  {'reads' if at else 'writes and reads'}")


def _absolute(file: Path) -> Path:
    return file.expanduser().absolute()
