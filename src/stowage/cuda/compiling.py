"""Whether Triton is installed, and which errors of a kernel's compilation or launch make torch do the work instead."""

from __future__ import annotations

import importlib.util
import subprocess

from stowage.native.switches import PURE_PYTHON, is_on

_RAISED = (
    *(RuntimeError, ValueError, TypeError, AttributeError, AssertionError, LookupError, ImportError, OSError),
    subprocess.SubprocessError,
)


def is_wanted() -> bool:
    """Whether Triton is there, and nobody asked to do without compiled code."""
    return importlib.util.find_spec("triton") is not None and not is_on(PURE_PYTHON)


def errors() -> tuple[type[Exception], ...]:
    """What an import of half a Triton, its compiler and launcher, the driver, and a missing C compiler raise."""
    try:
        from triton.errors import TritonError
    except ImportError:
        return _RAISED
    return (*_RAISED, TritonError)
