"""Small files in the user's state directory: results that take long to find out, for the next process.

Example: whether a model passed the trial that an engine makes at start-up, by the model's identity (``Remembered``), or
in which file of Transformers a class is (``remembered_json``). Losing a file costs time only: what cannot be read or
written is found out again. Entries are kept in the order in which they came, and the oldest go first.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

_ENTRIES_MAX = 512
_VALUE_MAX = 64
_NO_HOME = "/nonexistent"
"""Of a user that the system does not know, as in containers: nothing is remembered."""


def default_state_directory() -> Path:
    """``$XDG_STATE_HOME/stowage``, or ``~/.local/state/stowage``: apart from caches, whose bytes are counted."""
    home = os.path.expanduser("~")
    usual = Path(_NO_HOME if home == "~" else home) / ".local" / "state"
    return Path(os.environ.get("XDG_STATE_HOME") or usual) / "stowage"


def put_in_place(path: Path, text: str) -> bool:
    """Write ``text`` to ``path`` at once, for its owner alone; whether that was possible."""
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w") as file:
            file.write(text)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):  # a read-only file system refuses this too, whether the file is there or not
            temporary.unlink(missing_ok=True)
        return False
    return True


def remembered_json(name: str, of: list[Any], find_out: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The object in the state directory's file ``name`` if it was written for an equal ``of``; else what ``find_out``
    returns, which is written there.
    """
    path = default_state_directory() / name
    try:
        stated, found = json.loads(path.read_text(encoding="utf-8"))
        if stated == of and isinstance(found, dict):
            return found
    except (OSError, ValueError, TypeError):
        pass
    made = find_out()
    put_in_place(path, json.dumps([of, made]))
    return made


class Remembered(dict[str, str]):
    """Short texts by key, from the file at ``path``; empty where there is none, or not such a one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            loaded = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            loaded = {}
        valid = isinstance(loaded, dict) and all(isinstance(v, str) and len(v) <= _VALUE_MAX for v in loaded.values())
        super().__init__(loaded if valid else {})
        self._saved = dict(self)

    def save(self) -> None:
        """Put the table in place at once, if it has changed; a failure only costs the next start some time."""
        if self == self._saved:
            return
        if put_in_place(self._path, json.dumps(dict(list(self.items())[-_ENTRIES_MAX:]))):
            self._saved = dict(self)
