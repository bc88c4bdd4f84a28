"""SGLang's interface from the unpacked package, without the engine around it; all tests here are marked ``sglang``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

UNPACKED = Path(__file__).parents[2] / ".sglang"


def _without_the_engine() -> None:
    """The packages' own first lines import what computes, which is not installed; none of it is used here. Of their
    helpers the file backend takes one, which reads sizes.
    """
    for name in ("sglang", "sglang.srt", "sglang.srt.utils"):
        module = ModuleType(name)
        module.__path__ = [str(UNPACKED / name.replace(".", "/"))]
        sys.modules[name] = module
    helpers = ModuleType("sglang.srt.utils.common")
    helpers.human_readable_int = int  # type: ignore[attr-defined]
    sys.modules[helpers.__name__] = helpers
    sys.path.append(str(UNPACKED))  # for its version


if (UNPACKED / ".installed").exists() and "sglang" not in sys.modules:
    _without_the_engine()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Any]:
    """Backends on one directory."""
    from tests.sglang.backends import backends  # SGLang may not be here, and then its tests are skipped

    yield from backends(tmp_path)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.sglang)
