"""Scenarios: functions of tests that run in a process of their own, which has vLLM imported."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.nursery import Nursery

FULL, MLA, HYBRID = ["full"] * 4, ["mla"] * 4, ["sliding", "full"] * 2
"""Kinds of the four layers of a `pipeline.Engine`."""
KEPT = 384
"""Of 400 tokens: three chunks of 128."""
Scenario = Callable[..., None]
Run = Callable[..., None]


def in_child(nursery: Nursery, directory: Path, scenario: Scenario, *arguments: Any) -> None:
    """Run ``scenario(directory, *arguments)`` there; fails as it fails."""
    child = nursery.start(carry_out, scenario.__module__, scenario.__name__, directory, *arguments)
    try:
        child.wait()
    except AssertionError:
        raise AssertionError((directory / "failure").read_text(encoding="utf-8")) from None


def carry_out(module: str, name: str, directory: str, *arguments: Any) -> None:
    try:
        getattr(importlib.import_module(module), name)(Path(directory), *arguments)
    except BaseException:
        (Path(directory) / "failure").write_text(traceback.format_exc(), encoding="utf-8")
        raise
