"""Tiny checkpoints, and plain Transformers as what every budget is held against: to the last bit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from stowage.testing import tiny_models
from stowage.weights import grouping


@pytest.fixture(autouse=True)
def _tiny_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units of tiny models are worth delivering too."""
    monkeypatch.setattr(grouping, "SMALL_BYTES", 256)
    monkeypatch.setattr(grouping, "LEAF_BYTES", 1024)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    root = tmp_path_factory.mktemp("checkpoints")

    @functools.cache
    def checkpoint(family: str) -> Path:
        return tiny_models.write(family, root / family)

    return checkpoint


@pytest.fixture(scope="session")
def plain(checkpoints: Callable[..., Path]) -> Callable[..., Any]:
    """The model as Transformers loads it."""

    @functools.cache
    def model(family: str, dtype: str = "auto") -> Any:
        return AutoModelForCausalLM.from_pretrained(checkpoints(family), dtype=dtype).eval()

    return model


def prompt(length: int = 20, seed: int = 0) -> Tensor:
    return torch.randint(5, 500, (1, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model: Any, ids: Tensor) -> Tensor:
    out: Tensor = model(input_ids=ids, use_cache=False).logits
    return out


def bytes_of(model: Any) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())
