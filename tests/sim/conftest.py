"""What the tests of both simulators need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from stowage.testing.sim.runner import quiet


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with quiet():
        yield
