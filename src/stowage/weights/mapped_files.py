"""Watches the files that a loaded model has mapped and computes from in place.

Owns a descriptor of each, and notices when one is written to. A mapping shows what was written there, which is weights
that nobody has loaded; of a file that was cut short it shows nothing, and reading that ends the process. A file that
another one is put in the place of, or that is deleted, stays what it was.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from stowage.weights.checkpoint import Checkpoint
from stowage.weights.file import File


class MappedFiles:
    """Watches ``files``, which are open. ``owned``: they are closed with this; else by whoever opened them, later."""

    def __init__(self, files: Sequence[File] = (), *, owned: bool = True) -> None:
        self._files, self._owned = files, owned

    @classmethod
    def among(cls, paths: Iterable[Path]) -> MappedFiles:
        """Those of the safetensors files ``paths`` that this process has mapped; all of them where the system does not
        say. Raises CheckpointError.
        """
        checkpoint, told = Checkpoint(paths), Path("/proc/self/maps").exists()
        inodes = {inode for *_, inode in checkpoint.mappings()}
        kept = [file for file in checkpoint.files if not told or os.fstat(file.fd).st_ino in inodes]
        checkpoint.files = [file for file in checkpoint.files if file not in kept]
        checkpoint.close()
        return cls(kept)

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """The body computes from the files as they were opened. Raises CheckpointError, before or after it."""
        self._check()
        yield
        self._check()

    def _check(self) -> None:
        for file in self._files:
            if file.fd >= 0:  # else its owner has closed it, and says so when its weights are computed with
                file.check()

    def close(self) -> None:
        """May be called twice."""
        files, self._files = self._files, ()
        for file in files if self._owned else ():
            file.close()
