"""Products with matrices in the formats that they were published in: to the bit those with their values, unpacked."""

from __future__ import annotations

import ctypes
import mmap
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stowage.executor import kernels
from stowage.executor.determinism.row_invariance import RowInvariance
from stowage.executor.fused import experts
from stowage.weights.quantized.blocks import BlockMatrix
from stowage.weights.quantized.formats import BLOCKS, Spec, dequantized
from stowage.weights.quantized.stacks import BlockStack, Stacking, stacked_linear
from tests.block_formats import HALVES, SPECS, parts_of, scale, shapes_of
from tests.native import needs_native

pytestmark = needs_native
ODD = {
    "fp8": ((130, 200), (37, 4128)),
    "s8": ((130, 200), (37, 4128)),
    "f16": ((37, 75),),
    "bf16": ((37, 75),),
    "f32": ((37, 75),),
}


def linear_blocks(x: Tensor, matrix: BlockMatrix, bias: Tensor | None = None) -> Tensor:
    """``x`` times a matrix in the format that it was published in."""
    return kernels.linear_of(x, kernels.of_blocks(matrix), bias)


def all_shapes_of(spec: Spec) -> list[Spec]:
    return [*shapes_of(spec), *(replace(spec, outputs=n, inputs=k) for n, k in ODD.get(spec.name, ()))]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.name}-{spec.block_rows}-{spec.group}-{spec.zeros}")
@pytest.mark.parametrize("dtype", kernels.DTYPES)
def test_products_have_the_bits_of_those_with_unpacked_weights(
    instructions: None, spec: Spec, dtype: torch.dtype
) -> None:
    for one in all_shapes_of(spec):
        parts = parts_of(one, seed=one.inputs)
        matrix, plain = BlockMatrix(one, parts, dtype), dequantized(one, parts, dtype)
        x = torch.randn(300, one.inputs, generator=torch.Generator().manual_seed(1)).to(dtype)
        assert kernels.supports_blocks(x, matrix)
        expected = kernels.linear(x, plain)
        assert bool(expected.isfinite().all())
        for rows in (1, 2, 3, 5, 8, 9, 12, 13, 16, 65, 300):
            found = linear_blocks(x[:rows], matrix)
            assert torch.equal(found, expected[:rows]), (one, rows)
        bias = torch.randn(one.outputs).to(dtype)
        assert torch.equal(linear_blocks(x[:3], matrix, bias), kernels.linear(x[:3], plain, bias)), one


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("zeros", [False, True])
def test_scales_of_any_size(instructions: None, scale_dtype: torch.dtype, zeros: bool) -> None:
    """Also such as make numbers beyond the largest, or below the normal ones, which instructions for pairs of bfloat16
    take for zeros.
    """
    spec = Spec("int4", 16, 1024 + 288, 32, zeros=zeros, scale_dtype=scale_dtype)
    parts = parts_of(spec)
    small = () if kernels._kernel.multiplies_halves() else (-149, -135, -127, -120)
    for power in (*small, -105, 90, 97, 110, 127):
        parts["scales"] = (torch.rand(spec.outputs, spec.inputs // 32) + 0.5).double().mul(2.0**power).to(scale_dtype)
        plain = dequantized(spec, parts, torch.bfloat16)
        x = torch.zeros(9, spec.inputs).bfloat16()
        x[:, 40::250] = 2.0 ** (-power / 2)
        for rows in (1, 2, 4, 9):
            found = linear_blocks(x[:rows], BlockMatrix(spec, parts, torch.bfloat16))
            assert torch.equal(found.nan_to_num(7), kernels.linear(x[:rows], plain).nan_to_num(7)), (power, rows)


@pytest.mark.parametrize("divides", [False, True])
def test_every_scale_of_nvfp4_and_global_scales_of_any_size(instructions: None, divides: bool) -> None:
    """Also scales that are negative or no numbers, and such as make numbers beyond the largest, or below the normal."""
    spec = Spec("nvfp4", 37, 4096, block_rows=0, divides=divides)
    parts = parts_of(spec)
    scales = torch.arange(37 * 256).to(torch.uint8).view(37, 256)
    scales[::3] = scales[::3] % 112  # whole rows of numbers
    parts["scales"] = scales.view(torch.float8_e4m3fn)
    x = torch.zeros(9, spec.inputs)
    x[:, 40::250] = torch.randn(9, 17, generator=torch.Generator().manual_seed(1))
    small = () if kernels._kernel.multiplies_halves() else (-149, -140, -130, -124, -118, -113)
    for power in (*small, -100, -12, 0, 13, 70, 90, 115, 120, 127):
        own = torch.tensor([1.37 * 2.0 ** (-power if divides and power < 127 else power)])
        plain = dequantized(spec, parts | {"globals": own}, torch.bfloat16)
        given = (x * 2.0 ** (-power / 2)).bfloat16()
        matrix = BlockMatrix(spec, parts | {"globals": own}, torch.bfloat16)
        for rows in (1, 2, 4, 9):
            found = linear_blocks(given[:rows], matrix)
            assert torch.equal(found.nan_to_num(7), kernels.linear(given[:rows], plain).nan_to_num(7)), (power, rows)


def test_nvfp4_of_half_a_block_is_left_to_the_reference() -> None:
    spec = Spec("nvfp4", 8, 48, block_rows=0)
    matrix: Any = BlockMatrix(spec, parts_of(spec), torch.bfloat16)
    x = torch.randn(3, 48).bfloat16()
    assert not kernels.supports_blocks(x, matrix)
    with RowInvariance(linear=True, exact=True):
        found = nn.functional.linear(x, matrix)
    assert torch.equal(found, kernels.linear(x, dequantized(spec, matrix.parts, torch.bfloat16)))


@pytest.mark.parametrize("name", ["q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k"])
@pytest.mark.parametrize(("infinite", "block"), [(slice(None, None, 2), 1), (slice(3, 4), -1)])
def test_scales_of_infinity_give_what_dequantized_weights_give(
    instructions: None, name: str, infinite: slice, block: int
) -> None:
    """Sums of one sign are infinite, not NaN, as rounding in a shorter way would leave them; others are summed once."""
    spec = Spec(name, 5, 2048)
    parts = parts_of(spec)
    (blocks,) = parts.values()
    at = HALVES.get(name, (0,))[0]
    rows = blocks.view(torch.uint8).fill_(255).view(spec.outputs, -1, spec.format.nbytes)
    scale(name, rows.view(-1, spec.format.nbytes), 0.5)
    rows[infinite, block, at : at + 2] = torch.tensor([0x00, 0x7C], dtype=torch.uint8)
    plain = dequantized(spec, parts, torch.bfloat16)
    x = torch.ones(4, spec.inputs).bfloat16()
    for count in (1, 2, 4):
        found = linear_blocks(x[:count], BlockMatrix(spec, parts, torch.bfloat16))
        assert torch.equal(found, kernels.linear(x[:count], plain)) and bool(found[:, infinite].isinf().all())


@pytest.mark.parametrize("name", ["q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl"])
def test_every_half_is_a_scale(instructions: None, name: str) -> None:
    """Numbers of all of them may be looked up."""
    spec = Spec(name, 512, 4096)
    parts = parts_of(spec)
    (blocks,) = parts.values()
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(spec.outputs, -1, 1)
    blocks.view(torch.uint8).view(spec.outputs, -1, spec.format.nbytes)[..., :2] = halves.view(torch.uint8)
    expected = kernels.linear(x := torch.randn(9, spec.inputs).bfloat16(), dequantized(spec, parts, torch.bfloat16))
    assert int(expected[0].isfinite().sum()) == 496  # all but those of no numbers
    for rows in (1, 2, 4, 7, 9):
        found = linear_blocks(x[:rows], BlockMatrix(spec, parts, torch.bfloat16))
        assert torch.equal(found.nan_to_num(7), expected[:rows].nan_to_num(7)), rows


@pytest.mark.parametrize("name", ["fp8", "f16"])
@pytest.mark.parametrize("dtype", kernels.DTYPES)
def test_every_short_float(instructions: None, name: str, dtype: torch.dtype) -> None:
    """Each alone, also those that are no numbers."""
    size = 1 if name == "fp8" else 2
    codes = torch.arange(256**size).to(torch.uint8 if size == 1 else torch.uint16).view(torch.uint8)
    spec = Spec(name, 256 ** (size - 1), 256, 128 if size == 1 else 0)
    parts = parts_of(spec)
    parts[next(iter(parts))] = codes.view(spec.outputs, 256 * size).view(parts[next(iter(parts))].dtype)
    x = torch.eye(256, dtype=dtype)[::7].contiguous()
    plain = dequantized(spec, parts, dtype)
    finite = torch.where(plain.isfinite(), plain, 0)
    for rows in (1, 5, 37):
        found = linear_blocks(x[:rows], BlockMatrix(spec, parts, dtype))
        assert torch.equal(found.nan_to_num(7), kernels.linear(x[:rows], plain).nan_to_num(7)), rows
    assert torch.equal(kernels.linear(x, finite), finite[:, ::7].T)


@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_codes_that_lie_by_inputs_have_scales_of_any_group(instructions: None, name: str) -> None:
    for outputs, width, group, kind in (
        (136, 1024 + 96, 32, torch.float16),
        (264, 4096 + 704, 96, torch.bfloat16),
        (1064, 640, 0, torch.float32),
    ):
        spec = Spec(name, outputs, width, group, scale_dtype=kind)
        parts = parts_of(spec)
        plain = dequantized(spec, parts, torch.bfloat16)
        x = torch.randn(8, width, generator=torch.Generator().manual_seed(1)).bfloat16()
        for rows in (1, 2, 3, 8):
            found = linear_blocks(x[:rows], BlockMatrix(spec, parts, torch.bfloat16))
            assert torch.equal(found, kernels.linear(x[:rows], plain)), (spec, rows)


EXPERTS = 5
RUNS = [(3, 4, 9), (0, 0, 1), (4, 9, 10), (1, 1, 4)]
"""Of experts in any order, of which one has no rows."""


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.name}-{spec.block_rows}-{spec.group}-{spec.zeros}")
@pytest.mark.parametrize("int8", [False, True])
def test_rows_of_several_experts_are_one_call(spec: Spec, int8: bool) -> None:
    """Of one stack or of two with the same rows, which may lie further apart than they are long."""
    pieces = [stacked_parts(spec, seed) for seed in (0, 7)]
    x = torch.randn(10, spec.inputs, generator=torch.Generator().manual_seed(1)).bfloat16()
    before = torch.get_num_threads()
    try:
        for threads, count in ((1, 1), (3, 2)):
            torch.set_num_threads(threads)
            stack = BlockStack(Stacking(spec, pieces=count), pieces[:count], torch.bfloat16)
            known = experts.of_stack(x, stack, int8)
            assert known is not None
            found = experts.stacked(x, known, RUNS)
            for out, parts in zip(found, pieces, strict=False):
                for expert, begin, end in RUNS:
                    own = {part: values[expert].contiguous() for part, values in parts.items()}
                    matrix = BlockMatrix(spec, own, torch.bfloat16)
                    alone = kernels.int8_product(x, matrix) if int8 else None
                    expected = kernels.linear_of(x[begin:end], alone or kernels.of_blocks(matrix))
                    assert torch.equal(out[begin:end], expected), (count, expert)
    finally:
        torch.set_num_threads(before)


def stacked_parts(spec: Spec, seed: int) -> dict[str, Tensor]:
    """Parts of some experts with gaps between them."""
    each = [parts_of(spec, seed + 100 * expert) for expert in range(EXPERTS)]
    return {part: torch.stack([own[part] for own in each for _ in range(2)])[::2] for part in each[0]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_choices_of_experts_give_each_row_its_own(dtype: torch.dtype) -> None:
    """In a mode or without, by kernels or not; what is no expert's number gives zeros, and takes none."""
    spec = Spec("mxfp4", 96, 64)
    module = nn.Module()
    module.stack = BlockStack(Stacking(spec), [stacked_parts(spec, 0)], dtype)
    module.stack_bias = torch.randn(EXPERTS, 96).to(dtype)
    module.num_experts, module.has_bias = EXPERTS, True
    x = torch.randn(7, 64).to(dtype)
    for chosen in ([4, 0, 5, 0, -1, 2, 4], [0, 1, 2, 3, 4, 4, 4], [5] * 7, [3, 2, 1, 0, 4, 5, 6]):
        expected = torch.zeros(7, 96, dtype=dtype)
        for row, expert in enumerate(chosen):
            if 0 <= expert < EXPERTS:
                plain = module.stack[expert].dequantized()
                expected[row] = (x[row : row + 1] @ plain.t() + module.stack_bias[expert])[0]
        for mode in (RowInvariance(linear=True, exact=True), RowInvariance(linear=False, exact=False)):
            with mode:
                found = stacked_linear(x, module, "stack", torch.tensor(chosen))
            assert torch.allclose(found, expected, rtol=1e-2, atol=1e-2), chosen
            assert torch.equal(found[expected == 0], expected[expected == 0])


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("dtype", kernels.DTYPES)
def test_rows_that_are_looked_up_are_those_of_the_unpacked_matrix(name: str, dtype: torch.dtype) -> None:
    plainly = name in ("f32", "f16", "bf16")
    for inputs in (256, 1024 + 768, *((75, 1024 + 3) if plainly else ())):
        spec = Spec(name, 37, inputs)
        matrix = BlockMatrix(spec, parts_of(spec, seed=inputs), dtype)
        values = dequantized(spec, matrix.parts, dtype)
        ids = torch.tensor([[0, 36, 7], [7, 1, 2]])
        with RowInvariance(linear=True, exact=False):
            assert torch.equal(torch.nn.functional.embedding(ids.t(), matrix), values[ids.t()]), inputs
        assert torch.equal(kernels.look_up(ids[:, 1:], matrix), values[ids[:, 1:]]), inputs
        assert kernels.look_up(ids[:0], matrix).shape == (0, 3, inputs)
        for wrong in (37, -1, 1 << 40):
            with pytest.raises(IndexError, match="does not have"):
                kernels.look_up(torch.tensor([3, wrong]), matrix)


def test_blocks_of_q1_0_without_another_are_left_to_the_reference() -> None:
    """Kernels read them in pairs."""
    spec, x = Spec("q1_0", 8, 384), torch.randn(2, 384)
    matrix = BlockMatrix(spec, parts_of(spec), torch.float32)
    assert not kernels.supports_blocks(x, matrix)
    assert not kernels.supports_lookup(torch.tensor([1]), matrix)
    with RowInvariance(linear=True, exact=False):
        found = torch.nn.functional.linear(x, matrix)
        assert torch.equal(
            torch.nn.functional.embedding(torch.tensor([1]), matrix), dequantized(spec, matrix.parts)[1:2]
        )
    assert torch.allclose(found, x @ dequantized(spec, matrix.parts).t(), rtol=1e-4, atol=1e-3)


def test_rows_of_what_is_away_or_in_several_tensors_are_left_to_the_reference() -> None:
    spec, ids = Spec("q8_0", 8, 64), torch.tensor([1])
    assert kernels.supports_lookup(ids, BlockMatrix(spec, parts_of(spec), torch.float32))
    assert not kernels.supports_lookup(ids.int(), BlockMatrix(spec, parts_of(spec), torch.float32))
    offloaded = {part: values[:1].expand(values.shape) for part, values in parts_of(spec).items()}
    assert not kernels.supports_lookup(ids, BlockMatrix(spec, offloaded, torch.float32))
    other = Spec("mxfp4", 8, 64)
    assert not kernels.supports_lookup(ids, BlockMatrix(other, parts_of(other), torch.float32))
    assert not kernels.supports_lookup(ids, torch.zeros(8, 64))


def test_no_number_is_no_number() -> None:
    fp8, nvfp4 = Spec("fp8", 16, 128, 128, 128), Spec("nvfp4", 16, 64, block_rows=0)
    for spec in (fp8, nvfp4, *(Spec(name, 16, 64) for name in ("fp8", "mxfp4", "q4_0"))):
        parts = parts_of(spec)
        for part in parts.values():
            part.view(torch.uint8)[3:4].fill_(255)
        for dtype in kernels.DTYPES:
            matrix: Any = BlockMatrix(spec, parts, dtype)
            found = linear_blocks(torch.ones(2, spec.inputs, dtype=dtype), matrix)
            assert torch.equal(found.isnan(), dequantized(spec, parts).sum(1).isnan().expand(2, 16)), spec


def test_every_float_of_8_bits_times_scales_of_both_signs_that_outputs_share() -> None:
    spec = Spec("fp8", 16, 256, 128, 4, scale_dtype=torch.bfloat16)
    codes = torch.arange(256, dtype=torch.uint8).expand(16, 256).clone()
    codes[codes % 128 == 127] = 0
    scales = torch.tensor([[0.37, -1.3], [-3e-3, 700.0], [1.0, 1e-38], [-1e-38, 0.1]]).bfloat16()
    matrix = BlockMatrix(spec, {"codes": codes.view(torch.float8_e4m3fn), "scales": scales}, torch.bfloat16)
    x = torch.eye(256, dtype=torch.bfloat16)
    for rows in (1, 2, 8):  # one input each: products show every weight
        for at in range(0, 256, rows):
            expected = kernels.linear(x[at : at + rows], matrix.dequantized())
            assert torch.equal(linear_blocks(x[at : at + rows], matrix), expected), at


def test_what_is_away_or_scaled_at_odd_places_is_left_to_the_reference() -> None:
    spec = Spec("fp8", 16, 96, group=48)
    x = torch.randn(2, 96)
    assert not kernels.supports_blocks(x, BlockMatrix(spec, parts_of(spec), torch.float32))
    whole = replace(spec, group=0)
    assert kernels.supports_blocks(x, BlockMatrix(whole, parts_of(whole), torch.float32))
    offloaded = {part: values[:1].expand(values.shape) for part, values in parts_of(whole).items()}
    assert not kernels.supports_blocks(x, BlockMatrix(whole, offloaded, torch.float32))


def at_the_end_of_memory(raw: Tensor) -> Tensor:
    """The same bytes, behind which nothing may be read."""
    page = mmap.PAGESIZE
    size = -(-raw.nbytes // page) * page
    memory = mmap.mmap(-1, size + page)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(whole.data_ptr() + size), page, 0) == 0
    return whole[size - raw.nbytes : size].view(raw.dtype).view(raw.shape).copy_(raw)


@pytest.mark.skipif(sys.platform != "linux", reason="pages are protected with mprotect")
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.name}-{spec.block_rows}-{spec.group}-{spec.zeros}")
def test_nothing_is_read_behind_a_matrix(instructions: None, spec: Spec) -> None:
    """Neither behind its codes nor behind its scales."""
    unit = 256 if spec.name == "q1_0" else max(spec.format.values, spec.group, 32)
    eights = spec.zeros or spec.name in ("gptq", "awq")  # of 4 bits: words of eight outputs
    for units in (1, 2, 3, 5, 18, 34) if unit == 32 else (1, 2, 4, 9):
        for outputs in (8, 16, 40) if eights else (1, 2, 5, 18):
            one = replace(spec, outputs=outputs, inputs=unit * units)
            parts = parts_of(one)
            guarded = {part: at_the_end_of_memory(values) for part, values in parts.items()}
            x = torch.randn(70, one.inputs, generator=torch.Generator().manual_seed(1)).bfloat16()
            for product in (lambda x, matrix: kernels.of_blocks(matrix), kernels.int8_product):
                there, last = (product(x, BlockMatrix(one, of, torch.bfloat16)) for of in (parts, guarded))
                for rows in (1, 2, 4, 8, 12, 70) if there is not None else ():
                    found = kernels.linear_of(x[:rows], last)
                    assert torch.equal(found, kernels.linear_of(x[:rows], there)), (one, rows)


@pytest.mark.skipif(sys.platform != "linux", reason="pages are protected with mprotect")
@pytest.mark.parametrize("form", ["int8", "int4_32"])
def test_nothing_is_read_behind_a_packed_matrix(instructions: None, form: str) -> None:
    """Of 4 bits also where halves of the inputs, which share bytes, are no whole groups of the kernel."""
    for inputs in (32, 64, 96, 256, 288, 576, 1024 + 64):
        for outputs in (1, 2, 5, 18):
            raw = torch.randint(-127, 128, (outputs, inputs if form == "int8" else inputs // 2), dtype=torch.int8)
            x = torch.randn(70, inputs, generator=torch.Generator().manual_seed(1)).bfloat16()
            found = []
            for codes in (raw.view(torch.uint8), at_the_end_of_memory(raw.view(torch.uint8))):
                if form == "int8":
                    matrix = kernels.of_plain(codes.view(torch.int8), torch.linspace(0.1, 1, outputs))
                else:
                    scales = torch.linspace(-1, 1, 2 * outputs * inputs // 32).view(2, outputs, -1).half()
                    matrix = kernels.of_int4(x.dtype, codes, scales, 32)
                ways = (matrix, replace(matrix, int8=True))
                found.append([kernels.linear_of(x[:rows], way) for way in ways for rows in (1, 2, 4, 8, 12, 70)])
            assert all(map(torch.equal, *found)), (inputs, outputs)
