"""Engines of vLLM, forked from a process that has it imported; all tests of this directory are marked ``vllm``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.nursery import Nursery
from tests.vllm import driver
from tests.vllm.child import Run, in_child
from tests.vllm.models import FAMILIES, Family
from tests.vllm.oracle import Engine, Engines

Start = Callable[..., Engine]

NEXT = (
    "test_drafts.py::test_hits_of_an_engine_that_drafts[eagle-llama]",
    "test_drafts.py::test_hits_of_an_engine_that_drafts[mtp-mimo]",
    "test_families.py::test_prefixes_come_back_exactly[gemma3]",
    "test_families.py::test_prefixes_come_back_exactly[qwen3_next]",
    "test_faults.py::test_copies_that_lie_and_copies_that_fail[gemma3]",
    "test_install.py",
    "test_late.py",
    "test_multi.py",
    "test_pipeline.py::test_a_rank_that_is_slow_to_load",
    "test_pipeline.py::test_events_say_what_vllms_own_events_say",
    "test_pressure.py::test_a_reset_of_everything",
    "test_pressure.py::test_abort[computes-llama]",
    "test_pressure.py::test_abort[waits_for_load-llama]",
    "test_sides.py",
    "test_bookkeeping.py",
    "test_weights.py",
)
"""What `make vllm-next` runs with the next release of vLLM too: hybrids, failed loads, events, resets, aborts, drafts,
weights that change, other connectors beside it.
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.vllm)
            if item.nodeid.partition("tests/vllm/")[2].startswith(NEXT):
                item.add_marker(pytest.mark.vllm_next)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes the two sides of a connector (`two_sides.Machine`), which end with the test."""
    from stowage.plugins.vllm import namespace
    from tests.vllm.two_sides import Machine

    monkeypatch.setattr(namespace, "engine_namespace", lambda *_, **__: bytes(32))
    machines: list[Machine] = []

    def make(*arguments: Any, **extra: Any) -> Machine:
        machines.append(Machine(*arguments, **extra))
        return machines[-1]

    yield make
    for one in machines:
        one.close()


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    with Nursery("tests.vllm.driver", driver.warm) as made:
        yield made


@pytest.fixture
def run(nursery: Nursery, tmp_path: Path) -> Run:
    """Runs a scenario in a process that has vLLM imported."""
    return partial(in_child, nursery, tmp_path)


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
