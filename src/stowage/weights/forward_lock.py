"""A first-in, first-out lock on a model's weights: one forward at a time; others wait in line, or are refused.

Owns the line of claims. The first claim holds the lock while the frame of its forward is executed, so the lock is free
again however that forward ends: by a return, an exception, an interrupt at any instruction, or the end of its thread.
``release`` is therefore optional: it only wakes the next claim earlier.

Every step is one operation on a ``deque`` or a ``threading.Lock``, which no interrupt can divide.
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

TWO_FORWARDS: Final = (
    "two forwards of this model ran at the same time, and its weights are delivered for one: let one thread compute at "
    "a time, or load the model twice."
)
LOCK_TIMEOUT_S: Final = 600.0
"""The longest wait for the forward of another thread."""
_POLL_S: Final = 0.05
"""How often a waiting claim checks whether the first one's forward still runs."""


class Claim:
    """One forward's position in the line. ``frame`` is executed as long as that forward runs."""

    __slots__ = ("_frame", "_pid", "_thread", "wakeup")

    def __init__(self, frame: FrameType) -> None:
        self._thread, self._pid = threading.get_ident(), os.getpid()
        self._frame: FrameType | None = frame
        self.wakeup = threading.Lock()
        """Held until this claim may be the first. It may be released too early, so the line is checked again."""
        self.wakeup.acquire()

    @property
    def is_current(self) -> bool:
        """Whether this thread is inside the claim's forward."""
        return self._thread == threading.get_ident() and _runs(self._frame, sys._getframe())

    def end(self) -> None:
        """The forward has ended, or is about to."""
        self._frame = None

    @property
    def is_running(self) -> bool:
        """Whether its forward still runs. Asks the frame itself: the frames that it calls change while another thread
        looks, and a generator's frame has no caller between two values. After a fork the frames of threads that no
        longer exist look as if they ran, so only those of the thread that forked count.

        Does not use ``sys._current_frames``: in Python 3.11 it can collect garbage with a lock held, and then every
        thread blocks for ever if that garbage has a finalizer in Python
        (https://github.com/python/cpython/issues/106883).
        """
        frame = self._frame
        here = self._pid == os.getpid() or self._thread == threading.main_thread().ident  # that is the one that forked
        return frame is not None and here and _executes(frame)


def _executes(frame: FrameType) -> bool:
    try:
        frame.clear()
    except RuntimeError:  # a frame that is executed cannot be cleared
        return True
    return False


def _runs(frame: FrameType | None, at: FrameType | None) -> bool:
    while frame is not None and at is not None and at is not frame:
        at = at.f_back
    return at is not None and at is frame


class ForwardLock:
    """The lock on a model with offloaded weights. ``waits``: whether another thread's forward waits, or is refused."""

    def __init__(self) -> None:
        self.waits = True
        self._line: deque[Claim] = deque()

    def held(self) -> Claim | None:
        """The claim that holds the lock, if this thread is inside its forward."""
        line = list(self._line)
        return line[0] if line and line[0].is_current else None

    def acquire(self, frame: FrameType, waits: bool = False) -> Claim:
        """Acquire the lock for the forward of this thread that runs in ``frame``. ``waits``: wait even if
        ``self.waits`` is off.

        Raises ModelError when this thread is already inside a forward, when another forward holds the lock and this one
        does not wait, and when that forward has not ended after ``LOCK_TIMEOUT_S``.
        """
        if any(claim.is_current for claim in list(self._line)):
            raise ModelError(
                "a forward of this model began inside of another one, most likely in a hook: its weights are delivered "
                "for one. Call the model when its forward has returned."
            )
        claim = Claim(frame)
        self._line.append(claim)
        try:
            self._wait(claim, waits or self.waits)
        except BaseException:
            self.release(claim)
            raise
        return claim

    def release(self, claim: Claim) -> None:
        """Pass the lock on to the next claim. May be called twice."""
        claim.end()
        with contextlib.suppress(ValueError):
            self._line.remove(claim)
        for first in list(self._line)[:1]:
            with contextlib.suppress(RuntimeError):  # it was woken already
                first.wakeup.release()

    def _wait(self, claim: Claim, waits: bool) -> None:
        before: Claim | None = None
        since_s = 0.0
        while (first := next(iter(list(self._line)))) is not claim:
            if not first.is_running:
                self.release(first)
                continue
            if not waits:
                raise ModelError(TWO_FORWARDS)
            now_s = time.monotonic()
            if first is not before:
                before, since_s = first, now_s
            if now_s - since_s > LOCK_TIMEOUT_S:
                raise ModelError(
                    f"a forward of another thread has not ended within {LOCK_TIMEOUT_S:g} s, and this one waited for "
                    "its turn. Load the model twice, or let one thread compute at a time."
                )
            claim.wakeup.acquire(timeout=_POLL_S)
