"""What the tests on the second device share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from stowage.testing import tiny_models
from tests.engine.conftest import Reference, be_patient
from tests.second_device.build import register


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in tests/engine: whether loading is worth it is not asked here."""
    be_patient(monkeypatch, 60.0)


@pytest.fixture(scope="session")
def device() -> torch.device:
    return register()


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    """Plain ``generate()`` on the CPU."""
    known: dict[str, Reference] = {}

    def reference(family: str) -> Reference:
        if family not in known:
            known[family] = Reference(tiny_models.write(family, tmp_path_factory.mktemp("checkpoints") / family))
        return known[family]

    return reference
