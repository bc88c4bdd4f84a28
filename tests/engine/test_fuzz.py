"""The parity fuzzer: it passes where the engine is right, and finds what is wrong."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from stowage.executor import kernels
from stowage.testing.fuzz.__main__ import main
from stowage.testing.fuzz.case import Mismatch, draw, run
from stowage.transfer.cpu import CpuTransfer

FAMILIES = ["llama", "gemma3", "qwen3_next"]


def test_cases_are_played_again() -> None:
    assert str(draw(7)) == str(draw(7)) != str(draw(8))


@pytest.mark.slow
def test_nothing_differs(tmp_path: Path) -> None:
    total = 0
    for seed in range(4):
        outcome = run(draw(seed, FAMILIES), tmp_path / str(seed))
        assert not outcome.inexact
        total += outcome.reused_tokens
    assert total > 1000


@pytest.mark.slow
def test_capped_scores_are_compared_with_capped_ones(tmp_path: Path) -> None:
    """torch's own attention, which Transformers takes by itself, leaves the cap out."""
    outcome = run(draw(93), tmp_path)
    assert outcome.beside_transformers


def flipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit of what is loaded."""
    whole = CpuTransfer.load

    def load(self: CpuTransfer, plan: Any, storage: Any) -> None:
        whole(self, plan, storage)
        storage[plan.blocks[0], 0] ^= 1 << 6

    monkeypatch.setattr(CpuTransfer, "load", load)


def neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product of many rows that is not that of few."""
    honest = kernels.linear_of

    def linear_of(x: Tensor, matrix: kernels.Matrix, bias: Tensor | None = None) -> Tensor:
        out = honest(x, matrix, bias)
        return out * 1.01 if out.numel() // out.shape[-1] > 100 else out

    monkeypatch.setattr(kernels, "linear_of", linear_of)


@pytest.mark.parametrize("plant", [flipped, neighbours])
def test_what_is_planted_is_found(plant: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(Mismatch, match="seed"):
        for seed in range(8):
            run(draw(seed, FAMILIES), tmp_path / str(seed))


@pytest.mark.rare
def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    level = logging.getLogger("stowage").level
    assert main(["--seed", "3", "--cases", "1", "--family", "llama"]) == 0
    assert logging.getLogger("stowage").level == level, "what comes next is logged again"
    assert "1 cases: " in capsys.readouterr().out
    flipped(monkeypatch)
    assert main(["--seed", "0", "--cases", "6", "--family", "llama"]) == 1
    assert "Again: python -m stowage.testing.fuzz --seed" in capsys.readouterr().out
