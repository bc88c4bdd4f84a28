"""The clients that people have, against a real model: what they get is of the schemas that they asked with.

Needs the clients in `.clients` and the model in `.real-model`: `make clients` brings both and runs this. The model is
small, so content is forced (required tools, schemas, choices); the rest is whether every client gets through.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.server.process import Server

pytestmark = pytest.mark.clients
ROOT = Path(__file__).parents[2]
MODEL = ROOT / ".real-model" / "SmolLM2-135M-Instruct"
CASES = re.findall(r"^@case\ndef (\w+)", (Path(__file__).parent / "clients.py").read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def found(start: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What every client found out."""
    folder = tmp_path_factory.mktemp("clients")
    server = start("--kv-cache-memory", "256MiB", "--host-memory", "64MiB", model=MODEL)
    environment = {"PYTHONPATH": str(ROOT / ".clients"), "PATH": os.environ["PATH"], "HOME": str(folder)}
    environment |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(Path(__file__).parent / "clients.py"), server.url, server.model, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=580, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    server.stop()
    return dict(json.loads((folder / "found.json").read_text()))


def is_right(value: Any) -> bool:
    """A trip, a name or a reason that was asked for, or true; and lists of such."""
    if isinstance(value, dict):
        return value.get("city") in ("Rome", "Oslo") and value.get("days", 1) in range(1, 10)
    if isinstance(value, list):
        return bool(value) and all(map(is_right, value))
    return value is True or value in ("trip", "tool_use", "tool_calls", 12)


@pytest.mark.parametrize("name", CASES)
def test_client(name: str, found: dict[str, Any]) -> None:
    assert "error" not in found[name], found[name]["error"]
    assert is_right(found[name]["found"]), found[name]


def test_the_table_of_the_documentation_names_every_client() -> None:
    page = (ROOT / "docs" / "serving.md").read_text()
    table = page[page.index("### Clients") :].split("###")[1]
    for name in CASES:
        assert f"`{name}`" in table, name
