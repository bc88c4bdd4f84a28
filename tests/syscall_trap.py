"""Kill or stall a process at a system call of your choice: `syscall_trap.c`, compiled and driven.

The watching process makes a `Board` in a file, the watched one opens it and calls `arm`. From then on each file-related
system call of the watched process is counted and noted on the board, and one of them may be its last.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

NEVER, BEFORE, AFTER, TORN = range(4)
"""When the process dies: before the call, after it, or when half of what it was to write is written."""
WRITES: Final = ("pwritev", "pwritev2")
"""The calls that can be torn."""
TRACE_MAX: Final = 8192
SOURCE: Final = Path(__file__).with_suffix(".c")
_armed: list[Board] = []


class Control(ctypes.Structure):
    """`struct control` of the C side."""

    _fields_ = (
        ("kill_at", ctypes.c_int64),
        ("way", ctypes.c_int64),
        ("calls", ctypes.c_int64),
        ("stall_every", ctypes.c_int64),
        ("stall_ms", ctypes.c_int64),
        ("reads", ctypes.c_int64),
        ("stalled", ctypes.c_int64),
        ("stalling", ctypes.c_int64),
        ("prefix", ctypes.c_char * 512),
        ("trace", ctypes.c_int32 * TRACE_MAX),
        # What the C side does not look at: for the two processes to tell each other.
        ("notes", ctypes.c_int64 * 16),
    )


def build(directory: Path) -> Path:
    """Compile the trap into `directory`; the library's path. Skips the test where no process may be trapped."""
    if platform.machine() not in ("x86_64", "aarch64"):
        pytest.skip(f"system calls cannot be trapped on {platform.machine()}")
    library = directory / "syscall_trap.so"
    command = ["cc", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", str(library), str(SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    trial = "import ctypes as c, os, sys; room = c.create_string_buffer(1 << 20); lib = c.CDLL(sys.argv[1]); "
    trial += "os._exit(lib.trap_arm(room))"
    code = subprocess.run([sys.executable, "-c", trial, str(library)], check=False).returncode
    if code:
        pytest.skip(f"no seccomp filter can be installed here: {os.strerror(code)}")
    return library


class Board:
    """Memory that two processes share through a file: what the trap is to do, and what it saw."""

    def __init__(self, path: Path) -> None:
        size = ctypes.sizeof(Control)
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(fd, size)
            self._memory = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        self.control = Control.from_buffer(self._memory)

    def clear(self) -> None:
        """All zeros: nothing is to happen, nothing was seen."""
        self._memory[:] = bytes(len(self._memory))

    def kill(self, at: int, way: int) -> None:
        """The next process that arms itself dies at its call number `at` (from 1)."""
        self.clear()
        self.control.kill_at, self.control.way = at, way

    def stall(self, every: int, seconds: float, below: Path | None = None) -> None:
        """Each n-th read of a file below that directory hangs so long; with `every` 0 the stall is over for all."""
        if below is not None:
            self.control.prefix = str(below).encode()
        self.control.stall_ms = int(1000 * seconds)
        self.control.stall_every = every

    def trace(self) -> list[int]:
        """The numbers of the calls that were seen, in their order."""
        count = self.control.calls
        assert count <= TRACE_MAX, "more calls than the trap can note"
        return list(self.control.trace[:count])


def arm(library: Path | str, board: Board) -> None:
    """Watch this process: this thread, and the ones that it will start."""
    code = ctypes.CDLL(str(library)).trap_arm(ctypes.byref(board.control))
    assert code == 0, os.strerror(code)
    _armed.append(board)  # the trap writes on it as long as the process lives


def names(library: Path | str, numbers: list[int]) -> list[str]:
    """What the calls are called."""
    trap = ctypes.CDLL(str(library))
    trap.trap_name.restype = ctypes.c_char_p
    return [trap.trap_name(number).decode() for number in numbers]
