"""``--metrics-file FILE``: keeps a file of metrics up to date, as the textfile collector of node_exporter reads it."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from stowage.cli.output import complain
from stowage.errors import ConfigError

WRITE_EVERY_S = 5.0


@contextmanager
def kept_up(path: Path | None, metrics: Callable[[], str]) -> Iterator[None]:
    """Write ``metrics()`` to ``path`` now, every few seconds, and at the end. ``path`` None: nothing.

    Raises ConfigError if it cannot be written at all; a disk that fails later is told once and costs nothing else.
    """
    if path is None:
        yield
        return
    try:
        write(path, metrics())
    except OSError as error:
        raise ConfigError(
            f"The metrics file {path} cannot be written: {error.strerror}. Give one in a directory that is there, "
            "and yours."
        ) from error
    ended = threading.Event()
    writer = threading.Thread(target=_keep_up, args=(path, metrics, ended), name="stowage-metrics", daemon=True)
    writer.start()
    try:
        yield
    finally:
        ended.set()
        writer.join()


def _keep_up(path: Path, metrics: Callable[[], str], ended: threading.Event) -> None:
    told = False
    while True:
        last = ended.wait(WRITE_EVERY_S)
        try:
            write(path, metrics())
        except OSError as error:
            if not told:
                complain(f"The metrics file {path} cannot be written any more: {error.strerror}.")
            told = True
        if last:
            return


def write(path: Path, text: str) -> None:
    """Replace the file in one step: whoever reads it sees the old text or the new one. Raises OSError."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
