"""``--metrics-file``, ``--log-format``, ``--log-level``: what machines read while a command runs."""

import json
import resource
import threading
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from stowage.cli import metrics_file
from stowage.cli.metrics_file import kept_up
from tests.cli.conftest import Stowage

PROMPT = "What lies at the bottom of the hold must not be needed first, and nothing may shift at sea. " * 3


def until(condition: object) -> None:
    until_s = time.monotonic() + 30
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < until_s
        time.sleep(0.002)


def test_run_leaves_its_metrics_in_a_file(call: Stowage, tiny_llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "stowage.prom"
    result = call(
        "run", tiny_llama, "--raw", "--prompt", PROMPT, "--max-new-tokens", "3", "--metrics-file", path, "--json"
    )
    assert result.exit_code == 0
    prompt_tokens = json.loads(result.stdout)["prompt_tokens"]
    families = {family.name: family for family in text_string_to_metric_families(path.read_text())}
    assert families["stowage_tokens_computed"].samples[0].value == prompt_tokens + 2
    assert [item.name for item in tmp_path.iterdir() if item.name.startswith(".")] == [], "no draft is left"


def test_a_metrics_file_that_cannot_be_written_stops_the_start(call: Stowage, tiny_llama: Path, tmp_path: Path) -> None:
    result = call("run", tiny_llama, "--raw", "--prompt", "x", "--metrics-file", tmp_path / "nowhere" / "stowage.prom")
    assert result.exit_code == 2 and "cannot be written" in result.stderr


def test_the_file_is_kept_up_and_always_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_file, "WRITE_EVERY_S", 0.001)
    path = tmp_path / "m.prom"
    number = iter(range(1 << 30))
    seen = set()
    with kept_up(path, lambda: f"{next(number)}\n" * 5000):
        until(lambda: seen.add(path.read_text()) or len(seen) > 20)
    assert all(len(set(text.splitlines())) == 1 and text.count("\n") == 5000 for text in seen)
    last = next(number) - 1
    assert path.read_text().startswith(f"{last}\n"), "the last state is written at the end"


def test_a_disk_that_fails_later_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(metrics_file, "WRITE_EVERY_S", 0.001)
    (tmp_path / "here").mkdir()
    path = tmp_path / "here" / "m.prom"
    asked = threading.Semaphore(0)
    with kept_up(path, lambda: asked.release() or "text"):  # type: ignore[func-returns-value]
        path.parent.rename(tmp_path / "away")
        for _ in range(20):
            assert asked.acquire(timeout=30)
    assert capsys.readouterr().err.count("cannot be written any more") == 1


def test_no_file_no_thread() -> None:
    before = threading.active_count()
    with kept_up(None, lambda: 1 / 0):  # type: ignore[arg-type, return-value]
        assert threading.active_count() == before


@pytest.mark.parametrize("flags", [["--log-format", "json"], []])
def test_trouble_is_told_as_json_lines_on_stderr(
    call: Stowage, tiny_llama: Path, tmp_path: Path, flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [
        "run",
        tiny_llama,
        "--raw",
        "--prompt",
        PROMPT,
        "--max-new-tokens",
        "2",
        "--kv-cache-memory",
        "8MiB",
        "--json",
    ]
    command += ["--host-memory", "8MiB", "--disk", f"{tmp_path / 'c'}:32MiB"]
    assert call(*command).exit_code == 0
    (segment,) = (tmp_path / "c").glob("*.seg")
    with segment.open("r+b") as file:
        file.write(b"rubbish")
    if not flags:
        monkeypatch.setenv("STOWAGE_LOG_FORMAT", "json")
    done = call(*command, *flags)
    assert done.exit_code == 0 and json.loads(done.stdout)["reused_tokens"]["disk"] == 0
    (line,) = [json.loads(text) for text in done.stderr.splitlines() if text.startswith("{")]
    assert (line["level"], line["logger"], line["event"]) == ("warning", "stowage.disk", "damaged_segments")
    assert line["segment"] == segment.name
    silent = call(*command, *flags, "--log-level", "error")
    assert silent.exit_code == 0 and "damaged_segments" not in silent.stderr


@pytest.mark.parametrize(("flag", "value"), [("--log-level", "loud"), ("--log-format", "xml")])
def test_wrong_words_are_refused_at_once(call: Stowage, flag: str, value: str) -> None:
    result = call("config", "show", flag, value)
    assert result.exit_code == 2 and value in result.stderr and "must be one of" in result.stderr


def test_a_disk_without_room_for_a_tiny_model_is_told_and_nothing_is_left(call: Stowage, tmp_path: Path) -> None:
    """Files of 100 kB and more stand for it: safetensors has an error of its own for what it cannot write."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        done = call("tiny", "llama", tmp_path / "tiny")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert done.exit_code == 2, done.exception
    assert "File too large" in done.stderr and "Give a directory" in done.stderr
    assert list(tmp_path.iterdir()) == []
