"""Base of the parsers that read an answer piece by piece: certain parts are emitted, the rest is buffered.

Owns `Part`, and how much of a text is buffered because a marker may begin there. A parser emits the same parts however
the text is cut into pieces.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

Kind = Literal["content", "reasoning", "call", "arguments"]


@dataclass(frozen=True, slots=True)
class Part:
    """A part of an answer: content, reasoning, the name of a called tool, or a piece of the call's arguments."""

    kind: Kind
    text: str


class IncrementalParser(ABC):
    """Parses a text that comes in pieces. Subclasses implement `_step`. is_cut: the model would have written more."""

    def __init__(self) -> None:
        self._buffer = ""
        self._parts: list[Part] = []
        self.is_cut = False

    def feed(self, text: str, *, last: bool) -> list[Part]:
        self._buffer += text
        while self._buffer and self._step(last):
            pass
        parts, self._parts = self._parts, []
        return parts

    @abstractmethod
    def _step(self, last: bool) -> bool:
        """Consume what is certain from the beginning of `_buffer`; returns whether it consumed anything."""

    def _emit(self, kind: Kind, end: int) -> bool:
        """Emit the first `end` characters of the buffer as a part."""
        self._parts.append(Part(kind, self._buffer[:end]))
        self._buffer = self._buffer[end:]
        return end > 0

    def _emit_until(self, kind: Kind, markers: tuple[str, ...], last: bool) -> str:
        """Emit what precedes the first of `markers` as a part, and consume the marker; returns it, or "" for none."""
        found = [(at, -len(marker), marker) for marker in markers if (at := self._buffer.find(marker)) >= 0]
        if found:
            at, _, marker = min(found)
            self._emit(kind, at)
            self._buffer = self._buffer[len(marker) :]
            return marker
        self._emit(kind, len(self._buffer) - (0 if last else begun(self._buffer, markers)))
        return ""


class CallParser(IncrementalParser):
    """Base of the parsers of tool calls: for each state a method `_read_STATE`, which is a `_step`. `_marker`: what
    began a call that is not certain yet; if the answer ends there, and was not cut, it is content.
    """

    def __init__(self) -> None:
        super().__init__()
        self._state = "text"
        self._marker = ""

    def feed(self, text: str, *, last: bool) -> list[Part]:
        parts = super().feed(text, last=last)
        if last and not self.is_cut and self._marker and self._state in ("name", "after_call"):
            parts.append(Part("content", self._marker))
        return parts

    def _step(self, last: bool) -> bool:
        return bool(getattr(self, f"_read_{self._state}")(last))


def begun(text: str, markers: tuple[str, ...]) -> int:
    """How many characters at the end of `text` may be the beginning of a marker."""
    longest = max(map(len, markers)) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(marker.startswith(text[-length:]) for marker in markers):
            return length
    return 0
