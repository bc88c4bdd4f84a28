"""Series of Transformers: which are known, and what is said of others. The differences are tested by `make compat`."""

from __future__ import annotations

import importlib
import logging
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from stowage.models import compat

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("version", "said"), [("5.17.0", ""), ("5.24.3", ""), ("5.25.0", "5.25.0"), ("6.0.0", "6.0.0")]
)
def test_a_newer_series_is_warned_of(version: str, said: str) -> None:
    assert said in compat.untested(version) and bool(said) == bool(compat.untested(version))


def test_it_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(importlib.import_module("transformers"), "__version__", "5.99.0")  # what an import finds now
    compat.warn_if_untested.cache_clear()
    with caplog.at_level(logging.WARNING):
        compat.warn_if_untested()
        compat.warn_if_untested()
    assert [record.getMessage()[:19] for record in caplog.records] == ["Transformers 5.99.0"]
    compat.warn_if_untested.cache_clear()


def test_the_range_of_the_package_begins_at_the_oldest_and_holds_the_newest() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (wanted,) = [item for item in map(Requirement, extras["engine"]) if item.name == "transformers"]
    oldest, newest = (compat.series(numbers) for numbers in (compat.OLDEST, compat.NEWEST))
    assert wanted.specifier.contains(f"{oldest}.0") and wanted.specifier.contains(f"{newest}.9")
    assert not wanted.specifier.contains("5.16.9")
    pinned = {oldest: "runtime.txt", newest: "compat-newest.txt"}
    for numbers, file in pinned.items():
        assert f"transformers=={numbers}." in (ROOT / "requirements" / file).read_text()


def test_what_a_model_calls_its_cache() -> None:
    assert compat.cache_argument(["input_ids", "cache_params", "past_key_values"]) == "past_key_values"
    assert compat.cache_argument(["input_ids", "cache_params"]) == "cache_params"
    assert compat.cache_argument(["input_ids", "cache"]) == "cache"
