"""Notices a call that never returns: the test runs in one thread, and another waits for it. Used by `conformance`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any


class NonConformance(AssertionError):
    """The tier broke a rule of the protocol; the text says which."""


class Patience:
    """How long to wait for a tier. A wait in vain makes it short: repetitions that shrink a failure are not waited for.

    A tier that is merely slow passes all the same, unless it has failed before.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def lose(self) -> None:
        self.seconds = min(self.seconds, 0.5)


class Watch:
    """Runs a test in a thread of its own, so that a call that never returns is noticed by the one that waits for it."""

    def __init__(self, name: str, patience_s: float) -> None:
        self.patience = Patience(patience_s)
        self.story: list[str] = []
        self.tidy_up: Callable[[], None] = lambda: None
        self._name = name
        self._call: tuple[str, float] | None = None
        self._given_up = False
        self._error: BaseException | None = None

    def run(self, test: Callable[[], None]) -> None:
        """Raises what `test` raises, and NonConformance where it hangs in a call."""
        thread = threading.Thread(target=self._run, args=(test,), name="conformance", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(0.2)
            call = self._call
            if call is not None and time.monotonic() > call[1] and thread.is_alive():
                self._given_up = True
                self.tidy_up()  # the thread that hangs will not
                rule_ = "close must end by its deadline" if call[0] == "close" else "no method but close may block"
                steps = "\n    ".join(self.story)
                raise NonConformance(
                    f"{self._name}: {call[0]} did not return for {self.patience.seconds:.0f} s: {rule_}. "
                    f"The steps on this tier:\n    {steps}"
                )
        if self._error is not None:
            raise self._error

    def _run(self, test: Callable[[], None]) -> None:
        try:
            test()
        except BaseException as error:  # noqa: BLE001 - handed over to the thread that waits
            self._error = error

    def call(self, what: str, call: Callable[[], Any], extra_s: float = 0.0) -> Any:
        """The result of a method of the tier. Raises what it raises."""
        self._call = what, time.monotonic() + self.patience.seconds + extra_s
        try:
            return call()
        finally:
            self._call = None
            if self._given_up:
                raise SystemExit("the test has ended")
