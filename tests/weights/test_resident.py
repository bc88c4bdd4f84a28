"""Weights that stay lie in huge pages: the same values, at addresses that kernels take alike, freed with the model."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from stowage.native.memory import HUGE_BYTES
from stowage.weights.parameter_location import ALIGNED_BYTES
from stowage.weights.resident import ResidentMemory


def of_phase(values: torch.Tensor, phase: int) -> torch.Tensor:
    raw = torch.empty(values.nbytes + 2 * ALIGNED_BYTES, dtype=torch.uint8)
    begin = (phase - raw.data_ptr()) % ALIGNED_BYTES
    return raw[begin : begin + values.nbytes].view(values.dtype).view(values.shape).copy_(values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float8_e4m3fn, torch.int32])
@pytest.mark.parametrize("phase", [0, 4, 60])
def test_copies_have_their_values_and_their_phase(dtype: torch.dtype, phase: int) -> None:
    memory, kept = ResidentMemory(), list[tuple[torch.Tensor, torch.Tensor]]()
    for size in (1, 3, 64, 1000, 1 << 20, 5, 3 << 20, 7, 0):
        values = of_phase(torch.randint(0, 100, (size,), dtype=torch.uint8).view(-1, 1).to(dtype), phase)
        kept.append((values, memory.copy(values)))
    for values, copy in kept:  # none lies on another
        assert copy.shape == values.shape and copy.dtype is values.dtype and copy.is_contiguous()
        assert torch.equal(copy.view(torch.uint8), values.view(torch.uint8))
        assert not copy.numel() or copy.data_ptr() % ALIGNED_BYTES == phase
        assert copy.untyped_storage().nbytes() == values.nbytes, "a tensor of its own, to whoever saves it"


def model(width: int) -> nn.Module:
    built = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width), nn.LayerNorm(width))
    built[1].weight = built[0].weight  # tied
    built.register_buffer("table", built[2].weight.detach())
    return built


@pytest.mark.parametrize("width", [8, 1024])
def test_parameters_move_and_compute_the_same(width: int) -> None:
    built = model(width)
    addresses = {name: p.data_ptr() for name, p in built.named_parameters()}
    inputs = torch.randn(3, width)
    expected = built(inputs)
    ResidentMemory().settle(built)
    assert torch.equal(built(inputs), expected)
    moved = {name for name, p in built.named_parameters() if p.data_ptr() != addresses[name]}
    large = {"0.weight", "0.bias", "1.bias", "2.bias"}
    assert moved == (large if width * width * 4 >= HUGE_BYTES else set()), "what a buffer shows, too, stays"
    assert built[1].weight is built[0].weight


def test_memory_goes_with_the_last_tensor_in_it() -> None:
    memory = ResidentMemory()
    first, second = memory.empty((1 << 19,), torch.uint8), memory.empty((1 << 18,), torch.uint8)
    piece = weakref.ref(memory._piece.obj)
    assert memory._piece.obj is not None
    del memory, first
    gc.collect()
    assert piece() is not None
    second.fill_(1)
    del second
    gc.collect()
    assert piece() is None


def test_what_only_passes_is_the_devices_to_free() -> None:
    built, memory = model(1024), ResidentMemory(torch.device("cuda"))
    before = built[0].weight.data_ptr()
    memory.settle(built)
    assert built[0].weight.data_ptr() == before
    assert memory.copy(torch.ones(5)).tolist() == [1] * 5
