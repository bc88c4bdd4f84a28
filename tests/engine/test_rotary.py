"""Rotary embeddings by the kernel: to the bit what Transformers computes, and only what is known."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama import modeling_llama

from stowage.executor import kernels
from stowage.executor.fused import recurrent_layers, rotary
from tests.native import needs_native

pytestmark = needs_native
OWN = modeling_llama.apply_rotary_pos_emb
MANY = 101


def given(tokens: int, width: int, dtype: torch.dtype, heads: int = 4) -> tuple[Tensor, ...]:
    """Queries, keys, cosines and sines as attention has them; keys are every other token of what they lie in."""
    generator = torch.Generator().manual_seed(tokens * width)
    sizes = (tokens, heads, width), (2 * tokens, 2, width), (tokens, width), (tokens, width)
    q, k, cos, sin = ((torch.randn(1, *size, generator=generator) * 3).to(dtype) for size in sizes)
    return q.transpose(1, 2), k[:, ::2].transpose(1, 2), cos, sin


def same(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    kind = torch.int16 if found[0].dtype is torch.bfloat16 else torch.int32
    return all(
        bool(((a.view(kind) == b.view(kind)) | (a.isnan() & b.isnan())).all())
        for a, b in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("dtype", kernels.DTYPES)
@pytest.mark.parametrize("width", [2, 6, 32, 34, 64, 80, 128, 256])
@torch.inference_mode()
def test_it_is_what_transformers_computes(width, dtype, instructions):
    for tokens in (1, 16, 100):
        q, k, cos, sin = given(tokens, width, dtype)
        expected = OWN(q, k, cos, sin)
        found = rotary.rotated(q, k, cos, sin)
        assert same(found, expected)
        assert all(
            a.shape == b.shape and a.transpose(1, 2).is_contiguous() for a, b in zip(found, expected, strict=True)
        )
        q, k = q.contiguous(), torch.stack((k, k), -1)[..., 0]  # heads before tokens; numbers that lie apart
        assert same(rotary.rotated(q, k, cos[:, :, :], sin), expected)


@pytest.mark.parametrize("dtype", kernels.DTYPES)
@torch.inference_mode()
def test_numbers_that_are_none_tiny_or_infinite(dtype, instructions):
    q, k, cos, sin = given(40, 64, dtype)
    strange = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e-40, -3e-39, 3.3e38, 0.0, -0.0]).to(dtype)
    for at, x in enumerate((q, k, cos, sin)):
        x[..., 3 + at :: 11] = strange[torch.arange(x[..., 3 + at :: 11].numel()) % 8].view(x[..., 3 + at :: 11].shape)
    assert same(rotary.rotated(q, k, cos, sin), OWN(q, k, cos, sin))


class Layer(nn.Module):
    """Of Llama's module, in which the function is."""


Layer.__module__ = modeling_llama.__name__


@torch.inference_mode()
def test_steps_call_it_and_nothing_else_does(forward, monkeypatch):
    before = modeling_llama.apply_rotary_pos_emb  # ours, where another test's engine lives still
    recurrent_layers.install(Layer())
    ours = modeling_llama.apply_rotary_pos_emb
    assert ours is not OWN and ours.__wrapped__ is OWN
    called: list[int] = []
    rotate = rotary.rotated
    monkeypatch.setattr(rotary, "rotated", lambda *args: (called.append(args[0].shape[2]), rotate(*args))[1])
    try:
        for tokens, decodes in ((MANY, 0), (2, 0), (1, 1), (MANY, MANY), (MANY, 5)):
            forward.decodes = decodes
            args = given(tokens, 64, torch.bfloat16)
            assert same(ours(*args), OWN(*args)) and called == [tokens]
            called.clear()
        q, k, cos, sin = given(MANY, 64, torch.bfloat16)
        turned = q.transpose(1, 2), k.transpose(1, 2)
        assert same(ours(*turned, cos, sin, unsqueeze_dim=2), OWN(*turned, cos, sin, unsqueeze_dim=2))
        wide = cos.float(), sin.float()
        assert same(ours(q, k, *wide), OWN(q, k, *wide))
        two = q.expand(2, -1, -1, -1)
        assert same(ours(two, k, cos, sin), OWN(two, k, cos, sin))
        forward.kernels = False
        assert same(ours(q, k, cos, sin), OWN(q, k, cos, sin))
        assert not called
    finally:
        recurrent_layers.uninstall(Layer())
    assert modeling_llama.apply_rotary_pos_emb is before


def test_functions_of_the_same_name_that_compute_something_else_are_left_alone(monkeypatch):
    module = type(sys)("neighbouring")

    def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
        """Neighbours are turned, not halves."""
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return tuple(x * cos + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * sin for x in (q, k))

    module.apply_rotary_pos_emb = apply_rotary_pos_emb
    monkeypatch.setitem(sys.modules, module.__name__, module)
    layer = type("Other", (nn.Module,), {"__module__": module.__name__})()
    recurrent_layers.install(layer)
    assert module.apply_rotary_pos_emb is apply_rotary_pos_emb
    recurrent_layers.uninstall(layer)
