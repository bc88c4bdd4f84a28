"""Locks that are waited for, but not for ever: a step of the engine may hang with the lock, as on a disk that does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def held(lock: Any, timeout_s: float | None) -> Iterator[None]:
    """``lock`` is held meanwhile. Raises TimeoutError when it could not be had for ``timeout_s``; None: it waits."""
    if timeout_s is None:
        with lock:
            yield
        return
    if not lock.acquire(timeout=timeout_s):
        raise TimeoutError(f"a step of the engine takes longer than {timeout_s:g} s")
    try:
        yield
    finally:
        lock.release()
