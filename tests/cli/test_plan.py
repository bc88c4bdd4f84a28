"""``stowage plan`` and ``stowage probe``: without weights; numbers are the planner's own tests' job."""

import dataclasses
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from stowage.planner import probe
from stowage.planner.machine import TYPICAL_CPU
from stowage.testing import tiny_models
from tests.cli.conftest import Stowage

SIZE = tiny_models.TinySize(hidden=256, layers=8, vocab=4096)


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(tiny_models.config("mixtral", SIZE).to_json_string())
    return directory


def planned(call: Stowage, *arguments: str | Path) -> dict[str, Any]:
    result = call("plan", *arguments, "--machine", "typical-cpu", "--json")
    assert result.exit_code == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_each_placement_that_would_be_quicker_is_told_once(call: Stowage, model: Path) -> None:
    """Without host memory, all in device memory and nothing from the disk are the same."""
    hints = planned(call, model, "--device-memory", "40MiB", "--max-model-len", "1k")["hints"]
    told = [hint.partition(",")[0] for hint in hints if hint.startswith("With a device memory of")]
    assert len(told) == 1, hints


def test_a_plan_for_programs(call: Stowage, model: Path) -> None:
    sizes = (
        "--device-memory",
        "24MiB",
        "--host-memory",
        "8MiB",
        "--disk",
        "60MiB",
        "--max-model-len",
        "1k",
        "--max-num-seqs",
        "2",
    )
    found = planned(call, model, *sizes, "--max-num-batched-tokens", "64")
    assert found["workload"] | {"context_tokens": 1024, "batch": 2} == found["workload"]
    assert found["budgets"] == {"device_bytes": 24 << 20, "host_bytes": 8 << 20, "disk_bytes": 60 << 20}
    for tier, budget in zip(("device", "host", "disk"), found["budgets"].values(), strict=True):
        assert found["tiers"][tier]["used_bytes"] + found["tiers"][tier]["left_bytes"] == budget
    placed = sum(part["nbytes"] for part in found["weights"]) + found["device"]["small_bytes"]
    assert placed == found["model"]["bytes"] == 4 * found["model"]["parameters"]
    assert {part["tier"] for part in found["weights"]} == {"device", "host", "disk"}
    assert found["prediction"]["decode_tokens_per_s"] > 0
    assert found["machine"]["measured"] is False
    assert any("not measured" in hint for hint in found["hints"])


def test_a_plan_for_people(call: Stowage, model: Path, tmp_path: Path) -> None:
    picture = tmp_path / "plan.svg"
    arguments = ("--device-memory", "48MiB", "--max-model-len", "1k", "--machine", "typical-gpu", "--picture", picture)
    result = call("plan", model, *arguments)
    assert result.exit_code == 0, result.stderr
    for said in ("mixtral: ", " active, ", " layers ", " stream ", "KV of 1 x 1,024 tokens", "predicted ", "device "):
        assert said in result.stdout
    drawn = ElementTree.parse(picture)
    assert sum(element.tag.endswith("rect") for element in drawn.iter()) > SIZE.layers


def test_the_table_holds_what_the_budget_is_used_for(call: Stowage, model: Path) -> None:
    """Bytes in the rows of a hold add up to it; the bars end where the hold is full."""
    from stowage.planner.model import read_model
    from stowage.planner.predict import Workload
    from stowage.planner.report import rows, segments
    from stowage.planner.solve import TIERS, Budgets, solve

    budgets = Budgets(24 << 20, 8 << 20, 60 << 20)
    solution = solve(read_model(model), TYPICAL_CPU, budgets, Workload(1024, step_tokens=64))
    for tier, budget in zip(TIERS, (budgets.device_bytes, budgets.host_bytes, budgets.disk_bytes), strict=True):
        assert sum(nbytes for _, nbytes in segments(solution, tier)) == budget
        used = sum(row.nbytes for row in rows(solution) if row.tier == tier and not row.what.startswith("left"))
        assert used == solution.used_bytes(tier)
    fetched = sum(row.step_bytes for row in rows(solution))
    step = solution.prediction.decode
    assert fetched == step.disk_bytes + step.missed_bytes > 0


def test_experts_with_a_cache_are_shown_in_the_table_the_bars_and_the_json(call: Stowage, model: Path) -> None:
    sizes = ("--device-memory", "24MiB", "--max-model-len", "1k", "--max-num-batched-tokens", "64")
    shown = call("plan", model, *sizes, "--machine", "typical-cpu")
    assert shown.exit_code == 0, shown.stderr
    for said in ("layers 0-7 without experts", "experts of layers 0-7", "of the experts", "cache", "chosen evenly"):
        assert said in shown.stdout
    found = planned(call, model, *sizes)
    experts = [part for part in found["weights"] if part["delivery"] == "experts"]
    assert [part["layer"] for part in experts] == list(range(8))
    assert found["device"]["cache_bytes"] > 0
    assert found["prediction"]["step"]["missed_bytes"] > 0


def test_nothing_is_measured_twice(call: Stowage, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what was measured before, and with a file of another machine."""
    measured: list[str] = []
    monkeypatch.setattr(probe, "measure", lambda *_: measured.append("again"))
    probe._remember(dataclasses.replace(TYPICAL_CPU, name="remembered", key=probe.machine_key()))
    other = tmp_path / "other.json"
    other.write_text(json.dumps(TYPICAL_CPU.to_json() | {"name": "another"}))
    asked = ["plan", model, "--device-memory", "1GiB"]
    for more, name in (([], "remembered"), (["--machine", other], "another")):
        result = call(*asked, *more)
        assert result.exit_code == 0 and result.stderr == "", result.stderr
        assert f"machine    {name}" in result.stdout
    assert not measured


def test_formats_are_in_the_table(call: Stowage) -> None:
    formats = {"bfloat16": {"q4_0": {1: 0.4, 8: 0.5}, "awq": {1: 1.25, 8: 1.0}}, "float32": {"q4_0": {1: 2.0}}}
    probe._remember(dataclasses.replace(TYPICAL_CPU, measured=True, formats=formats, key=probe.machine_key()))
    said = call("probe").stdout
    assert "q4_0, 1, 8 rows: times bfloat16" in said and "2.50, 2.00" in said and "0.80, 1.00" in said


def test_a_directory_that_is_not_there_is_not_measured(call: Stowage, tmp_path: Path) -> None:
    probe._remember(dataclasses.replace(TYPICAL_CPU, measured=True, key=probe.machine_key(tmp_path / "none")))
    refused = call("probe", "--dir", tmp_path / "none")
    assert refused.exit_code == 2 and "none is not a directory" in " ".join(refused.stderr.split())


def test_what_was_measured_on_busy_cores_is_told_and_measured_again(
    call: Stowage, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = dataclasses.replace(TYPICAL_CPU, measured=True, waited_share=0.46, key=probe.machine_key())
    quiet = dataclasses.replace(busy, waited_share=0.02)
    probe._remember(busy)
    said = " ".join(call("plan", model, "--device-memory", "1GiB").stdout.split())
    assert "46% of the time was waiting for them" in said and "stowage probe" in said
    found = [busy, quiet]
    monkeypatch.setattr(probe, "measure", lambda *_, **__: (probe._remember(found[0]), found.pop(0))[1])
    again = call("probe")
    assert again.exit_code == 0 and "46% of the time" in again.stderr
    assert "waiting" not in call("probe").stderr
    assert call("probe").exit_code == 0 and not found
    assert "waiting" not in call("plan", model, "--device-memory", "1GiB").stdout


def test_a_budget_that_cannot_work_says_what_would(call: Stowage, model: Path) -> None:
    result = call("plan", model, "--device-memory", "1MiB", "--machine", "typical-cpu")
    assert result.exit_code == 2
    assert "does not fit" in result.stderr
    least = result.stderr.split("a device memory of ")[1].split(",")[0].rstrip(".\n")
    assert call("plan", model, "--device-memory", least, "--machine", "typical-cpu").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--max-model-len", "long"], "number of tokens 'long'"),
        (["--max-model-len", "0"], "number of tokens '0'"),
        (["--device-memory", "much"], "--device-memory cannot be used"),
        (["--disk", "much"], "--disk cannot be used"),
        (["--machine", "nowhere.json"], "nowhere.json cannot be read"),
        (["--dtype", "int3"], "dtype 'int3' is unknown"),
        (["--picture", "no/where/plan.svg"], "picture cannot be written"),
    ],
)
def test_wrong_use_is_explained(call: Stowage, model: Path, arguments: list[str], said: str) -> None:
    machine = [] if "--machine" in arguments else ["--machine", "typical-cpu"]
    result = call("plan", model, *machine, *arguments)
    assert result.exit_code == 2
    assert said in result.stderr


def test_a_type_of_ones_own(call: Stowage, model: Path) -> None:
    small = planned(call, model, "--device-memory", "1GiB", "--dtype", "bfloat16")
    assert 2 * small["model"]["bytes"] == planned(call, model, "--device-memory", "1GiB")["model"]["bytes"]


def test_a_probe_is_shown_and_can_be_planned_with(
    call: Stowage, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    made = replace(TYPICAL_CPU, name="measured here", measured=True, key=probe.machine_key())
    measured: list[object] = []
    monkeypatch.setattr(probe, "measure", lambda place, say: measured.append(place) or made)
    shown = call("probe")
    assert "measured here" in shown.stdout
    assert "decode in bfloat16, batch 8" in shown.stdout
    (tmp_path / "machine.json").write_text(call("probe", "--json").stdout)
    assert len(measured) == 2
    probe._remember(made)
    assert call("probe").exit_code == 0
    assert len(measured) == 2
    assert call("probe", "--refresh", "--dir", tmp_path).exit_code == 0
    assert measured[2:] == [tmp_path]
    result = call("plan", model, "--device-memory", "1GiB", "--machine", tmp_path / "machine.json")
    assert "machine    measured here" in result.stdout
    assert "not measured" not in result.stdout
