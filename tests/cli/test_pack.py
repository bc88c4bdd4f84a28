"""``stowage pack`` on a real, tiny model: what it writes is run like any other, and what it costs is printed."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from stowage.demo import corpus
from stowage.evaluation import calibration, perplexity
from stowage.evaluation import pack as packing
from stowage.weights.quantized import writer
from tests.cli.conftest import SOURCE, Stowage, invoke, own_log

KEYS = {
    "directory",
    "weights",
    "group",
    "bytes_before",
    "bytes_after",
    "tensors",
    "packed_weights",
    "kept",
    "bits",
    "perplexity",
}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What is told of the demo's model in each form, which lies in the directory that is named there."""
    found, path = {}, tmp_path_factory.mktemp("packed")
    with own_log(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "_WINDOWS", 4)  # of text that is read: a quarter says as much of so small a model
        for form in ("int8", "int4", "q4_k", "mxfp4", "mixed"):
            asked = ["--weights", form, "--eval-tokens", "600", "--json"]
            done = invoke("pack", corpus.model_path(), path / form, *asked)
            assert done.exit_code == 0, done.output
            found[form] = json.loads(done.stdout)
    return found


@pytest.mark.rare
@pytest.mark.slow
def test_a_packed_model_is_run_and_its_perplexity_is_told(call: Stowage, told: dict[str, dict[str, Any]]) -> None:
    """The demo's model knows English, so that errors in its weights can be seen: more in 4 bits, few in both."""
    for one in told.values():
        assert one.keys() == KEYS
        assert one["perplexity"]["tokens"] == 598
    int8, int4 = told["int8"]["perplexity"], told["int4"]["perplexity"]
    assert int8["before"] == int4["before"]
    grown = [abs(one["after"] / one["before"] - 1) for one in (int8, int4)]  # so few tokens may find errors to be luck
    assert 0 < grown[0] < 0.0005 < grown[1] < 0.01
    assert told["int4"]["bytes_after"] < told["int8"]["bytes_after"] < told["int8"]["bytes_before"]
    answered = call(
        "run", told["int8"]["directory"], "--prompt", "hello", "--max-new-tokens", "4", "--kv-cache-memory", "2MiB"
    )
    assert answered.exit_code == 0
    assert answered.stdout.strip()


@pytest.mark.rare
@pytest.mark.slow
def test_formats_of_gguf_files_are_written_and_what_they_cost_is_told(
    call: Stowage, told: dict[str, dict[str, Any]]
) -> None:
    lost = {form: one["perplexity"]["after"] / one["perplexity"]["before"] - 1 for form, one in told.items()}
    assert abs(lost["q4_k"]) < 0.01
    assert lost["q4_k"] < lost["mxfp4"] < 0.03
    assert told["mxfp4"]["bits"] == 4.25
    assert "mxfp4_block" in told["mxfp4"]["tensors"]
    plan = call("plan", told["mxfp4"]["directory"], "--machine", "typical-cpu", "--json")
    assert plan.exit_code == 0, plan.output


@pytest.mark.rare
@pytest.mark.slow
def test_a_mixed_checkpoint_loses_less_than_4_bits_and_is_one_wherever_it_lies(
    call: Stowage, told: dict[str, dict[str, Any]]
) -> None:
    mixed = told["mixed"]
    assert 4.9 < mixed["bits"] <= 5.0
    assert len(mixed["tensors"]) > len(told["int4"]["tensors"])
    before, after = mixed["perplexity"]["before"], mixed["perplexity"]["after"]
    assert abs(after / before - 1) < abs(told["int4"]["perplexity"]["after"] / before - 1) + 0.001
    said = []
    for rules in ("auto", "*=stream"):
        asked = ["--prompt", "hello", "--max-new-tokens", "9", "--kv-cache-memory", "2MiB", "--weights", rules]
        said.append(call("run", mixed["directory"], *asked).stdout)
    assert said[0] == said[1]
    assert said[0].strip()


@pytest.mark.parametrize("bits", ["3", "0", "nan"])
def test_too_few_bits_are_said_before_anything_is_scored_or_written(
    bits: str, call: Stowage, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(perplexity, "measure", lambda *_: pytest.fail("that takes minutes"))
    done = call("pack", tiny_llama, tmp_path / "packed", "--weights", "mixed", "--bits", bits)
    assert done.exit_code == 2
    assert f"--bits {bits} is less than" in done.stderr
    assert not (tmp_path / "packed").exists()


def test_text_of_ones_own_and_none(call: Stowage, tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("The hold is full, and what is needed first lies on top. " * 9)
    done = call(
        "pack",
        tiny_llama,
        tmp_path / "a",
        "--eval",
        tmp_path / "text",
        "--eval-tokens",
        "64",
        "--kv-cache-memory",
        "2MiB",
    )
    assert done.exit_code == 2, "no setting of its own"
    done = call("pack", tiny_llama, tmp_path / "a", "--eval", tmp_path / "text", "--eval-tokens", "64")
    assert done.exit_code == 0, done.output
    assert "perplexity" in done.stdout
    assert "63 tokens of" in done.stderr
    again = call("pack", tiny_llama, tmp_path / "a")
    assert again.exit_code == 2
    assert "nothing is overwritten" in again.stderr
    unread = call("pack", tiny_llama, tmp_path / "b", "--eval", tmp_path / "absent")
    assert unread.exit_code == 2
    assert "plain text" in unread.stderr
    assert not (tmp_path / "b").exists()
    mute = shutil.copytree(tiny_llama, tmp_path / "mute", ignore=shutil.ignore_patterns("tokenizer*", "*.jinja"))
    refused = call("pack", mute, tmp_path / "d", "--eval", tmp_path / "text")
    assert refused.exit_code == 2
    assert "no tokenizer" in refused.stderr
    assert not (tmp_path / "d").exists(), "said before anything is written"
    done = call("pack", mute, tmp_path / "d")
    assert done.exit_code == 0
    assert "not measured" in done.stderr
    assert (
        json.loads(call("pack", tiny_llama, tmp_path / "c", "--eval-tokens", "0", "--json").stdout)["perplexity"]
        is None
    )


def test_what_cannot_be_scored_is_said_before_anything_is_packed(
    call: Stowage, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packing a large model takes hours."""
    (text := tmp_path / "text").write_text("a")
    monkeypatch.setattr(packing, "pack", lambda *_: pytest.fail("packed"))
    for asked, why in ((("--eval", text), "too short"), (("--eval-tokens", "1"), "scores nothing")):
        done = call("pack", tiny_llama, tmp_path / "out", *asked)
        assert done.exit_code == 2
        assert why in done.stderr
        assert "--eval-tokens" in done.stderr


def test_a_budget_that_cannot_be_scored_under_is_told_before_anything_is_packed(
    call: Stowage, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "write", lambda *_: pytest.fail("packed"))
    done = call("pack", tiny_llama, tmp_path / "out", "--device-memory", "100KiB")
    assert done.exit_code == 2
    assert "give --device-memory at least" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_what_is_much_worse_or_was_not_scored_has_no_name(
    call: Stowage, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever looks while it is scored, or after a kill then, finds no checkpoint of that name."""
    out, text = tmp_path / "out", tmp_path / "text"
    for after, stays in ((20.9, True), (21.1, False), (float("nan"), False)):
        seen = []

        def scored(model: str, *_: Any, after: float = after, seen: list[bool] = seen) -> tuple[float, int]:
            seen.append(out.exists() or not (Path(model) / "config.json").exists())
            return 20.0 if model == str(tiny_llama) else after, 100

        monkeypatch.setattr(perplexity, "measure", scored)
        done = call("pack", tiny_llama, out)
        assert seen == [False, False]
        assert (done.exit_code == 0, out.exists()) == (stays, stays), done.output
        assert stays or "--force" in done.stderr
        forced = call("pack", tiny_llama, tmp_path / "forced", "--force")
        assert forced.exit_code == 0, forced.output
        for made in (out, tmp_path / "forced"):
            shutil.rmtree(made, ignore_errors=True)
    monkeypatch.undo()
    text.write_text("a")
    done = call("pack", tiny_llama, out, "--eval", text)
    assert "too short" in done.stderr
    assert done.exit_code != 0
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


@pytest.mark.rare
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)])
def test_a_process_that_is_told_to_end_leaves_nothing(
    number: int, status: int, tiny_llama: Path, tmp_path: Path
) -> None:
    """Neither half a checkpoint of what may be many gigabytes, nor a traceback."""
    own = tmp_path / "own"
    own.mkdir()
    arguments = ["pack", str(tiny_llama), str(own / "out"), "--weights", "int4"]
    environment = {"PYTHONPATH": str(SOURCE), "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    packing = subprocess.Popen(
        [sys.executable, "-c", "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
         "from stowage.cli import run_and_exit; run_and_exit()", *arguments],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    until_s = time.monotonic() + 120
    while not (own / "out.part").exists():
        assert packing.poll() is None and time.monotonic() < until_s
        time.sleep(0.01)
    packing.send_signal(number)
    printed = "".join(packing.communicate(timeout=120))
    assert packing.returncode == status
    assert list(own.iterdir()) == []
    assert "Traceback" not in printed
