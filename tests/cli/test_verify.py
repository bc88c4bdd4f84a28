"""``stowage verify``: that it passes where offloading is right, and fails where it is not."""

import fcntl
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stowage.cache.cost_model import CostModel
from stowage.cache.store import TieredStore
from stowage.config.memory import Memory
from stowage.engine.engine import Engine
from stowage.engine.request import Request
from stowage.evaluation import runs
from stowage.evaluation.parity import DIFFERENT, OK, SHORT, UNUSED, Report, verify
from stowage.executor import kernels
from stowage.testing import tiny_models
from stowage.transfer.cpu import CpuTransfer
from tests.cli.conftest import Stowage
from tests.depth import mostly_rare

SMALL = Memory(kv_cache_memory="8MiB", host_memory="8MiB", block_size=4, chunk_blocks=2, snapshot_tokens=64)
FLAGS = ["--kv-cache-memory", "8MiB", "--host-memory", "8MiB", "--block-size", "4", "--chunk-blocks", "2"]


def by_verdict(report: Report, tier: str) -> set[str]:
    return {case.verdict for case in report.cases if case.tier == tier}


@pytest.mark.slow
def test_json_has_every_tier_and_reports_what_it_reused(call: Stowage, tiny_llama: Path) -> None:
    result = call("verify", tiny_llama, *FLAGS, "--json", "--seed", "1")
    report = json.loads(result.stdout)
    assert (result.exit_code, report["parity"], report["seed"]) == (0, True, 1)
    served = [case for case in report["cases"] if case["verdict"] == OK]
    assert {case["tier"] for case in served} == {"off", "device", "host", "disk"}
    for case in served:
        total = sum(case["reused_tokens"].values())
        assert case["identical"] and case["max_logprob_difference"] < 1e-3
        assert total == 0 if case["tier"] == "off" else case["reused_tokens"][case["tier"]] == total > 0
    assert {case["verdict"] for case in report["cases"]} == {OK, SHORT}
    assert len({case["prompt_tokens"] for case in served}) >= 4
    assert any("first 32 of the long one" in case["name"] for case in served)
    assert any("after a restart" in case["name"] for case in served)


@pytest.mark.slow
def test_text_is_for_people_and_no_directory_of_a_dead_run_stays(
    call: Stowage, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leftover = tmp_path / "temporary" / "stowage-verify-killed"
    leftover.mkdir(parents=True)
    (leftover / "disk").write_text("of a run that was killed")
    (running := tmp_path / "temporary" / "stowage-verify-running").mkdir()
    fcntl.flock(descriptor := os.open(running, os.O_RDONLY), fcntl.LOCK_EX)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    result = call("verify", tiny_llama, *FLAGS, "--deterministic")
    assert result.exit_code == 0 and "Parity: offloading changed no bit of an answer." in result.stdout
    os.close(descriptor)
    assert list((tmp_path / "temporary").iterdir()) == [running]


def test_a_directory_that_another_run_takes_for_a_left_one_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks for those between the making of one and its locking, and removes it before it is opened, or after."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    make, open_, made, opened = tempfile.mkdtemp, os.open, list[Path](), list[int]()

    def other_run(times: int, done: list[Any]) -> None:
        if len(done) == times:
            with monkeypatch.context() as once:
                once.setattr("tempfile.mkdtemp", make)
                once.setattr("os.open", open_)
                with runs.temporary_directory():
                    pass

    def making(**given: Any) -> str:
        made.append(Path(make(**given)))
        other_run(1, made)
        return str(made[-1])

    def opening(path: Path, flags: int, **more: Any) -> int:
        opened.append(open_(path, flags, **more))
        other_run(1, opened)
        return opened[-1]

    monkeypatch.setattr("tempfile.mkdtemp", making)
    monkeypatch.setattr("os.open", opening)
    with runs.temporary_directory() as directory:
        assert [path.is_dir() for path in made] == [False, False, True]
        assert directory == made[-1]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("family", mostly_rare(["gemma3", "nemotron_h"], ["gemma3"]))
def test_hybrids_pass_with_middle_hits(family: str, tmp_path: Path) -> None:
    report = verify(tiny_models.write(family, tmp_path / family), SMALL)
    middles = [case for case in report.cases if "of the long one" in case.name and case.tier != "off"]
    assert report.parity and {case.tier for case in middles} == {"device", "host", "disk"}
    assert {case.verdict for case in middles} == {OK}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", mostly_rare(["float32", "bfloat16"], ["bfloat16"]))
def test_fails_when_loaded_bytes_are_wrong(dtype: str, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = CpuTransfer.load

    def flipping(self: CpuTransfer, plan: Any, storage: Any) -> None:
        whole(self, plan, storage)
        storage[plan.blocks[0], 0] ^= 1 << 6  # one bit of one block

    monkeypatch.setattr(CpuTransfer, "load", flipping)
    report = verify(tiny_llama, SMALL, dtype=dtype)
    assert not report.parity and not report.tiers and report.model is not None and report.model.same
    assert DIFFERENT in by_verdict(report, "host") and DIFFERENT in by_verdict(report, "disk")
    assert by_verdict(report, "device") <= {OK, SHORT}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", mostly_rare(["float32", "bfloat16"], ["float32"]))
def test_fails_when_it_is_another_model(dtype: str, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tier changes a bit of what is wrong everywhere."""
    right = kernels.attend
    monkeypatch.setattr(
        kernels, "attend", lambda q, k, v, steps, scale, **more: right(q, k, v, steps, 1.5 * scale, **more)
    )
    report = verify(tiny_llama, SMALL, dtype=dtype, seed=1)  # by luck of the prompts, rounding is as large at times
    assert report.tiers and report.model is not None and not report.model.same and not report.parity


@pytest.mark.slow
def test_routers_that_choose_other_experts_after_rounding_are_no_other_model(tmp_path: Path) -> None:
    """Transformers computes gpt-oss alike to the bit in pieces, which says nothing of how far rounding carries."""
    source = tiny_models.write("gpt_oss", tmp_path / "model", tiny_models.TinySize(hidden=256), dtype="bfloat16")
    report = verify(source, SMALL, seed=1)
    assert report.model is not None and report.model.same and report.parity, report.model


@pytest.mark.slow
def test_fails_when_nothing_is_reused(call: Stowage, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(self: TieredStore, keys: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
        return np.zeros(len(keys), np.uint64), np.full(len(keys), -1, np.int8)

    monkeypatch.setattr(TieredStore, "locate", nothing)
    result = call("verify", tiny_llama, *FLAGS, "--json")
    report = json.loads(result.stdout)
    assert (result.exit_code, report["parity"]) == (1, False)
    assert {case["verdict"] for case in report["cases"] if case["tier"] in ("host", "disk")} == {UNUSED, SHORT}
    assert all(case["identical"] for case in report["cases"])


def test_prompts_that_are_asked_together_come_from_the_tier_though_some_begin_later(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine the first is answered before the last is asked, and its load was slow. None is computed anew
    for that.
    """
    submit, loaded = Engine.submit, CostModel.loaded

    def submitted(self: Engine, *given: Any, **named: Any) -> Request:
        request = submit(self, *given, **named)
        assert request.wait(60)
        return request

    monkeypatch.setattr(Engine, "submit", submitted)
    monkeypatch.setattr(CostModel, "loaded", lambda self, *what: loaded(self, *what[:-1], 1000 * what[-1]))
    report = verify(tiny_llama, SMALL, seed=1)
    assert report.parity, [case for case in report.cases if case.verdict not in (OK, SHORT)]


@pytest.mark.slow
def test_prompts_that_are_too_short_for_every_tier_show_nothing(call: Stowage, tiny_llama: Path) -> None:
    large = ("--kv-cache-memory", "64MiB", "--host-memory", "64MiB", "--block-size", "128")
    result = call("verify", tiny_llama, *large, "--chunk-blocks", "32")
    assert result.exit_code == 1 and "NO PARITY" in result.stdout, result.output
    assert "No prompt was long enough to come from device, host, disk: give a smaller --block-size" in result.stderr
    result = call("verify", tiny_llama, *large, "--chunk-blocks", "64", "--json")
    assert (
        result.exit_code == 2 and "A chunk of this model has 8192 tokens, and a sequence at most 4096" in result.stderr
    )


@pytest.mark.slow
def test_a_run_can_be_repeated_in_the_same_directory(call: Stowage, tiny_llama: Path, tmp_path: Path) -> None:
    """What the first run left there is not found by the second, which asks the same prompts."""
    flags = [*FLAGS, "--disk", f"{tmp_path}/kv:64MiB", "--seed", "3", "--json"]
    first, again = (json.loads(call("verify", tiny_llama, *flags).stdout) for _ in range(2))
    assert first["parity"] and again["parity"], again
    assert [case["reused_tokens"] for case in first["cases"]] == [case["reused_tokens"] for case in again["cases"]]


@pytest.mark.rare
@pytest.mark.slow
def test_uses_the_given_directory_whatever_it_holds(tiny_llama: Path, tmp_path: Path) -> None:
    memory = Memory(
        kv_cache_memory="8MiB", host_memory="8MiB", disk=f"{tmp_path}/kv:64MiB", block_size=4, chunk_blocks=2
    )
    assert all(verify(tiny_llama, memory).parity for _ in range(2))
    assert (tmp_path / "kv").is_dir()
