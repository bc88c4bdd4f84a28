"""docs/weights.md: its example runs as it is written, and the command does what it says."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import stowage
from stowage.cli.app import app
from stowage.testing import tiny_models

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "weights.md").read_text()


def test_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    tiny_models.write("llama", tmp_path / "tiny")
    program, *_ = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert program == (DOCS / "examples" / "offloaded.py").read_text()
    importlib.import_module("docs.examples.offloaded")
    said = re.search(r"(\d+) bytes in memory, (\d+) read for every step", capsys.readouterr().out)
    assert said is not None
    assert int(said[1]) <= 500 << 10
    assert int(said[2]) > 0


@pytest.mark.rare
def test_an_adapter_is_trained_by_the_trainer_as_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit: the same program, with all weights in memory."""
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    tiny_models.write("llama", tmp_path / "tiny")
    program = (DOCS / "examples" / "lora_training.py").read_text()
    assert program in re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    before = torch.get_rng_state()
    found: list[dict[str, torch.Tensor]] = []
    for load in (stowage.offload, lambda name, **_: AutoModelForCausalLM.from_pretrained(name)):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(stowage, "offload", load)
            torch.manual_seed(0)
            sys.modules.pop("docs.examples.lora_training", None)
            importlib.import_module("docs.examples.lora_training")
        found.append(load_file(tmp_path / "my-lora" / "adapter_model.safetensors"))
    torch.set_rng_state(before)
    ours, whole = found
    assert ours.keys() == whole.keys() and all(torch.equal(ours[name], whole[name]) for name in whole)
    assert any(bool(ours[name].any()) for name in ours if "lora_B" in name), "it has learned something"


def test_the_command_answers_the_same(checkpoints: Callable[..., Path]) -> None:
    asked = [
        "run",
        str(checkpoints("mixtral")),
        "--prompt",
        "hello",
        "--max-new-tokens",
        "8",
        "--kv-cache-memory",
        "1MiB",
    ]
    asked += ["--max-num-batched-tokens", "64", "--max-num-seqs", "2"]
    runner = CliRunner()
    whole = runner.invoke(app, asked)
    placed = runner.invoke(app, [*asked, "--device-memory", "2500KiB"])
    ruled = runner.invoke(app, [*asked, "--weights", "lm_head=resident,last 1 of 2=resident,model.layers.*=stream"])
    assert whole.exit_code == placed.exit_code == ruled.exit_code == 0, placed.output
    assert whole.stdout == placed.stdout == ruled.stdout
    small = runner.invoke(app, [*asked, "--device-memory", "1700KiB"])
    assert small.exit_code == 2
    assert "at least" in small.stderr


def test_the_model_that_is_larger_than_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.undo()
    tiny_models.write("llama", tmp_path / "tiny")
    importlib.import_module("docs.examples.larger_than_memory").main(str(tmp_path / "tiny"), "0.7")
    said = capsys.readouterr().out
    found = re.search(r"(\d+) bytes of weights, (\d+) of them in memory", said)
    assert found is not None and int(found[2]) <= 0.7 * int(found[1])
    assert "the same answer: True" in said
