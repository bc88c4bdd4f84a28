"""What the tests on a CUDA device share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from tests.engine.conftest import be_patient


@pytest.fixture(autouse=True, scope="session")
def _device() -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device here")


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in tests/engine; products in float32 as exact as they are on a CPU; memory for the process beside this one."""
    be_patient(monkeypatch)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    yield
    gc.collect()
    torch.cuda.empty_cache()
