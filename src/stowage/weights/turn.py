"""Whose turn it is: one forward of a model at a time has its weights, and others wait in line, or are told.

Owns the line of claims. A claim is alive while the frame of its forward runs. So a turn ends with its forward, however
that ends: by a return, an exception, an interrupt at any instruction, or the end of its thread. Nothing is held that
somebody must give back; giving it back only saves the next one a look.

Every step is one operation on a ``deque`` or a lock, which no interrupt divides.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import deque
from types import FrameType
from typing import Final

from stowage.errors import ModelError

__all__ = ["TURN_TIMEOUT_S", "TWO_FORWARDS", "Claim", "Turn"]

TWO_FORWARDS: Final = (
    "two forwards of this model ran at the same time, and its weights are delivered for one: let one thread compute at "
    "a time, or load the model twice."
)
TURN_TIMEOUT_S: Final = 600.0
"""The longest wait for the forward of another thread."""
_LOOK_S: Final = 0.05
"""How often the one who waits looks whether the one before it is alive."""


class Claim:
    """One forward's position in the line: ``frame`` runs as long as it does."""

    __slots__ = ("_frame", "_pid", "_thread", "called")

    def __init__(self, frame: FrameType) -> None:
        self._thread, self._pid = threading.get_ident(), os.getpid()
        self._frame: FrameType | None = frame
        self.called = threading.Lock()
        """Held until it is this claim's turn, or somebody thinks so."""
        self.called.acquire()

    @property
    def here(self) -> bool:
        """Whether it is of this thread's forward, which runs."""
        return self._thread == threading.get_ident() and _runs(self._frame, sys._getframe())

    def end(self) -> None:
        """Its forward is over, or as good as over."""
        self._frame = None

    @property
    def alive(self) -> bool:
        """Whether its forward runs. The frame itself says so: those above it come and go while another thread looks,
        and generators' lose the ones below them. After a fork, frames of threads that are gone stay as they were.

        What threads there are is not asked of ``sys._current_frames``: Python 3.11 collects garbage there with a lock
        held (https://github.com/python/cpython/issues/106883), and every thread stands still for ever when a finalizer
        in that garbage is written in Python.
        """
        frame = self._frame
        here = self._pid == os.getpid() or self._thread == threading.main_thread().ident  # who forked is that then
        return frame is not None and here and _executes(frame)


def _executes(frame: FrameType) -> bool:
    try:
        frame.clear()
    except RuntimeError:  # it cannot be cleared while it is executed
        return True
    return False


def _runs(frame: FrameType | None, at: FrameType | None) -> bool:
    while frame is not None and at is not None and at is not frame:
        at = at.f_back
    return at is not None and at is frame


class Turn:
    """The line. ``waits``: whether a forward of another thread waits for its turn; else it is refused."""

    def __init__(self, waits: bool = True, timeout_s: float = TURN_TIMEOUT_S) -> None:
        self.waits, self._timeout_s = waits, timeout_s
        self._line: deque[Claim] = deque()

    def held(self) -> Claim | None:
        """The claim whose turn it is, if it is of the forward that this thread is in."""
        line = list(self._line)
        return line[0] if line and line[0].here else None

    def take(self, frame: FrameType, waits: bool = False) -> Claim:
        """The turn of the forward that runs in ``frame``, of this thread. ``waits``: here whatever else is said.

        Raises ModelError when this thread is in another forward already, when another one is and this one does not
        wait, and when that one does not end.
        """
        if any(claim.here for claim in list(self._line)):
            raise ModelError(
                "a forward of this model began inside of another one, most likely in a hook: its weights are delivered "
                "for one. Call the model when its forward has returned."
            )
        claim = Claim(frame)
        self._line.append(claim)
        try:
            self._wait(claim, waits or self.waits)
        except BaseException:
            self.give_back(claim)
            raise
        return claim

    def give_back(self, claim: Claim) -> None:
        """It is the next one's turn. May be called twice."""
        claim.end()
        with contextlib.suppress(ValueError):
            self._line.remove(claim)
        for first in list(self._line)[:1]:
            with contextlib.suppress(RuntimeError):  # it was called already
                first.called.release()

    def _wait(self, claim: Claim, waits: bool) -> None:
        before: Claim | None = None
        since_s = 0.0
        while (first := next(iter(list(self._line)))) is not claim:
            if not first.alive:
                self.give_back(first)
                continue
            if not waits:
                raise ModelError(TWO_FORWARDS)
            now_s = time.monotonic()
            if first is not before:
                before, since_s = first, now_s
            if now_s - since_s > self._timeout_s:
                raise ModelError(
                    f"a forward of another thread has not ended within {self._timeout_s:g} s, and this one waited for "
                    "its turn. Load the model twice, or let one thread compute at a time."
                )
            claim.called.acquire(timeout=_LOOK_S)
