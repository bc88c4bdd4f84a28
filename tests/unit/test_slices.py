"""Products of so many rows at a time, and which others are seen."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stowage.executor.determinism.slices import RowSlices

X, W, B = torch.randn(1, 70, 8), torch.randn(5, 8), torch.randn(5)


def test_each_slice_is_a_product_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []
    linear = F.linear

    def noted(input: Tensor, *rest: Tensor) -> Tensor:
        shapes.append(tuple(input.shape))
        return linear(input, *rest)

    mode = RowSlices(32)
    with mode:
        function = F.linear
        monkeypatch.setattr(F, "linear", noted)
        mode._linear(X, W, B)
        monkeypatch.undo()
        found = function(X, W, B)
        assert function(X[:, :32], W).shape == (1, 32, 5)
    assert shapes == [(32, 8), (32, 8), (6, 8)]
    expected = torch.cat([linear(part, W, B) for part in X[0].split(32)])[None]
    assert torch.equal(found, expected) and not mode.others


@pytest.mark.parametrize(
    ("product", "seen"),
    [
        (lambda: X @ W.T, True),
        (lambda: torch.addmm(B, X[0], W.T), True),
        (lambda: torch.einsum("bik,ok->bio", X, W), True),
        (lambda: torch.matmul(X, torch.ones(8)), True),
        (lambda: X[0, :, :1] @ torch.ones(1, 4), False),
        (lambda: torch.sin(X) * 2, False),
    ],
)
def test_other_products_are_seen(product: Callable[[], Tensor], seen: bool) -> None:
    mode = RowSlices(32)
    with mode:
        found = product()
    assert torch.equal(found, product()) and mode.others is seen
