"""What it takes to run beside vLLM: no package that vLLM does not bring, but Stowage's own few."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib

import pytest

pytest.importorskip("vllm")

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.nursery import ROOT, python_path

OURS = {"blake3", "stowage", "xxhash"}
IMPORTED = """
import sys, vllm.distributed.kv_transfer.kv_connector.v1.multi_connector as _
before = {name.partition(".")[0] for name in sys.modules}
from stowage.plugins.vllm import StowageConnector
print(*sorted({name.partition(".")[0] for name in sys.modules} - before))
"""


def requirements(texts: list[str]) -> dict[str, SpecifierSet]:
    """By package, without those of extras."""
    found = [Requirement(text) for text in texts]
    return {
        re.sub(r"[-_.]+", "-", one.name).lower(): one.specifier
        for one in found
        if one.marker is None or one.marker.evaluate({"extra": ""})
    }


@pytest.mark.slow
def test_the_connector_imports_nothing_more() -> None:
    told = subprocess.run(
        [sys.executable, "-c", IMPORTED],
        env=os.environ | {"PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
        check=True,
    )
    assert set(told.stdout.split()) - sys.stdlib_module_names <= OURS


def test_what_stowage_requires_is_there_and_fits() -> None:
    """pip changes no version in an environment that has vLLM: what vLLM pins is what Stowage takes."""
    ours = requirements(tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"])
    pins = 0
    for distribution in sorted(set(importlib.metadata.packages_distributions()["vllm"])):
        theirs = requirements(importlib.metadata.requires(distribution) or [])
        for name, wanted in ours.items():
            assert importlib.metadata.version(name) in wanted, name
            for bound in [one for one in theirs.get(name, ()) if one.operator == "=="]:
                assert wanted.contains(bound.version, prereleases=True), f"{name}{wanted}: {bound}"
        pins += len(theirs)
    assert pins, "else nothing was compared"
    assert not {"torch", "transformers", "huggingface-hub", "tokenizers"} & ours.keys()
