"""A program under `peers/` in a process of its own: commands in lines of JSON on its stdin, answers on its stdout."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stowage.planner.compute import waited_share

PYTHON = Path(".venv-bench/bin/python")
"""The peers' environment, which `make bench-env` makes."""


class Peer:
    """Runs `command` with Stowage's sources on its path. `ready`: what it said when it was. `environment`: another one
    than this process has by now.
    """

    def __init__(self, command: Sequence[str | Path], environment: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            list(map(str, command)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**(os.environ if environment is None else environment), "PYTHONPATH": "src"},
        )
        self.ready = self._read()

    def ask(self, **command: Any) -> dict[str, Any]:
        """Its answer to `command`. Raises SystemExit when it has ended."""
        assert self._process.stdin is not None
        print(json.dumps(command), file=self._process.stdin, flush=True)
        return self._read()

    @property
    def waited_share(self) -> float:
        """Of the time in which its threads could have run, the share that they waited for a core."""
        return waited_share(Path(f"/proc/{self._process.pid}/task"))

    def end(self) -> None:
        """It has no more to do."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("A peer has ended; its words are above.")
        answer: dict[str, Any] = json.loads(line)
        return answer
