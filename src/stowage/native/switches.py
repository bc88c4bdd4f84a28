"""Environment variables that switch something off, or on: set to anything but 0."""

from __future__ import annotations

import os
from typing import Final

PURE_PYTHON: Final = "STOWAGE_PURE_PYTHON"
"""Python does what compiled code does elsewhere, more slowly."""


def is_on(*variables: str) -> bool:
    """Whether one of them is set."""
    return any(os.environ.get(variable, "") not in ("", "0") for variable in variables)
