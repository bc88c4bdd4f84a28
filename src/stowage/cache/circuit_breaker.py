"""A circuit breaker: a tier that keeps failing is left alone for a while, then tried with one transfer.

    closed --5 failures in a row--> open --5 s--> half open --one probe--> closed, or open again

Time is an argument. A transfer fails as a whole when none of its chunks arrived or when its deadline passed.
"""

from __future__ import annotations

from typing import Final

FAILURES_MAX: Final = 5
OPEN_S: Final = 5.0


class Breaker:
    """The health of one tier, as far as transfers show it. `opened`: how often it opened, from closed or half open."""

    __slots__ = ("_failures", "_open_until_s", "_probing", "opened")

    def __init__(self) -> None:
        self._failures = 0
        self._open_until_s = 0.0
        self._probing = False
        self.opened = 0

    def allows(self, now_s: float) -> bool:
        """Whether a transfer may begin now."""
        return self._failures < FAILURES_MAX or (now_s >= self._open_until_s and not self._probing)

    def state(self, now_s: float) -> str:
        """`closed`, `open`, or `half-open` when the next transfer is, or would be, the probe."""
        if self._failures < FAILURES_MAX:
            return "closed"
        return "open" if now_s < self._open_until_s else "half-open"

    def begin(self) -> None:
        """A transfer begins; it was allowed. When the breaker is not closed it is the probe."""
        self._probing = self._failures >= FAILURES_MAX

    def succeeded(self) -> None:
        """A transfer brought something: closed."""
        self._failures = 0
        self._probing = False

    def failed(self, now_s: float) -> None:
        """A transfer brought nothing, or is past its deadline. One that began before the breaker opened prolongs it."""
        was_open = self.state(now_s) == "open"
        self._failures += 1
        self._probing = False
        if self._failures >= FAILURES_MAX:
            self.opened += not was_open
            self._open_until_s = now_s + OPEN_S

    def untried(self) -> None:
        """The tier refused a transfer, which says nothing of how others fare. If it was the probe, another may be."""
        self._probing = False

    def check(self) -> None:
        """Assert the invariants."""
        assert self._failures >= 0 and self.opened >= 0
        assert not self._probing or self._failures >= FAILURES_MAX, "a closed breaker has a probe"
