"""What reads an answer piece by piece: parts that are certain are given out, the rest is held until more is there.

Owns `Part`, and how much of a text is held because a marker may begin in it. A stage gives the same parts of a text
however it is cut.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

__all__ = ["Kind", "Part", "Stage", "begun"]

Kind = Literal["content", "reasoning", "call", "arguments"]


@dataclass(frozen=True, slots=True)
class Part:
    """A part of an answer: text that is said or thought, the name of a tool that is called, or of its arguments."""

    kind: Kind
    text: str


class Stage(ABC):
    """Reads a text that comes in pieces: `_step` takes what it can from `_held`, and says whether it took anything."""

    def __init__(self) -> None:
        self._held = ""
        self._parts: list[Part] = []

    def feed(self, text: str, *, last: bool) -> list[Part]:
        self._held += text
        while self._held and self._step(last):
            pass
        parts, self._parts = self._parts, []
        return parts

    @abstractmethod
    def _step(self, last: bool) -> bool:
        """Take what can be taken from `_held`: whether that was anything."""

    def _give(self, kind: Kind, end: int) -> bool:
        """The first `end` characters are a part."""
        self._parts.append(Part(kind, self._held[:end]))
        self._held = self._held[end:]
        return end > 0

    def _give_until(self, kind: Kind, markers: tuple[str, ...], last: bool) -> str:
        """What stands before the first of `markers` is a part; that marker, which is taken away, or none."""
        found = [(at, -len(marker), marker) for marker in markers if (at := self._held.find(marker)) >= 0]
        if found:
            at, _, marker = min(found)
            self._give(kind, at)
            self._held = self._held[len(marker) :]
            return marker
        self._give(kind, len(self._held) - (0 if last else begun(self._held, markers)))
        return ""


def begun(text: str, markers: tuple[str, ...]) -> int:
    """How many characters at the end of `text` may be the beginning of a marker."""
    longest = max(map(len, markers)) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(marker.startswith(text[-length:]) for marker in markers):
            return length
    return 0
