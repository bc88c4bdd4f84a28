"""Codes of 4 bits: fitted to what a layer reads they cost its outputs less, each output alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stowage.errors import CheckpointError
from stowage.weights.quantized import fitting
from stowage.weights.quantized.fitting import Codes, Inputs, fit


def meant(found: Codes, group: int) -> Tensor:
    scales, leasts = (part.float().repeat_interleave(group, dim=1) for part in (found.scales, found.leasts))
    return found.codes * scales + leasts


def read(tokens: int, inputs: int, seed: int = 0) -> Tensor:
    """Inputs that vary together, some of them by much more than others."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(tokens, 16, generator=generator) @ torch.randn(16, inputs, generator=generator)
    return (mixed + torch.randn(tokens, inputs, generator=generator)) * torch.logspace(-1, 1, inputs)


def weights(outputs: int, inputs: int) -> Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("group", [32, 64, 128])
def test_what_a_layer_reads_decides_which_errors_count(group: int) -> None:
    """On rows that it was not fitted to: the error is much smaller, though weights are further from what they were."""
    weight, rows = weights(48, 256), read(2000, 256)
    errors = {}
    for name, inputs in (("alone", None), ("fitted", Inputs.of(rows[:1000]))):
        error = meant(fit(weight, group, inputs), group) - weight
        errors[name] = (error.square().sum(), (rows[1000:] @ error.t()).square().sum())
    assert errors["fitted"][1] < 0.6 * errors["alone"][1]
    assert errors["fitted"][0] > errors["alone"][0]


def test_an_outputs_codes_do_not_depend_on_the_others() -> None:
    weight, inputs = weights(40, 128), Inputs.of(read(500, 128))
    whole = fit(weight, 32, inputs)
    for begin, end in ((0, 17), (17, 40)):
        part = fit(weight[begin:end], 32, inputs)
        assert torch.equal(part.codes, whole.codes[begin:end])
        assert torch.equal(part.scales, whole.scales[begin:end])
        assert torch.equal(part.leasts, whole.leasts[begin:end])


def test_wide_layers_are_fitted_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, rows = weights(24, 320), read(900, 320)
    monkeypatch.setattr(fitting, "INPUTS_TOGETHER", 128)
    found = fit(weight, 64, Inputs.of(rows))
    for begin, end in ((0, 128), (128, 256), (256, 320)):
        part = fit(weight[:, begin:end].contiguous(), 64, Inputs.of(rows[:, begin:end]))
        assert torch.equal(part.codes, found.codes[:, begin:end])
    assert found.scales.shape == (24, 5)


def test_inputs_that_say_nothing_are_left_out() -> None:
    """Layers of experts that no token chose, or an overflow in half precision."""
    assert Inputs.of(torch.zeros(50, 64)) is None
    assert Inputs.of(torch.full((50, 64), float("nan"))) is None
    assert Inputs.of(torch.full((50, 64), 1e30)) is None
    few = Inputs.of(read(3, 64))
    assert few is not None, "fewer tokens than inputs"
    error = meant(fit(weights(16, 64), 32, few), 32) - weights(16, 64)
    assert bool(torch.isfinite(error).all())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e38])
def test_weights_that_have_no_scale_are_refused(bad: float) -> None:
    weight = weights(16, 64)
    weight[3, 5] = bad
    for inputs in (None, Inputs.of(read(200, 64))):
        with pytest.raises(CheckpointError, match="cannot be packed"):
            fit(weight, 32, inputs)
