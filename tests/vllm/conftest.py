"""Engines of vLLM, forked from a process that has it imported; all tests of this directory are marked ``vllm``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.nursery import Nursery
from tests.vllm import driver
from tests.vllm.models import FAMILIES, Family
from tests.vllm.oracle import Engine, Engines

Start = Callable[..., Engine]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.vllm)


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    with Nursery("tests.vllm.driver", driver.warm) as made:
        yield made


@pytest.fixture(scope="session")
def engines(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Engines:
    return Engines(nursery, tmp_path_factory.mktemp("vllm"))


@pytest.fixture
def start(engines: Engines) -> Iterator[Start]:
    """Starts engines by family name; they end with the test."""

    def begin(
        name: str, transfer: dict[str, Any] | None = None, *, family: Family | None = None, **more: Any
    ) -> Engine:
        return engines.start(name, family or FAMILIES[name], transfer, **more)

    yield begin
    engines.end_all()
