"""What can go wrong when a Triton kernel is compiled and launched, so that torch does the work instead."""

from __future__ import annotations

import subprocess

__all__ = ["errors"]

_RAISED = (
    *(RuntimeError, ValueError, TypeError, AttributeError, AssertionError, LookupError, ImportError, OSError),
    subprocess.SubprocessError,
)


def errors() -> tuple[type[Exception], ...]:
    """What an import of half a Triton, its compiler and launcher, the driver, and a C compiler that is not there
    raise.
    """
    try:
        from triton.errors import TritonError
    except ImportError:
        return _RAISED
    return (*_RAISED, TritonError)
