"""A clean process that has everything imported and no thread, in which others are forked: quick to start, good to kill.

Tests give it functions of their own modules to run. Its children die with it, and it dies with the test.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
QUICKLY: Final = "from stowage.models.quick_import import import_transformers; import_transformers()\n"
"""The first line of a program that is started often: it imports Transformers as commands do, in half the time."""
PR_SET_PDEATHSIG: Final = 1
CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x20000, 0x4000, 0x40000
SHARED_MEMORY: Final = "/dev/shm"


def python_path() -> str:
    """Of a test's processes: this repository, then what the caller's has, such as another release of vLLM."""
    return os.pathsep.join(filter(None, (str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH"))))


def serve(module: str, warm: str) -> None:
    """The nursery's own loop: a line of JSON in, a line of JSON out."""
    _take_own_shared_memory()
    imported = importlib.import_module(module)
    if warm:
        getattr(imported, warm)()
    gc.collect()
    gc.freeze()  # what is imported is never garbage: no child looks through it for some
    _say({"ready": True})
    for line in sys.stdin:
        asked = json.loads(line)
        if "wait" in asked:
            _, status = os.waitpid(asked["wait"], 0)
            _say(
                {
                    "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0,
                    "code": os.waitstatus_to_exitcode(status),
                }
            )
        else:
            _say({"pid": _fork(asked["module"], asked["function"], asked["arguments"])})


def _take_own_shared_memory() -> None:
    """An empty /dev/shm for the nursery and its children: what is left is theirs. Needs root; else everybody's."""
    libc = ctypes.CDLL(None)
    if os.path.isdir(SHARED_MEMORY) and libc.unshare(CLONE_NEWNS) == 0:
        libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None)
        libc.mount(b"none", SHARED_MEMORY.encode(), b"tmpfs", 0, None)


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


def _fork(module: str, function: str, arguments: list[Any]) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.dup2(2, 1)  # the nursery's answers are its own
        getattr(importlib.import_module(module), function)(*arguments)
        code = 0
    except BaseException:  # noqa: BLE001  the outermost frame of a process
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


class Child:
    """A forked process. `wait` or `kill` it once."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self._nursery = nursery
        self.pid = pid

    def alive(self) -> bool:
        """Whether it has not ended by itself."""
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"

    def kill(self) -> None:
        """SIGKILL; gone when this returns. Fails if the child had failed before."""
        os.kill(self.pid, signal.SIGKILL)
        assert self.wait() == signal.SIGKILL, "the child ended before it was killed"

    def wait(self) -> int:
        """Until it has ended: the signal that killed it, 0 if it ended well. Fails if it raised."""
        end = self._nursery.ask(wait=self.pid)
        assert end["signal"] or end["code"] == 0, "the child raised: see its traceback"
        signal_number: int = end["signal"]
        return signal_number


class Nursery:
    """One such process. `module` is imported in it beforehand, and `warm`, a function of it, is called: it may leave
    things in memory for the children, but no thread. `first`: a line that comes before all. Used by one thread."""

    def __init__(self, module: str, warm: Callable[[], object] | None = None, first: str = "") -> None:
        program = f"{first}from tests.nursery import serve; serve({module!r}, {warm.__name__ if warm else ''!r})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"},
            cwd=ROOT,
            text=True,
            start_new_session=True,
        )
        assert self._answer() == {"ready": True}
        self._foreign = self._in_shared_memory()

    def start(self, function: Callable[..., object], *arguments: object) -> Child:
        """Fork a process that runs `function`, of a module's top level, with arguments that JSON can carry."""
        told = [str(argument) if isinstance(argument, Path) else argument for argument in arguments]
        answer = self.ask(module=function.__module__, function=function.__qualname__, arguments=told)
        return Child(self, answer["pid"])

    def left_in_shared_memory(self) -> set[str]:
        """What lies in /dev/shm and was not there when the nursery was made."""
        return self._in_shared_memory() - self._foreign

    def _in_shared_memory(self) -> set[str]:
        path = f"/proc/{self._process.pid}/root{SHARED_MEMORY}"
        return set(os.listdir(path)) if os.path.isdir(path) else set()

    def ask(self, **question: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        print(json.dumps(question), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the nursery is gone"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    """Until it holds; failing with `what` when that takes too long."""
    until_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until_s, f"never: {what}"
        time.sleep(0.0005)
