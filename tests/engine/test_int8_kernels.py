"""Products of activations rounded to 8 bits: what they mean, and the same bits with every instruction set and batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from stowage.executor import kernels
from stowage.weights.quantized.blocks import BlockMatrix
from stowage.weights.quantized.codes import Form, PackedMatrix
from stowage.weights.quantized.formats import Spec, dequantized
from tests.block_formats import SPECS, parts_of, shapes_of
from tests.depth import mostly_rare
from tests.engine.conftest import each_instruction_set
from tests.native import needs_native

pytestmark = needs_native
INTEGER = [spec for spec in SPECS if kernels.is_integer(spec)]
PACKED = [
    Form("int8", 37, 576),
    Form("int8", 7, 4096 + 96),
    Form("int4_32", 37, 512),
    Form("int4_32", 9, 576),
    Form("int4_128", 5, 8192 + 256),
]
ROWS = (1, 2, 3, 4, 5, 8, 9, 12, 13, 16, 70)


def named(spec: Spec | Form) -> str:
    return "-".join(str(part) for part in (spec.name, spec.group, getattr(spec, "zeros", ""), spec.outputs))


def inputs(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1)).to(dtype)


def parted(x: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers (rows, blocks, 32) and scales (rows, blocks, 1)."""
    blocks = x.float().view(len(x), -1, 32)
    peak = blocks.abs().amax(-1, keepdim=True)
    inverse = torch.where(peak > 0, torch.full_like(peak, 127) / peak, 0)
    return torch.round(blocks * inverse), peak / 127


def by_set(x: Tensor, matrix: kernels.Matrix) -> dict[str, Tensor]:
    """The product in every instruction set that this processor has."""
    found = {}
    for name in each_instruction_set():
        found[name] = kernels.linear_of(x, matrix)
        for rows in ROWS:
            assert torch.equal(kernels.linear_of(x[:rows], matrix), found[name][:rows]), (name, rows)
    return found


def assert_means(x: Tensor, matrix: kernels.Matrix | None, values: Tensor, what: Any) -> None:
    """All sets give the same, which is the product with the rounded inputs."""
    assert matrix is not None
    assert matrix.int8
    codes, scales = parted(x)
    expected = (codes * scales).flatten(1).double() @ values.double().T
    base, *others = by_set(x, matrix).values()
    bound = 1e-6 if x.dtype is torch.float32 else 2**-8
    assert float((base.double() - expected).abs().max() / expected.abs().max()) < bound, what
    for other in others:
        assert torch.equal(base, other), what


@pytest.mark.parametrize("spec", INTEGER, ids=named)
@pytest.mark.parametrize("dtype", kernels.DTYPES)
def test_published_formats(spec: Spec, dtype: torch.dtype) -> None:
    for one in shapes_of(spec):
        parts = parts_of(one, seed=one.inputs)
        x = inputs(70, one.inputs, dtype)
        assert_means(x, kernels.int8_product(x, BlockMatrix(one, parts, dtype)), dequantized(one, parts), one)


@pytest.mark.parametrize("scale_dtype", mostly_rare([torch.float32, torch.float16, torch.bfloat16], [torch.float16]))
@pytest.mark.parametrize("zeros", [False, True])
def test_scales_of_any_type_for_any_number_of_blocks(scale_dtype: torch.dtype, zeros: bool) -> None:
    """Also one for three blocks, which is no part of four, and one for all inputs."""
    for group, width in ((32, 416), (64, 4096 + 320), (96, 480), (128, 384), (160, 800), (256, 512), (0, 416)):
        for name in ("int4", "gptq", "awq"):
            spec = Spec(name, 136, width, group, zeros=zeros, scale_dtype=scale_dtype)
            parts = parts_of(spec)
            x = inputs(70, width, torch.bfloat16)
            matrix = kernels.int8_product(x, BlockMatrix(spec, parts, torch.bfloat16))
            assert_means(x, matrix, dequantized(spec, parts), spec)


@pytest.mark.parametrize("outputs", [8, 128, 136, 264, 1000, 2312])
@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_strips_of_outputs_whose_codes_lie_by_inputs(name: str, outputs: int) -> None:
    spec = Spec(name, outputs, 288, 32, scale_dtype=torch.float16)
    parts = parts_of(spec)
    x = inputs(70, 288, torch.float32)
    matrix = kernels.int8_product(x, BlockMatrix(spec, parts, torch.float32))
    assert_means(x, matrix, dequantized(spec, parts), spec)


@pytest.mark.parametrize("form", PACKED, ids=named)
@pytest.mark.parametrize("dtype", kernels.DTYPES)
def test_packed_forms(form: Form, dtype: torch.dtype) -> None:
    weight = torch.randn(form.outputs, form.inputs, generator=torch.Generator().manual_seed(2))
    packed = PackedMatrix(form, form.pack(weight), torch.float32)
    x = inputs(70, form.inputs, dtype)
    assert_means(x, kernels.int8_product(x, packed), packed.dequantized(), form)


def test_blocks_are_added_in_the_order_that_is_written_down() -> None:
    """To the bit: of every fourth block, then these four; no product is fused with a sum."""
    spec = Spec("q4_1", 6, 32 * 13)
    raw = parts_of(spec)[""]
    blocks = raw.view(6, 13, 20)
    scale, least = (blocks[..., at : at + 2].contiguous().view(torch.float16)[..., 0].float() for at in (0, 2))
    weights = torch.cat([blocks[..., 4:] & 15, blocks[..., 4:] >> 4], dim=-1).float()
    x = inputs(3, spec.inputs, torch.float32)
    codes, own = parted(x)
    own = own[..., 0]
    sums = torch.zeros(4, 3, 6)
    for b in range(13):
        value = (codes[:, b] @ weights[:, b].T) * (own[:, b, None] * scale[None, :, b])
        other = (own[:, b] * codes[:, b].sum(-1))[:, None] * least[None, :, b]
        sums[b % 4] += value + other
    expected = ((sums[0] + sums[1]) + sums[2]) + sums[3]
    matrix = kernels.int8_product(x, BlockMatrix(spec, {"": raw}, torch.float32))
    assert matrix is not None
    for name, found in by_set(torch.cat([x] * 24)[:70], matrix).items():
        assert torch.equal(found[:3], expected), name


CODES = {  # bytes of a block, and which of them are codes
    "q8_0": (34, slice(2, 34)),
    "q4_0": (18, slice(2, 18)),
    "q4_1": (20, slice(4, 20)),
    "q5_0": (22, slice(2, 22)),
    "q5_1": (24, slice(4, 24)),
    "mxfp4_block": (17, slice(1, 17)),
    "q4_k": (144, slice(16, 144)),
    "q5_k": (176, slice(16, 176)),
    "q6_k": (210, slice(0, 192)),
}


@pytest.mark.parametrize("name", CODES)
def test_the_largest_codes_times_the_largest_activations(name: str) -> None:
    """No sum of products is beyond the 16 bits in which some instruction sets add them."""
    spec = Spec(name, 21, 768)
    size, codes = CODES[name]
    for byte in (0x00, 0x77, 0x7F, 0x80, 0xFF):
        raw = parts_of(spec)[""].clone()
        raw.view(-1, size)[:, codes] = byte
        x = torch.ones(70, spec.inputs)
        x[1::2] = -1
        x[2::4, ::2] = -1
        matrix = kernels.int8_product(x, BlockMatrix(spec, {"": raw}, torch.float32))
        assert matrix is not None
        base, *others = by_set(x, matrix).values()
        assert all(torch.equal(base, other) for other in others), byte


def test_zeros_tiny_numbers_and_what_is_no_number() -> None:
    spec = Spec("q8_0", 40, 64)
    x = inputs(70, 64, torch.float32)
    x[0], x[1, :32], x[2, 5], x[3, 40], x[4] = 0, 1e-38, float("nan"), float("-inf"), 1e30
    matrix = kernels.int8_product(x, BlockMatrix(spec, parts_of(spec), torch.float32))
    assert matrix is not None
    base, *others = by_set(x[:2], matrix).values()
    assert not base[0].any()
    assert all(torch.equal(base, other) for other in others)
    for _ in each_instruction_set():
        found = kernels.linear_of(x, matrix)
        assert found[2:4].isnan().all(), "an answer that is none says so"
        assert found[4].isfinite().all()
        assert found[5:].isfinite().all()


@pytest.mark.parametrize("name", ["q8_0", "q4_0", "q4_1", "q5_0", "q5_1"])
@pytest.mark.parametrize("scale", [float("nan"), float("inf"), float("-inf")])
def test_a_row_takes_nothing_from_the_next_one(name: str, scale: float) -> None:
    """Its last blocks are no whole group, and are read together with what follows."""
    spec = Spec(name, 10, 128 + 64)
    raw = parts_of(spec)[""]
    poisoned = raw.clone()
    poisoned.view(10, 6, -1)[3::3, :2, :2] = torch.tensor([scale]).half().view(torch.uint8)
    x = inputs(8, spec.inputs, torch.float32)
    whole = kernels.linear_of(x, kernels.int8_product(x, BlockMatrix(spec, {"": raw}, torch.float32)))
    matrix = kernels.int8_product(x, BlockMatrix(spec, {"": poisoned}, torch.float32))
    for instructions in each_instruction_set():
        for rows in (1, 3, 8):
            found = kernels.linear_of(x[:rows], matrix)
            assert not found[:, 3::3].isfinite().any()
            kept = [at for at in range(10) if at not in (3, 6, 9)]
            assert torch.equal(found[:, kept], whole[:rows, kept]), instructions


def test_threads_strides_and_biases_change_nothing() -> None:
    spec = Spec("q4_k", 300, 512)
    x = inputs(9, 1024, torch.bfloat16)[:, ::2]
    matrix = kernels.int8_product(x, BlockMatrix(spec, parts_of(spec), torch.bfloat16))
    assert matrix is not None
    before = torch.get_num_threads()
    try:
        said = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            said.append(kernels.linear_of(x, matrix))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(said[0], said[1])
    assert torch.equal(kernels.linear_of(x.contiguous().view(3, 3, 512), matrix).view(9, 300), said[0])
    bias = torch.randn(300).bfloat16()
    whole = kernels.linear_of(x.float(), matrix)
    assert torch.equal(kernels.linear_of(x, matrix, bias), (whole + bias).bfloat16())


def test_rows_beyond_those_that_are_rounded_at_a_time() -> None:
    spec, x = Spec("q4_0", 40, 256), inputs(517, 256, torch.bfloat16)
    matrix = kernels.int8_product(x, BlockMatrix(spec, parts_of(spec), torch.bfloat16))
    assert matrix is not None
    found = kernels.linear_of(x, matrix)
    for begin, end in ((0, 2), (509, 514), (512, 513), (516, 517)):
        assert torch.equal(kernels.linear_of(x[begin:end], matrix), found[begin:end]), (begin, end)


def test_other_formats_are_multiplied_as_ever() -> None:
    for spec in (Spec("fp8", 16, 128, 128, 128), Spec("bf16", 16, 128)):
        x = inputs(2, 128, torch.bfloat16)
        assert kernels.int8_product(x, BlockMatrix(spec, parts_of(spec), torch.bfloat16)) is None
    form = Form("int8", 16, 40)
    packed = PackedMatrix(form, form.pack(torch.randn(16, 40)), torch.float32)
    assert kernels.int8_product(inputs(2, 40, torch.float32), packed) is None, "no whole blocks"
