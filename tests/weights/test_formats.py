"""Published block formats mean what their authors say: the gguf package and Transformers read the same bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from stowage.errors import CheckpointError
from stowage.weights.quantized import blocks
from stowage.weights.quantized.blocks import BlockMatrix, parameter_names, put_linear
from stowage.weights.quantized.formats import (
    BLOCKS,
    FORMATS,
    Spec,
    dequantized,
    first_outputs,
    outputs_of,
    outputs_together,
)
from tests.block_formats import SPECS, parts_of, q1_0, raw_bytes


def test_blocks_of_ggml_mean_what_its_package_says() -> None:
    gguf = pytest.importorskip("gguf")
    for name in BLOCKS:
        each = FORMATS[name]
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(each.ggml)] == (each.values, each.nbytes), name
        spec = Spec(name, 7, 512)
        raw = raw_bytes(7, each.row_bytes(512), seed=len(name))
        if name == "mxfp4_block":  # 255 is no number to us, as the standard has it
            raw[raw == 255] = 130
        with np.errstate(all="ignore"):
            if name == "bf16":
                expected = raw.view(torch.bfloat16).float()
            elif name == "q1_0":
                expected = torch.from_numpy(q1_0(raw.numpy())).float()
            else:
                found = gguf.dequantize(raw.numpy(), gguf.GGMLQuantizationType(each.ggml))
                expected = torch.from_numpy(np.ascontiguousarray(found))
        values = dequantized(spec, {"": raw})
        assert torch.equal(dequantized(Spec(name, 1, 512), {"": raw[1:2]}).nan_to_num(), values[1:2].nan_to_num())
        assert torch.equal(values.isnan(), expected.isnan()), name
        assert torch.equal(values.nan_to_num(), expected.nan_to_num()), name


def test_mxfp4_means_what_transformers_makes_of_gpt_oss() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, scales = raw_bytes(2, 9, 4, 16), raw_bytes(2, 9, 4, seed=1) % 128 + 64
    expected = convert_moe_packed_tensors(blocks, scales)  # (experts, inputs, outputs)
    for expert in range(2):
        values = dequantized(Spec("mxfp4", 9, 128), {"blocks": blocks[expert], "scales": scales[expert]})
        assert torch.equal(values.bfloat16(), expected[expert].t()), expert


@pytest.mark.parametrize(("block_rows", "group"), [(128, 128), (1, 0), (0, 0)])
def test_fp8_means_what_transformers_makes_of_it(block_rows: int, group: int) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    spec = Spec("fp8", 256, 384, group, block_rows)
    shape, _ = spec.tensors()["scales"]
    codes = raw_bytes(256, 384).masked_fill(raw_bytes(256, 384) % 128 == 127, 3).view(torch.float8_e4m3fn)
    scales = torch.rand(shape, generator=torch.Generator().manual_seed(3)) * 1e-3
    values = dequantized(spec, {"codes": codes, "scales": scales}, torch.bfloat16)
    if group:
        expected = Fp8Dequantize(None)._dequantize_one(codes, scales, torch.bfloat16)
    else:
        expected = (codes.float() * scales).bfloat16()
    assert torch.equal(values, expected)


def test_the_last_blocks_of_fp8_may_be_cut() -> None:
    spec = Spec("fp8", 130, 200, 128, 128)
    codes = torch.ones(130, 200).to(torch.float8_e4m3fn)
    scales = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    values = dequantized(spec, {"codes": codes, "scales": scales})
    assert values[0, 0] == 1 and values[127, 128] == 2 and values[128, 127] == 3 and values[129, 199] == 4


def packed(codes: Tensor, dim: int, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Eight codes along ``dim`` in a word: code ``order[i]`` of them in nibble ``i``."""
    eights = codes.to(torch.int64).movedim(dim, -1).unflatten(-1, (-1, 8))
    word = sum(eights[..., code] << (4 * nibble) for nibble, code in enumerate(order))
    assert isinstance(word, Tensor)
    return word.to(torch.int32).movedim(-1, dim)


@pytest.mark.parametrize("group", [32, 64, 128])
def test_four_bits_in_words_mean_a_code_less_its_zero_times_its_scale(group: int) -> None:
    n, k = 16, 256
    codes, zeros = raw_bytes(n, k) % 16, raw_bytes(n, k // group, seed=2) % 16
    scales = torch.rand(n, k // group, generator=torch.Generator().manual_seed(1)).half()
    wide = scales.float().repeat_interleave(group, 1)
    expected = (codes.float() - zeros.repeat_interleave(group, 1).float()) * wide
    symmetric = Spec("int4", n, k, group, scale_dtype=torch.float16)
    parts = {"codes": packed(codes, 1), "scales": scales}
    assert torch.equal(dequantized(symmetric, parts), (codes.float() - 8) * wide)
    with_zeros = Spec("int4", n, k, group, zeros=True, scale_dtype=torch.float16)
    assert torch.equal(dequantized(with_zeros, parts | {"zeros": packed(zeros, 0)}), expected)
    by_inputs = {"scales": scales.t().contiguous()}
    for name, spelled in (
        # GPTQModel takes one of a word's eight zero points at once, so that one of 0 borrows from the next
        ("gptq", {"codes": packed(codes.t(), 0), "zeros": packed(zeros.t(), 1) - 0x11111111}),
        # AutoAWQ packs outputs 0, 2, 4, 6, 1, 3, 5, 7 of eight from the lowest bits up
        ("awq", {part: packed(v.t(), 1, (0, 2, 4, 6, 1, 3, 5, 7)) for part, v in (("codes", codes), ("zeros", zeros))}),
    ):
        spec = Spec(name, n, k, group, scale_dtype=torch.float16)
        found = by_inputs | spelled
        assert {part: (tuple(t.shape), t.dtype) for part, t in found.items()} == spec.tensors(), name
        assert torch.equal(dequantized(spec, found), expected), name


@pytest.mark.parametrize("divides", [False, True])
def test_nvfp4_means_a_code_times_its_scale_and_the_matrix_own(divides: bool) -> None:
    """Scales are divided by that of compressed-tensors, and multiplied by that of Model Optimizer. Each step is rounded
    to float32, as both have it: in another order a bit of some weights differs.
    """
    meant = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    spec = Spec("nvfp4", 24, 64, block_rows=8, divides=divides)
    codes, scales = raw_bytes(24, 64) % 16, raw_bytes(24, 4, seed=1) % 127
    own = np.array([2903.77, 0.31, 6.1e-4], np.float32)
    exponents, fractions = (scales >> 3).numpy().astype(np.int64), (scales & 7).numpy().astype(np.float32)
    numbers = np.where(exponents, np.exp2(exponents - 7.0) * (1 + fractions / 8), fractions / 512).astype(np.float32)
    whole = numbers / own.repeat(8)[:, None] if divides else numbers * own.repeat(8)[:, None]
    expected = torch.from_numpy(meant[codes.numpy()] * whole.repeat(16, axis=1))
    parts = {
        "codes": codes[:, ::2] | codes[:, 1::2] << 4,
        "scales": scales.view(torch.float8_e4m3fn),
        "globals": torch.from_numpy(own),
    }
    assert {part: (tuple(t.shape), t.dtype) for part, t in parts.items()} == spec.tensors()
    assert torch.equal(dequantized(spec, parts), expected)
    assert torch.equal(dequantized(spec, parts, torch.bfloat16), expected.bfloat16())
    folded = (codes.numpy(), numbers)  # global scales last
    last = torch.from_numpy(meant[folded[0]] * folded[1].repeat(16, axis=1))
    rows = torch.from_numpy(own).repeat_interleave(8)[:, None]
    assert not torch.equal(dequantized(spec, parts), last / rows if divides else last * rows)


def test_matrices_are_cut_where_outputs_that_share_a_scale_meet() -> None:
    """Also where so many are no divisor of what is usual."""
    for spec in (Spec("fp8", 500, 64, 0, 96), Spec("nvfp4", 500, 64, block_rows=96), Spec("fp8", 500, 64, 0, 200)):
        step, parts = outputs_together(spec), parts_of(spec)
        assert step >= 128 and step % spec.block_rows == 0
        whole = dequantized(spec, parts)
        for begin in range(0, 500, step):
            own, cut = outputs_of(spec, parts, begin, min(500, begin + step))
            assert torch.equal(dequantized(own, cut), whole[begin : begin + step])
        few, cut = first_outputs(spec, parts)
        assert torch.equal(dequantized(few, cut), whole[: few.outputs])


def test_what_does_not_fit_is_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match="no whole number of q4_k blocks of 256"):
        Spec("q4_k", 4, 320).tensors()
    for spec in (Spec("int4", 8, 96, 64), Spec("gptq", 12, 64, 32), Spec("awq", 8, 64, 16)):
        with pytest.raises(CheckpointError, match="groups are whole"):
            spec.tensors()


def test_sizes_are_those_of_the_tensors() -> None:
    assert Spec("q4_k", 10, 512).nbytes == 10 * 2 * 144
    assert Spec("mxfp4", 10, 64).nbytes == 10 * 2 * 17
    assert Spec("nvfp4", 10, 64, block_rows=5).nbytes == 10 * (32 + 4) + 2 * 4
    assert Spec("fp8", 130, 200, 128, 128).nbytes == 130 * 200 + 4 * 4
    assert Spec("int4", 8, 64, 32, zeros=True, scale_dtype=torch.bfloat16).nbytes == 8 * 32 + 8 * 2 * 2 + 4 * 2


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.name}-{spec.block_rows}-{spec.group}-{spec.zeros}")
def test_matrices_are_what_their_formats_mean_and_are_multiplied_with_in_pieces(
    spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "TILE_ELEMENTS", 1)
    parts = parts_of(spec)
    expected = dequantized(spec, parts)
    assert bool(expected.isfinite().all()) and expected.std() > 0
    matrix: Any = BlockMatrix(spec, parts, torch.float32)
    assert matrix.is_here and torch.equal(matrix.dequantized(), expected)
    assert matrix.int8_parts() is matrix.int4_parts() is None, "it is in no form of ours"
    x, bias = torch.randn(3, spec.inputs), torch.randn(spec.outputs)
    exact = torch.nn.functional.linear(x, expected, bias)
    assert torch.allclose(torch.nn.functional.linear(x, matrix, bias), exact, rtol=1e-4, atol=1e-5 * exact.abs().max())
    turned: Any = BlockMatrix(spec, parts, torch.float32, True)
    assert turned.shape == expected.t().shape and torch.equal(turned.dequantized(), expected.t())


def test_a_linear_layer_has_the_tensors_of_its_format_and_computes_with_them() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(128, 48))
    for spec in (Spec("q5_0", 48, 128), Spec("mxfp4", 48, 128)):
        bias = torch.nn.Parameter(torch.randn(48), requires_grad=False)
        model[0] = torch.nn.Linear(128, 48)
        model[0].bias = bias
        layer = put_linear(model, "0", spec, torch.float32)
        parts = parts_of(spec)
        names = parameter_names(spec)
        assert {*dict(layer.named_parameters())} == {"bias", *names.values()}
        for part, values in parts.items():
            setattr(layer, names[part], torch.nn.Parameter(values, requires_grad=False))
        x = torch.randn(5, 128)
        expected = torch.nn.functional.linear(x, dequantized(spec, parts), bias)
        assert torch.allclose(model(x), expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))
        assert torch.equal(layer.weight, dequantized(spec, parts)) and spec.name in repr(layer)
