"""Measuring the machine: real files, real copies, a real torch; no number is judged but that there is one."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from stowage.errors import DirectoryError, StowageError
from stowage.executor import kernels
from stowage.planner import compute, format_speed, forwards, probe, storage, weight_speeds
from stowage.planner.machine import INT8, TYPICAL_CPU, Machine
from stowage.weights.file import File
from stowage.weights.quantized.codes import FORMS
from stowage.weights.quantized.formats import FORMATS, PLAIN

SMALL = 4 << 20


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch computes is left out: it takes seconds, and has its own test."""
    monkeypatch.setattr(probe, "_MEMORY_BYTES", SMALL)
    fields = TYPICAL_CPU.to_json()
    kept = {name: fields[name] for name in ("kind", "products", "attention", "layer_s")}
    monkeypatch.setattr(probe, "_compute", lambda say, file: {**kept, "device": "", "threads": 1})


def quick_measure(directory: Path, say: Callable[[str], object] = lambda text: None) -> Machine:
    return probe.measure(directory, say=say, file_bytes=SMALL)


@pytest.mark.usefixtures("quick")
def test_a_measurement_is_remembered_for_its_machine_and_disk(tmp_path: Path) -> None:
    assert probe.remembered(tmp_path) is None
    heard: list[str] = []
    measured = quick_measure(tmp_path, heard.append)
    assert measured.measured
    assert set(measured.disk_read) == {1, 4, 8}
    assert min(*measured.disk_read.values(), measured.disk_write, measured.disk_read_buffered) > 0
    assert probe.remembered(tmp_path) == measured
    assert heard[0] == "memory"
    assert [name for name in tmp_path.iterdir() if name.name.startswith(".stowage")] == []


@pytest.mark.usefixtures("quick")
def test_another_torch_or_number_of_threads_is_measured_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick_measure(tmp_path)
    monkeypatch.setattr(probe, "version", lambda name: "0.1")
    assert probe.remembered(tmp_path) is None
    monkeypatch.undo()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert probe.remembered(tmp_path) is not None
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert probe.remembered(tmp_path) is None


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("damage", ["", "{}", "cut"])
def test_a_damaged_file_is_as_none(tmp_path: Path, damage: str) -> None:
    quick_measure(tmp_path)
    (file,) = (tmp_path / "state" / "stowage").glob("machine-*.json")
    assert file.stat().st_mode & 0o777 == 0o600
    file.write_text(file.read_text()[:100] if damage == "cut" else damage)
    assert probe.remembered(tmp_path) is None


def test_a_copied_file_of_another_machine_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "cpu_name", lambda: "mine")
    here = probe.machine_key(tmp_path)
    monkeypatch.setattr(probe, "_file_of", lambda key: tmp_path / "machine.json")
    (tmp_path / "machine.json").write_text(json.dumps(TYPICAL_CPU.to_json() | {"key": here}))
    assert probe.remembered(tmp_path) is not None
    monkeypatch.setattr(probe, "cpu_name", lambda: "yours")
    assert probe.remembered(tmp_path) is None


@pytest.mark.usefixtures("quick")
def test_a_place_that_takes_no_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(DirectoryError, match="no file can be made"):
        quick_measure(tmp_path / "nowhere")


def test_time_spent_waiting_for_a_core_is_told(tmp_path: Path) -> None:
    for thread, line in {"1": "600 100 3", "2": "100 200 9", "3": "", "4": "-"}.items():
        (tmp_path / thread).mkdir()
        (tmp_path / thread / "schedstat").write_text(line + "\n")
    (tmp_path / "5").mkdir()
    assert compute.waited_share(tmp_path) == 0.3
    assert compute.waited_share(tmp_path / "nowhere") == 0.0


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the system counts no waiting")
def test_a_thread_that_shares_its_core_waits() -> None:
    """Two programs on one core: each waits for about half of its time."""
    core = str(min(os.sched_getaffinity(0)))
    code = (
        "import time; from stowage.planner.compute import waited_share; end = time.perf_counter() + 1\n"
        "while time.perf_counter() < end: pass\n"
        "print(waited_share())"
    )
    spinning = "import time; end = time.perf_counter() + 30\nwhile time.perf_counter() < end: pass"
    other = subprocess.Popen(["taskset", "-c", core, sys.executable, "-c", spinning])
    try:
        done = subprocess.run(
            ["taskset", "-c", core, sys.executable, "-c", code], capture_output=True, text=True, check=False
        )
    finally:
        other.kill()
        other.wait()
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) > 0.1


def test_processors_of_one_name_are_told_apart() -> None:
    name = probe.cpu_name()
    assert name and ("cpu family" not in Path("/proc/cpuinfo").read_text() or "family" in name)


def test_a_torch_that_fails_is_told_with_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho first >&2\necho 'no kernel' >&2\nexit 3\n")
    broken.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(broken))
    heard: list[str] = []
    with pytest.raises(StowageError, match="torch could not be measured: no kernel"):
        probe._compute(heard.append, tmp_path)
    assert heard == ["torch", "first", "no kernel"]
    broken.write_text("#!/bin/sh\necho nonsense\n")
    with pytest.raises(StowageError, match="torch could not be measured"):
        probe._compute(heard.append, tmp_path)


@pytest.mark.rare
def test_what_is_measured_of_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, with matrices and models that take no time."""
    small = {"_WIDE": 128, "_WIDE_TOKENS": 8, "_TOKENS": 6, "_ROUNDS": 1, "_LAYERS_MORE": 4, "_PROMPT_MORE": 20}
    for name, value in small.items():
        monkeypatch.setattr(forwards, name, value)
    for name, value in {"_OUT": 64, "_IN": 32, "_UNIT_BYTES": 1 << 14, "_ROUNDS": 1}.items():
        monkeypatch.setattr(weight_speeds, name, value)
    for name, value in {
        "_OUTPUTS": dict.fromkeys(format_speed.ROWS, 128),
        "_BYTES": 2 << 20,
        "_PASS_S": 0.0,
        "_ROUNDS": 2,
    }.items():
        monkeypatch.setattr(format_speed, name, value)
    file = tmp_path / "weights"
    file.write_bytes(bytes(range(256)) * 512)
    for name, value in {
        "_OUT": 64,
        "_IN": 32,
        "_WEIGHTS_BYTES": 1 << 14,
        "_LEAST_S": 0.0,
        "_SPAN_S": 0.0,
        "_ATTENTION": (2, 16, 8),
    }.items():
        monkeypatch.setattr(compute, name, value)
    heard: list[str] = []
    found = compute.measure(heard.append, file)
    assert found["kind"] == ("cuda" if torch.cuda.is_available() else "cpu")
    assert {"bfloat16", "float32"} <= set(found["products"])
    assert all(set(rates) == set(compute.ROWS) and min(rates.values()) > 0 for rates in found["products"].values())
    assert min(*found["attention"].values(), found["layer_s"]) > 0
    if found["kind"] == "cpu":
        besides = ("step_s", "mixture_s", "expert_s", "elements_per_s", "stream_bytes_per_s")
        assert min(found[name] for name in besides) > 0
        assert min(found["sequence_s"], found["logit_s"]) >= 0
        assert set(found["attention_steps"]) == {1, forwards._BATCH}
        assert min(found["attention_steps"].values()) > 0
        assert set(found["formats"]) == set(found["narrow"]) == set(found["products"])
        names = {name for name in FORMATS if name not in PLAIN} | set(FORMS)
        rounded = {name + INT8 for name in names & (kernels.INTEGER_FORMATS | set(FORMS))}
        for dtype, measured in found["formats"].items():
            assert set(found["narrow"][dtype]) == set(measured) | ({dtype} if measured else set())
            assert set(measured) == (names | rounded if kernels.is_built() else set())
            assert all(set(times) == set(format_speed.ROWS) for times in measured.values())
            assert all(times > 0 for rates in measured.values() for times in rates.values())
        assert set(found["overlap_loss"]) == set(weight_speeds.ROWS)
        assert all(0 <= loss <= 1 for loss in found["overlap_loss"].values())
        assert 0 <= found["mapped_byte_s"] < 1e-6
    assert heard[0] == "matrix products in bfloat16"


def test_weights_are_streamed_from_the_disk_and_not_from_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file has just been read through it."""
    for name, value in {"_OUT": 64, "_IN": 32, "_UNIT_BYTES": 1 << 14, "_ROUNDS": 1}.items():
        monkeypatch.setattr(weight_speeds, name, value)
    with storage.written(tmp_path, 1 << 20) as (path, _), contextlib.closing(File.open(path)) as file:
        storage.forget(file.fd)
        if file._cached_bytes(1 << 20, 0) or file.direct < 0:
            pytest.skip("the file system keeps files in memory")
        path.read_bytes()
        assert file._cached_bytes(1 << 20, 0)
        cached: list[int] = []

        def multiply(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
            cached.append(file._cached_bytes(1 << 20, 0))
            return torch.nn.functional.linear(rows, matrix)

        assert weight_speeds.measure(path, multiply)["stream_bytes_per_s"] > 0
        *streamed, _ = cached[: cached.index(1 << 20)] if 1 << 20 in cached else cached
        assert len(streamed) > 64 and not any(streamed)


def test_a_file_that_cannot_be_read_past_the_cache_is_read_through_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno
    import os

    real = os.open

    def refuse(path: object, flags: int, *rest: object, **named: object) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct reads here")
        return real(path, flags, *rest, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refuse)
    with storage.written(tmp_path, SMALL) as (path, _):
        assert path.stat().st_size == SMALL
        assert storage.read_bytes_per_s(path, 4) > 0
    assert list(tmp_path.iterdir()) == []


def test_reads_that_fail_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    def fail(*arguments: object) -> int:
        raise OSError(5, "the disk is gone")

    with storage.written(tmp_path, SMALL) as (path, _):
        monkeypatch.setattr(os, "preadv", fail)
        with pytest.raises(DirectoryError, match="the disk is gone"):
            storage.read_bytes_per_s(path, 4)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_links_of_a_device() -> None:
    into, out = compute.links(torch.device("cuda"), torch.cuda.synchronize)
    assert into > 0
    assert out > 0
