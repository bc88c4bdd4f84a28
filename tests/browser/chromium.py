"""Chromium, driven by `driver.mjs` with playwright-core. `make browser` installs what that needs."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).parent
WIDE: Final = (1280, 900)
PHONE: Final = (360, 740)


def program() -> str | None:
    """Where Chromium is."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


def missing() -> str:
    """Why there is no browser here; empty: there is one."""
    lacking = [] if program() else ["chromium"]
    lacking += [] if shutil.which("node") else ["node"]
    lacking += (
        [] if (HERE / "node_modules" / "playwright-core").is_dir() else ["playwright-core (`make browser` installs it)"]
    )
    return "there is no " + " and no ".join(lacking) if lacking else ""


class BrowserError(AssertionError):
    """What the page was asked for did not happen."""


class Browser:
    """One window at a time."""

    def __init__(self, folder: Path) -> None:
        command = ["node", str(HERE / "driver.mjs"), program() or "", str(folder)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()

    def call(self, name: str, *given: Any) -> Any:
        """A method of Playwright's page, or one of the driver's own. Raises BrowserError."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"call": name, "with": given}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def open(self, size: tuple[int, int] = WIDE, **options: Any) -> None:
        """A new window with nothing in it."""
        self.call("open", {"viewport": {"width": size[0], "height": size[1]}, **options})

    def see(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        return self.call("evaluate", expression)

    def until(self, expression: str) -> None:
        """Waits until it is true."""
        self.call("waitUntil", expression)

    def press(self, *keys: str) -> None:
        for key in keys:
            self.call("press", key)

    def text(self, selector: str) -> str:
        return str(self.call("innerText", selector))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the driver has ended: see its traceback"
        answer = json.loads(line)
        if "error" in answer:
            raise BrowserError(answer["error"])
        return answer.get("value")
