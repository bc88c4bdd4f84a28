"""Matrices in fewer bits: the bytes are what the format says, and products are those of the weights that they mean."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from stowage.errors import CheckpointError
from stowage.weights.offloaded_parameter import nan_placeholder
from stowage.weights.quantized import codes
from stowage.weights.quantized.codes import Form, PackedMatrix
from stowage.weights.quantized.encoding import ENCODED
from stowage.weights.quantized.fitting import Inputs, fit
from stowage.weights.quantized.formats import FORMATS, dequantized
from stowage.weights.quantized.grids import GRIDS

SHAPES = [(48, 64), (33, 128), (300, 4096), (17, 96)]
OWN = ("int8", "int4_32", "int4_64", "int4_128")
FORMS = [form for n, k in SHAPES for name in OWN if (form := Form(name, n, k)).fits]


def meant(form: Form, packed: Tensor) -> NDArray[np.float32]:
    """The weights, read from the bytes as the module's docstring says."""
    raw = packed.numpy()
    n, k, g = form.outputs, form.inputs, form.group
    if form.name == "int8":
        scales = raw[: 4 * n].view(np.float32)
        whole = raw[-(-4 * n // 64) * 64 :][: n * k].view(np.int8).reshape(n, k)
        return whole.astype(np.float32) * scales[:, None]
    half = 2 * n * (k // g)
    scales, least = (raw[at : at + half].view(np.float16).astype(np.float32).reshape(n, k // g) for at in (0, half))
    halves = raw[-(-2 * half // 64) * 64 :][: n * k // 2].reshape(n, k // 2)
    whole = np.concatenate([halves & 15, halves >> 4], axis=1).astype(np.float32)
    return whole * np.repeat(scales, g, axis=1) + np.repeat(least, g, axis=1)


def blocks_of(form: Form, packed: Tensor) -> Tensor:
    """The weights, as published formats are read."""
    assert form.spec is not None
    return dequantized(form.spec, {"": packed.view(form.outputs, -1)})


def weights(n: int, k: int, seed: int = 0) -> Tensor:
    found = torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * 0.02
    found[1] = 0  # a channel without a scale
    return found


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_products_are_those_of_the_weights_that_the_bytes_mean(form: Form) -> None:
    name, n, k = form.name, form.outputs, form.inputs
    weight = weights(n, k)
    packed = form.pack(weight)
    expected = torch.from_numpy(meant(form, packed))
    assert (expected - weight).norm() < weight.norm() * (0.012 if name == "int8" else 0.12)
    if name == "int8":
        assert bool(((expected - weight).abs().amax(1) <= weight.abs().amax(1) / 127 * 0.51).all())
    assert packed.numel() == form.nbytes
    assert form.nbytes % (4096 if form.nbytes >= 64 << 10 else 64) == 0
    for dtype, tolerance in ((torch.float32, 2e-6), (torch.bfloat16, 0.02), (torch.float16, 0.003)):
        matrix = PackedMatrix(form, packed, dtype)
        assert torch.allclose(matrix.dequantized().float(), expected, rtol=0.005 if dtype is torch.bfloat16 else 1e-3)
        for rows in (1, 5, 40):
            x = torch.randn(rows, k, generator=torch.Generator().manual_seed(rows)).to(dtype)
            bias = torch.arange(n).to(dtype)
            exact = x.double() @ expected.double().t()
            error = (matrix.multiply(x).double() - exact).abs().max() / exact.abs().max()
            assert error < tolerance, (dtype, rows)
            assert torch.allclose(matrix.multiply(x, bias), matrix.multiply(x) + bias)


ERRORS = {"q4_0": 0.09, "q5_0": 0.045, "q5_1": 0.04, "q4_k": 0.08, "q5_k": 0.04, "mxfp4_block": 0.125}


@pytest.mark.parametrize("fitted", [False, True])
@pytest.mark.parametrize("name", ENCODED)
def test_published_formats_are_written_as_they_are_read(name: str, fitted: bool) -> None:
    """By our reader, and by the gguf package: the values that were chosen, to the bit, and near the weights."""
    weight = weights(40, 512)
    rows = torch.randn(900, 512, generator=torch.Generator().manual_seed(5))
    inputs = Inputs.of(rows) if fitted else None
    form, grid = Form(name, 40, 512), GRIDS[name]
    packed = form.pack(weight, inputs)
    assert packed.numel() == form.nbytes == 40 * FORMATS[name].row_bytes(512)
    values, found = blocks_of(form, packed), fit(weight, grid, inputs)
    scales, leasts = (part.repeat_interleave(grid.group, dim=1) for part in (found.scales.scales, found.scales.leasts))
    assert torch.equal(values, grid.meant(found.codes.float(), scales, leasts))
    assert (values - weight).norm() < ERRORS[name] * weight.norm() * (1.3 if fitted else 1)
    assert not values[1].any()
    gguf = pytest.importorskip("gguf")
    read = gguf.dequantize(packed.view(40, -1).numpy(), gguf.GGMLQuantizationType(FORMATS[name].ggml))
    assert torch.equal(values, torch.from_numpy(np.ascontiguousarray(read)))


def test_better_codes_than_the_range_alone_are_found() -> None:
    """One weight far from the others of its group costs them less than their own precision."""
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(3))
    form = Form("int4_64", 64, 64)
    error = (torch.from_numpy(meant(form, form.pack(weight))) - weight).square().mean()
    low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    step = (high - low) / 15
    plain = (torch.round((weight - low) / step) * step + low - weight).square().mean()
    assert error < plain * 0.99


@pytest.mark.parametrize("name", OWN)
def test_what_is_away_gives_nan(name: str) -> None:
    form = Form(name, 40, 128)
    offloaded = nan_placeholder((form.nbytes,), torch.uint8)
    for dtype in (torch.float32, torch.bfloat16):
        for rows in (1, 30):
            product = PackedMatrix(form, offloaded, dtype).multiply(torch.randn(rows, 128).to(dtype))
            assert bool(torch.isnan(product).all())


def test_a_matrix_takes_a_weights_place() -> None:
    """In torch's own calls, whatever they are; never with another weight's values."""
    form = Form("int8", 48, 64)
    packed, x = form.pack(weights(48, 64)), torch.randn(3, 64)
    plain, transposed = PackedMatrix(form, packed, torch.float32), PackedMatrix(form, packed, torch.float32, True)
    product = plain.multiply(x)
    assert torch.equal(torch.nn.functional.linear(x, plain), product)
    assert torch.equal(torch.nn.functional.linear(x, plain, torch.ones(48)), product + 1)
    assert torch.equal(x @ transposed, product)
    assert torch.equal(torch.matmul(x, transposed), product)
    assert torch.allclose(torch.mm(x, torch.transpose(plain, 0, 1)), product, atol=1e-6)
    assert plain.shape == (48, 64)
    assert transposed.shape == (64, 48)


def test_memory_for_unpacking_is_what_is_counted_and_outlives_inference_mode() -> None:
    form = Form("int4_64", 2000, 2048)
    matrix = PackedMatrix(form, form.pack(weights(2000, 2048)), torch.float32)
    codes._workspace._held.clear()
    with torch.inference_mode():
        first = matrix.multiply(torch.ones(1, 2048))
    assert torch.equal(matrix.multiply(torch.ones(1, 2048)), first)
    held = sum(t.nbytes for t in codes._workspace._held.values())
    assert 0 < held <= codes.workspace_bytes([form])
    assert codes.workspace_bytes([]) == 0


@pytest.mark.parametrize("name", ["int8", "int4_32"])
def test_rows_are_looked_up(name: str) -> None:
    form = Form(name, 40, 64)
    packed = form.pack(weights(40, 64))
    for dtype in (torch.float32, torch.bfloat16):
        table = PackedMatrix(form, packed, dtype)
        ids = torch.tensor([[3, 0, 39], [3, 7, 1]])
        assert torch.equal(torch.nn.functional.embedding(ids, table), table.dequantized()[ids])  # type: ignore[arg-type]
    offloaded = PackedMatrix(form, nan_placeholder((form.nbytes,), torch.uint8), torch.float32)
    assert bool(torch.isnan(offloaded.lookup_rows(torch.tensor([1]))).all())


@pytest.mark.parametrize("name", codes.FORMS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e38])
def test_weights_that_have_no_scale_are_refused(name: str, bad: float) -> None:
    weight = weights(32, 256)
    weight[3, 5] = bad
    form = Form(name, 32, 256)
    if name == "int8" and bad == 1e38:
        assert float(PackedMatrix(form, form.pack(weight), torch.float32).dequantized()[3, 5]) == pytest.approx(1e38)
        return
    if name == "mxfp4_block" and bad == 1e38:  # a scale is any power of two
        assert float(blocks_of(form, form.pack(weight))[3, 5]) == pytest.approx(1e38, rel=0.2)
        return
    with pytest.raises(CheckpointError, match="cannot be packed"):
        form.pack(weight)
