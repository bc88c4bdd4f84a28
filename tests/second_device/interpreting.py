"""Triton's interpreter: kernels run on the CPU, on tensors of the CPU."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / ".triton"
"""Where ``make second-device`` puts Triton where torch brought none."""


def require() -> None:
    """Let Triton be imported, or skip."""
    if importlib.util.find_spec("triton") is None:
        if not (FOLDER / "triton").is_dir():
            pytest.skip("Triton is not here: make second-device brings it")
        sys.path.append(str(FOLDER))


@contextmanager
def interpreting() -> Iterator[None]:
    """Kernels that are first used in here are interpreted: from then on, to the end of the process."""
    require()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        from triton.runtime import interpreter

        given = interpreter._patch_lang_tensor

        def with_indices(tensor: Any, scope: Any) -> None:
            """Newer numpy takes no array of one number for a number, as Triton 3.6 does in loops."""
            given(tensor, scope)
            scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

        patch.setattr(interpreter, "_patch_lang_tensor", with_indices)
        yield
