"""Room on a disk: how much is free, and why something could not be written."""

import errno
import shutil
from pathlib import Path
from typing import Final

from stowage.config.memory import format_size, nearest_directory

DISK_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


def free_bytes(directory: Path) -> int:
    """Bytes that are free where ``directory`` lies, or would. Raises OSError."""
    return shutil.disk_usage(nearest_directory(directory)).free


def why_not_written(directory: Path, error: OSError, needed_bytes: int = 0) -> str:
    """What the system said of ``error``; on a full disk also what is free there and, where it is known, was needed."""
    said = error.strerror or str(error)
    if error.errno != errno.ENOSPC:  # of a quota the system does not tell what is left
        return said
    needed = f", {format_size(needed_bytes)} needed" if needed_bytes else ""
    try:
        return f"{said} ({format_size(free_bytes(directory))} free{needed})"
    except OSError:
        return said
