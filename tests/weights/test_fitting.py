"""Codes of few bits: fitted to what a layer reads they cost its outputs less, each output alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stowage.errors import CheckpointError
from stowage.weights.quantized import fitting
from stowage.weights.quantized.fitting import Codes, Inputs, errors, fit
from stowage.weights.quantized.grids import GRIDS, Grid

GRID = GRIDS["int4_32"]


def meant(found: Codes, grid: Grid) -> Tensor:
    scales, leasts = (part.repeat_interleave(grid.group, dim=1) for part in (found.scales.scales, found.scales.leasts))
    return grid.meant(found.codes.float(), scales, leasts)


def read(tokens: int, inputs: int, seed: int = 0) -> Tensor:
    """Inputs that vary together, some of them by much more than others."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(tokens, 16, generator=generator) @ torch.randn(16, inputs, generator=generator)
    return (mixed + torch.randn(tokens, inputs, generator=generator)) * torch.logspace(-1, 1, inputs)


def weights(outputs: int, inputs: int) -> Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", GRIDS)
def test_what_a_layer_reads_decides_which_errors_count(name: str) -> None:
    """On rows that it was not fitted to: the error is much smaller, though weights are further from what they were."""
    weight, rows, grid = weights(48, 256), read(2000, 256), GRIDS[name]
    costs = {}
    for how, inputs in (("alone", None), ("fitted", Inputs.of(rows[:1000]))):
        error = meant(fit(weight, grid, inputs), grid) - weight
        costs[how] = (error.square().sum(), (rows[1000:] @ error.t()).square().sum())
    assert costs["fitted"][1] < 0.6 * costs["alone"][1]
    assert costs["fitted"][0] > costs["alone"][0]


@pytest.mark.parametrize("name", GRIDS)
def test_an_outputs_codes_do_not_depend_on_the_others(name: str) -> None:
    weight, inputs, grid = weights(40, 256), Inputs.of(read(500, 256)), GRIDS[name]
    whole = fit(weight, grid, inputs)
    for begin, end in ((0, 17), (17, 40)):
        part = fit(weight[begin:end], grid, inputs)
        assert torch.equal(part.codes, whole.codes[begin:end])
        for kept in ("scales", "leasts", "shared"):
            assert torch.equal(getattr(part.scales, kept), getattr(whole.scales, kept)[begin:end])


@pytest.mark.parametrize("name", GRIDS)
def test_what_an_error_costs_is_told(name: str) -> None:
    """Where an input counts as much as it is read, and varies with no other."""
    weight, counts, grid = weights(16, 256), torch.logspace(-1, 1, 256), GRIDS[name]
    found = meant(fit(weight, grid), grid) - weight
    assert torch.allclose(errors(weight, grid, torch.ones(256)), found.square().sum(dim=1), rtol=1e-4)
    assert errors(weight, grid, counts).sum() <= 1.0001 * (found.square() * counts).sum(), (
        "it was rounded for what counts"
    )


def test_wide_layers_are_fitted_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, rows = weights(24, 320), read(900, 320)
    monkeypatch.setattr(fitting, "INPUTS_TOGETHER", 128)
    grid = GRIDS["int4_64"]
    found = fit(weight, grid, Inputs.of(rows))
    for begin, end in ((0, 128), (128, 256), (256, 320)):
        part = fit(weight[:, begin:end].contiguous(), grid, Inputs.of(rows[:, begin:end]))
        assert torch.equal(part.codes, found.codes[:, begin:end])
    assert found.scales.scales.shape == (24, 5)


def test_inputs_that_say_nothing_are_left_out() -> None:
    """Layers of experts that no token chose, or an overflow in half precision."""
    assert Inputs.of(torch.zeros(50, 64)) is None
    assert Inputs.of(torch.full((50, 64), float("nan"))) is None
    assert Inputs.of(torch.full((50, 64), 1e30)) is None
    few = Inputs.of(read(3, 64))
    assert few is not None, "fewer tokens than inputs"
    error = meant(fit(weights(16, 64), GRID, few), GRID) - weights(16, 64)
    assert bool(torch.isfinite(error).all())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e38])
def test_weights_that_have_no_scale_are_refused(bad: float) -> None:
    weight = weights(16, 64)
    weight[3, 5] = bad
    for inputs in (None, Inputs.of(read(200, 64))):
        with pytest.raises(CheckpointError, match="cannot be packed"):
            fit(weight, GRID, inputs)
