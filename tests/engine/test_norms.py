"""Norms by the kernel: only where they are the same computation, and a row's bits are its own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stowage.executor import kernels
from stowage.executor.batch import ForwardStep, current
from stowage.executor.fused import norms
from tests.native import needs_native

pytestmark = needs_native


def _class(rounded: bool, more: float, name: str = "SomeRMSNorm"):
    class Norm(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(width, generator=torch.Generator().manual_seed(1)))
            self.eps = 1e-6

        def forward(self, x):
            wide = x.float()
            scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
            if rounded:
                return self.weight * scaled.to(x.dtype)
            return (scaled * (self.weight.float() + more)).to(x.dtype)

    Norm.__name__ = name
    return Norm


class Centred(_class(True, 0.0)):
    """Not a root mean square norm, whatever its name says."""

    def forward(self, x):
        return super().forward(x - x.mean(-1, keepdim=True))


@pytest.fixture
def forward():
    """As in an engine's forward."""
    nothing = torch.zeros(0, dtype=torch.long)
    token = current.set(ForwardStep(nothing, nothing, nothing, 0))
    yield
    current.reset(token)


def close(found, expected) -> bool:
    if found.dtype is torch.float32:
        return torch.allclose(found, expected, rtol=1e-6, atol=0)
    rare = (found != expected).double().mean() < 1e-3
    return bool(rare) and torch.allclose(found, expected, rtol=2**-6, atol=0)


@pytest.mark.parametrize("dtype", kernels.DTYPES)
@pytest.mark.parametrize("width", [5, 64, 1030])
@pytest.mark.parametrize(("rounded", "more"), [(True, 0.0), (False, 0.0), (False, 1.0)])
@torch.inference_mode()
def test_every_way_is_found_and_right(rounded, more, width, dtype, forward):
    model = nn.Sequential(_class(rounded, more)(width).to(dtype))
    x = torch.randn(37, 3, 4, width, generator=torch.Generator().manual_seed(2)).to(dtype)
    expected = model(x)
    norms.install(model, fused=True)
    assert isinstance(model[0].forward, norms._Norm)
    found = model(x)
    assert found.dtype is dtype and close(found, expected)
    assert torch.equal(model(x[7:9]), found[7:9]) and torch.equal(model(x[5, 1]), found[5, 1])
    turned = x.transpose(1, 2)
    assert torch.equal(model(turned), found.transpose(1, 2)) and model(turned).stride() == turned.stride()
    for rows in (37, 1):  # a part of each row, as latents are; the kernel's also where a single row is in one piece
        part = torch.cat((x[:rows, :1], x[:rows, :1]), -1)[..., :width]
        assert torch.equal(model(part), found[:rows, :1])
    norms.uninstall(model)
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("dtype", kernels.DTYPES)
@torch.inference_mode()
def test_what_computes_something_else_keeps_its_own(dtype, forward):
    two = _class(True, 0.0)(64)
    two.other = nn.Parameter(torch.ones(1))
    model = nn.Sequential(Centred(64), _class(False, 2.0)(64), _class(True, 0.0, "LayerNorm")(64), two).to(dtype)
    x = torch.randn(3, 64).to(dtype)
    expected = model(x)
    norms.install(model, fused=True)
    assert torch.equal(model(x), expected)
    norms.uninstall(model)


@torch.inference_mode()
def test_engines_share_a_model_and_outside_of_them_it_computes_as_ever(monkeypatch):
    model = nn.Sequential(_class(True, 0.0)(64))
    x = torch.randn(3, 64)
    expected = model(x)
    norms.install(model, fused=True)
    norms.install(model, fused=True)
    norms.uninstall(model)
    assert "forward" in model[0].__dict__, "another engine still has it"
    monkeypatch.setattr(kernels, "norm", None)
    assert torch.equal(model(x), expected)
    norms.uninstall(model)
    assert "forward" not in model[0].__dict__


class SomeRMSNormGated(nn.Module):
    """Falcon-H1's: the dimension of tokens is gone where there is one."""

    def __init__(self, squeezes: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(16))
        self.squeezes = squeezes

    def forward(self, hidden_states, gate=None):
        x = hidden_states * torch.rsqrt(hidden_states.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
        x = x.squeeze(1) if self.squeezes else x
        return x * gate


@torch.inference_mode()
def test_a_gated_norm_that_mixes_sequences_up_norms_each_by_itself(forward):
    own = SomeRMSNormGated(squeezes=False)
    model = nn.ModuleList([SomeRMSNormGated(squeezes=True), own])
    model[0].weight.copy_(own.weight)
    x, gate = torch.randn(3, 1, 16), torch.randn(3, 1, 16)
    assert model[0](x, gate).shape == (3, 3, 16)
    for fused in (True, False):
        norms.install(model, fused=fused)
        assert torch.equal(model[0](x, gate), own(x, gate)) and torch.equal(model[0](x[:1], gate[:1]), own(x, gate)[:1])
        assert "forward" not in own.__dict__, "it is none"
        norms.uninstall(model)
        assert model[0](x, gate).shape == (3, 3, 16)
