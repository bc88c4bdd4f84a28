"""What a user of another release of vLLM than the supported ones is told at the start."""

from __future__ import annotations

import sys

import pytest

pytest.importorskip("vllm")

import vllm

from stowage.errors import ConfigError
from stowage.plugins import vllm as plugin
from stowage.plugins.vllm import adapter


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1+cpu", "0.33.0rc1", "0.33.2.dev7+g1234567"])
def test_releases_that_are_supported(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    assert adapter.unknown_release() == ""
    assert plugin.StowageConnector.__name__ == "StowageConnector"


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "1.0", "0.330.0", "dev"])
def test_another_release_that_has_what_is_needed(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts, with a warning."""
    said: list[str] = []
    monkeypatch.setattr(vllm, "__version__", version)
    monkeypatch.setattr(adapter, "warn", said.append)
    assert plugin.StowageConnector.__name__ == "StowageConnector"
    (text,) = said
    assert f"vLLM {version} is installed" in text and "written for 0.32 and 0.33" in text


def test_another_release_that_lacks_something(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not start, and says why, instead of a bare ImportError."""
    monkeypatch.setattr(vllm, "__version__", "0.29.0")
    monkeypatch.setitem(sys.modules, "stowage.plugins.vllm.connector", None)
    with pytest.raises(ConfigError, match=r"vLLM 0\.29\.0 is installed.*written for 0\.32 and 0\.33.*lacks"):
        _ = plugin.StowageConnector
    monkeypatch.setattr(vllm, "__version__", "0.32.0")
    with pytest.raises(ImportError):  # a bug of ours, and no matter of releases
        _ = plugin.StowageConnector
