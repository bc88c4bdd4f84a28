"""Weights that stay lie in huge pages: the same values, at addresses that kernels take alike, freed with the model."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from stowage.core.geometry import ALIGNMENT_BYTES
from stowage.weights.resident import ResidentMemory


def of_phase(values: torch.Tensor, phase: int) -> torch.Tensor:
    raw = torch.empty(values.nbytes + 2 * ALIGNMENT_BYTES, dtype=torch.uint8)
    begin = (phase - raw.data_ptr()) % ALIGNMENT_BYTES
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
        assert not copy.numel() or copy.data_ptr() % ALIGNMENT_BYTES == phase
        assert copy.untyped_storage().nbytes() == values.nbytes, "a tensor of its own, to whoever saves it"


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


def test_what_only_passes_is_the_device_s_to_free() -> None:
    memory = ResidentMemory(torch.device("cuda"))
    first, second = memory.empty((3, 1 << 18), torch.uint8), memory.copy(torch.ones(5))
    assert first.shape == (3, 1 << 18)
    assert second.tolist() == [1] * 5
    assert not memory._asked_bytes, "each has memory of its own"
