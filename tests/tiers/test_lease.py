"""Parts of one budget that engines of a node share: never above it, and nothing is left of one that was killed."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stowage.errors import BudgetError, DirectoryError
from stowage.storage.lease import Lease, budget_directory, hold

HOLDER = """
import sys
from pathlib import Path
from stowage.errors import BudgetError
from stowage.storage.lease import Lease, hold
what, argument, nbytes, limit = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
try:
    kept = Lease(Path(argument), nbytes, limit) if what == "lease" else hold(argument)
    print(getattr(kept, "path", "held"), flush=True)
except BudgetError:
    print("refused", flush=True)
sys.stdin.read()
"""


@contextmanager
def process(what: str, argument: Path | str, nbytes: int = 0, limit: int = 0) -> Iterator[tuple[str, int]]:
    """What it says, and its number; killed at the end."""
    command = [sys.executable, "-c", HOLDER, what, str(argument), str(nbytes), str(limit)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        yield child.stdout.readline().strip(), child.pid
        child.kill()


def test_parts_never_sum_above_the_budget(tmp_path: Path) -> None:
    first = Lease(tmp_path, 60, 100)
    with pytest.raises(BudgetError, match=r"other engines hold 60 B.*smaller host_memory"):
        Lease(tmp_path, 41, 100)
    second = Lease(tmp_path, 40, 100)
    first.release()
    first.release()
    with pytest.raises(BudgetError):
        Lease(tmp_path, 61, 100)
    third = Lease(tmp_path, 60, 100)
    second.release()
    third.release()
    assert len(list(tmp_path.glob("*.part"))) <= 3
    Lease(tmp_path, 100, 100).release()


def test_a_killed_engine_leaves_its_part_when_its_last_worker_has_gone(tmp_path: Path) -> None:
    with process("lease", tmp_path, 80, 100) as (path, engine), process("hold", path) as (said, worker):
        assert said == "held"
        os.kill(engine, signal.SIGKILL)
        os.waitid(os.P_PID, engine, os.WEXITED | os.WNOWAIT)
        with pytest.raises(BudgetError):  # the worker still maps the memory
            Lease(tmp_path, 30, 100)
        os.kill(worker, signal.SIGKILL)
        os.waitid(os.P_PID, worker, os.WEXITED | os.WNOWAIT)
        Lease(tmp_path, 100, 100).release()


def test_many_engines_that_come_and_are_killed(tmp_path: Path) -> None:
    """Whoever got a part and lives sums to no more than the limit."""
    chance = random.Random(0)
    living: list[tuple[subprocess.Popen[str], int]] = []
    for _ in range(14):
        nbytes = chance.randrange(1, 60)
        command = [sys.executable, "-c", HOLDER, "lease", str(tmp_path), str(nbytes), "100"]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        taken = sum(part for _, part in living)
        refused = child.stdout.readline().strip() == "refused"
        assert refused == (taken + nbytes > 100)
        if not refused:
            living.append((child, nbytes))
        while refused or (living and chance.random() < 0.4):
            gone = child if refused else living.pop(chance.randrange(len(living)))[0]
            gone.kill()
            gone.communicate()
            refused = False
    for child, _ in living:
        child.kill()
        child.communicate()
    Lease(tmp_path, 100, 100).release()


def test_a_directory_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DirectoryError, match="XDG_RUNTIME_DIR"):
        Lease(tmp_path / "file" / "budget", 1, 2)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert budget_directory("x").is_relative_to(tmp_path)


def test_a_directory_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As memory for a session's files may be: told, and nothing of the budget is taken."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(DirectoryError, match="No space left on device"):
            Lease(tmp_path, 60, 100)
    Lease(tmp_path, 100, 100).release()


def test_a_lease_is_kept_by_whoever_holds_it(tmp_path: Path) -> None:
    lease = Lease(tmp_path, 100, 100)
    file = hold(str(lease.path))
    lease.release()
    with pytest.raises(BudgetError):
        Lease(tmp_path, 1, 100)
    os.close(file)
    Lease(tmp_path, 1, 100).release()
