"""What this process has put into a store, oldest first, so that it can keep to a limit there. For one event loop."""

from __future__ import annotations

from collections.abc import Container
from typing import Final

NAMES_MAX: Final = 1 << 20
"""Beyond that the oldest go too, since what is not remembered cannot be removed. About 300 bytes each."""


class Quota:
    """Values by name and their lengths. `limit_bytes` 0: nothing is remembered, and nothing has to go."""

    def __init__(self, limit_bytes: int, names_max: int = NAMES_MAX) -> None:
        self._limit_bytes = limit_bytes
        self._names_max = names_max
        self._lengths: dict[str, int] = {}
        self._bytes = 0
        self._removals = 0

    def fits(self, length: int) -> bool:
        """Whether a value of that length can ever be kept."""
        return not self._limit_bytes or length <= self._limit_bytes

    def has_room(self, name: str, length: int) -> bool:
        """Whether that value, which fits, can be written and nothing must go before."""
        if not self._limit_bytes or not self._lengths:
            return True
        more_bytes = length - self._lengths.get(name, 0)
        return self._bytes + more_bytes <= self._limit_bytes and len(self._lengths) < self._names_max

    def oldest(self, busy: Container[str] = ()) -> str | None:
        """What goes next, but for those in `busy`."""
        return next((name for name in self._lengths if name not in busy), None)

    def removed(self, name: str) -> None:
        """It is gone."""
        self._bytes -= self._lengths.pop(name, 0)
        self._removals += 1

    def add(self, name: str, length: int) -> None:
        """It is about to be written. One that fails to be is counted all the same, since nobody knows."""
        if self._limit_bytes:
            self._bytes += length - self._lengths.pop(name, 0)
            self._lengths[name] = length

    def stats(self) -> dict[str, int | float | str]:
        """Bytes that this process has there, the limit, and how many values it removed."""
        if not self._limit_bytes:
            return {}
        return {"bytes_used": self._bytes, "bytes_limit": self._limit_bytes, "removed": self._removals}

    def check(self) -> None:
        """Assert the invariants."""
        assert self._bytes == sum(self._lengths.values())
        assert not self._limit_bytes or self._bytes <= self._limit_bytes
        assert len(self._lengths) <= self._names_max
