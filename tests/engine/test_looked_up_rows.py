"""Embeddings in programs: the rows of token ids, and an error for a token that the embedding does not have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn import Parameter

from stowage.executor import kernels
from stowage.weights.quantized.blocks import BlockMatrix
from tests.block_formats import SPECS, parts_of
from tests.engine.test_programs import left, replays, usual
from tests.native import needs_native

pytestmark = needs_native


@pytest.mark.parametrize("dtype", kernels.DTYPES)
@pytest.mark.parametrize("name", ["", "q4_0", "q6_k"])
def test_rows_of_token_ids(name: str, dtype: torch.dtype, instructions: str) -> None:
    spec = replace(next(spec for spec in SPECS if spec.name == (name or "q8_0")), outputs=50, inputs=512)
    table: Any = BlockMatrix(spec, parts_of(spec, seed=3), dtype)
    if not name:  # rows of a wider tensor
        table = Parameter(usual(50, 600, seed=3, dtype=dtype)[:, 40:552], requires_grad=False)
    calls = replays(lambda ids: F.embedding(ids, table) * 2, torch.tensor([[3], [49], [0]]), kept=[table] * (not name))
    assert not left(calls)
    for wrong in (50, -1, 1 << 60):
        with pytest.raises(IndexError, match="does not have"):
            calls.replay((torch.tensor([[1], [wrong], [2]]),))
