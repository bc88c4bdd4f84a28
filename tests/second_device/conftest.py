"""What the tests on the second device share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.engine.conftest import Reference, be_patient
from tests.second_device.build import register
from tests.second_device.interpreting import interpreting


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in tests/engine: whether loading is worth it is not asked here."""
    be_patient(monkeypatch, 60.0)


@pytest.fixture
def interpreter() -> Iterator[None]:
    """Kernels are interpreted."""
    with interpreting():
        yield


@pytest.fixture(scope="session")
def device() -> torch.device:
    return register()


@pytest.fixture(scope="session")
def references(checkpoints: Callable[..., Path]) -> Callable[[str], Reference]:
    """Plain ``generate()`` on the CPU."""
    return functools.cache(lambda family: Reference(checkpoints(family)))
