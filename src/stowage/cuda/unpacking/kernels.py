"""Triton kernels that turn the bytes of published formats into numbers: the two that ``launch`` calls.

    side_by_side   formats that lie group after group: GGUF's blocks, which hold scale and codes together, MXFP4,
                   NVFP4, int4
    apart          formats in which a row's groups do not: fp8, gptq, awq

``weights.quantized.formats`` describes the layouts and computes the same with torch. A value is computed in float32
with the same operations in the same order, each rounded by itself (``launch`` forbids fused ones), so no bit differs.
What all values of a group share is computed once for the group.

Only ``launch`` imports this; it needs Triton, which is not installed everywhere.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def _half(bytes: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """A float16 at addresses that may be odd."""
    low = tl.load(bytes, mask, other=0).to(tl.uint16)
    high = tl.load(bytes + 1, mask, other=0).to(tl.uint16)
    return (low | (high << 8)).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _power(exponent: tl.tensor) -> tl.tensor:
    """2^(e - 127) of a byte (E8M0; 255 is no number)."""
    wide = exponent.to(tl.int32)
    bits = tl.where(wide == 0, 1 << 22, wide << 23)
    return tl.where(wide == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _fp4(code: tl.tensor) -> tl.tensor:
    """E2M1 in four bits: 0, 0.5, 1, 1.5, 2, 3, 4, 6, and the same below zero."""
    size = code.to(tl.int32) & 7
    small = tl.where(size == 1, 0x3F000000, 0)
    bits = tl.where(size < 2, small, (((size >> 1) + 126) << 23) | ((size & 1) << 22))
    return (bits | ((code.to(tl.int32) >> 3) << 31)).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _fp8(code: tl.tensor) -> tl.tensor:
    """E4M3 without infinities."""
    byte = code.to(tl.int32)
    exponent, rest = (byte >> 3) & 15, byte & 7
    normal = (((exponent + 120) << 23) | (rest << 20)).to(tl.float32, bitcast=True)
    value = tl.where(exponent == 0, rest.to(tl.float32) * 0.001953125, normal)
    bits = value.to(tl.int32, bitcast=True) | ((byte >> 7) << 31)
    return tl.where((byte & 127) == 127, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _not_linear(code: tl.tensor) -> tl.tensor:
    """What a code of IQ4 means: -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113."""
    four = code.to(tl.int32) >> 2
    word = tl.where(four < 2, tl.where(four == 0, -1079142271, -152379953), tl.where(four == 2, 639175937, 1901675829))
    return (word >> (8 * (code.to(tl.int32) & 3))).to(tl.int8).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def side_by_side(
    blocks: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    out: tl.tensor,
    groups: tl.tensor,
    row_groups: tl.tensor,
    wide: tl.tensor,
    FORMAT: tl.constexpr,
    ZEROS: tl.constexpr,
    BYTES: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    """``out`` is ``groups`` of ``WIDTH`` values, one after the other, ``row_groups`` to a row; blocks have ``BYTES``.
    ``scales`` and ``zeros``: of formats that keep them apart; in int4, ``wide`` groups share one. In nvfp4 ``zeros``
    are global scales, which ``wide`` rows share, and divisors if ``ZEROS``. A program takes ``GROUPS`` groups.
    """
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    there = group < groups
    value = tl.arange(0, WIDTH)[None, :]
    mask = there[:, None]
    half_value, high = value % (WIDTH // 2), value // (WIDTH // 2)
    if FORMAT == "int4":
        byte = tl.load((blocks + group * BYTES)[:, None] + value // 2, mask, other=0)
        code = ((byte >> (4 * (value % 2)).to(tl.uint8)) & 15).to(tl.float32)
        scale = tl.load(scales + group // wide, there, other=0).to(tl.float32)
        if ZEROS:
            row = group // row_groups
            at = row // 8 * (row_groups // wide) + group % row_groups // wide
            zero = (tl.load(zeros + at, there, other=0) >> (4 * (row % 8)).to(tl.int32)) & 15
            found = (code - zero.to(tl.float32)[:, None]) * scale[:, None]
        else:
            found = (code - 8.0) * scale[:, None]
    elif FORMAT == "nvfp4":
        byte = tl.load((blocks + group * BYTES)[:, None] + value // 2, mask, other=0)
        scale = _fp8(tl.load(scales + group, there, other=0))
        own = tl.load(zeros + group // row_groups // wide, there, other=1)
        scale = tl.div_rn(scale, own) if ZEROS else scale * own
        found = scale[:, None] * _fp4((byte >> (4 * (value % 2)).to(tl.uint8)) & 15)
    elif FORMAT == "mxfp4" or FORMAT == "mxfp4_block":
        first = blocks + group * BYTES
        if FORMAT == "mxfp4":
            scale = _power(tl.load(scales + group, there, other=0))
            byte = tl.load(first[:, None] + value // 2, mask, other=0)
            code = byte >> (4 * (value % 2)).to(tl.uint8)
        else:
            scale = _power(tl.load(first, there, other=0))
            byte = tl.load(first[:, None] + 1 + half_value, mask, other=0)
            code = byte >> (4 * high).to(tl.uint8)
        found = scale[:, None] * _fp4(code & 15)
    elif FORMAT == "q8_0":
        first = blocks + group * BYTES
        code = tl.load(first[:, None] + 2 + value, mask, other=0).to(tl.int8, bitcast=True)
        found = _half(first, there)[:, None] * code.to(tl.float32)
    elif FORMAT == "q4_k" or FORMAT == "q5_k":
        first = blocks + group // 8 * BYTES
        sub = (group % 8).to(tl.int32)
        within = sub % 4
        low = tl.load(first + 4 + within, there, other=0).to(tl.int32)
        least = tl.load(first + 8 + within, there, other=0).to(tl.int32)
        mixed = tl.load(first + 12 + within, there, other=0).to(tl.int32)
        scale = tl.where(sub < 4, low & 63, (mixed & 15) | ((low >> 6) << 4)).to(tl.float32)
        offset = tl.where(sub < 4, least & 63, (mixed >> 4) | ((least >> 6) << 4)).to(tl.float32)
        CODES: tl.constexpr = 16 if FORMAT == "q4_k" else 48
        at = first + CODES + (sub // 2) * 32
        code = (tl.load(at[:, None] + value, mask, other=0) >> (4 * (sub % 2)).to(tl.uint8)[:, None]) & 15
        if FORMAT == "q5_k":
            bits = tl.load(first[:, None] + 16 + value, mask, other=0) >> sub.to(tl.uint8)[:, None]
            code = code | ((bits & 1) << 4)
        scaled = (_half(first, there) * scale)[:, None] * code.to(tl.float32)
        found = scaled - (_half(first + 2, there) * offset)[:, None]
    elif FORMAT == "iq4_nl":
        first = blocks + group * BYTES
        byte = tl.load(first[:, None] + 2 + half_value, mask, other=0)
        found = _half(first, there)[:, None] * _not_linear((byte >> (4 * high).to(tl.uint8)) & 15)
    elif FORMAT == "iq4_xs":
        first = blocks + group // 8 * BYTES
        sub = (group % 8).to(tl.int32)
        low = tl.load(first + 4 + sub // 2, there, other=0).to(tl.int32) >> (4 * (sub % 2))
        more = tl.load(first + 2 + sub // 4, there, other=0).to(tl.int32) >> (2 * (sub % 4))
        scale = ((low & 15) | ((more & 3) << 4)).to(tl.float32) - 32
        byte = tl.load((first + 8 + sub * 16)[:, None] + half_value, mask, other=0)
        found = (_half(first, there) * scale)[:, None] * _not_linear((byte >> (4 * high).to(tl.uint8)) & 15)
    elif FORMAT == "q2_k" or FORMAT == "q3_k":
        first = blocks + group // 16 * BYTES
        sub = (group % 16).to(tl.int32)
        quarter, side = (sub % 8) // 2, sub % 2 * 16
        CODES_AT: tl.constexpr = 16 if FORMAT == "q2_k" else 32
        at = first + CODES_AT + sub // 8 * 32 + side
        code = (tl.load(at[:, None] + value, mask, other=0) >> (2 * quarter).to(tl.uint8)[:, None]) & 3
        if FORMAT == "q2_k":
            both = tl.load(first + sub, there, other=0)
            scaled = (_half(first + 80, there) * (both & 15).to(tl.float32))[:, None] * code.to(tl.float32)
            found = scaled - (_half(first + 82, there) * (both >> 4).to(tl.float32))[:, None]
        else:
            bits = tl.load((first + side)[:, None] + value, mask, other=0) >> (sub // 2).to(tl.uint8)[:, None]
            low = tl.load(first + 96 + sub % 8, there, other=0).to(tl.int32) >> (4 * (sub // 8))
            more = tl.load(first + 104 + sub % 4, there, other=0).to(tl.int32) >> (2 * (sub // 4))
            scale = ((low & 15) | ((more & 3) << 4)).to(tl.float32) - 32
            found = (_half(first + 108, there) * scale)[:, None] * ((code | ((bits & 1) << 2)).to(tl.float32) - 4)
    elif FORMAT == "q6_k":
        first = blocks + group // 16 * BYTES
        sub = (group % 16).to(tl.int32)
        part, quarter, side = sub // 8, (sub % 8) // 2, (sub % 2) * 16
        low_at = first + part * 64 + (quarter % 2) * 32 + side
        low = (tl.load(low_at[:, None] + value, mask, other=0) >> (4 * (quarter // 2)).to(tl.uint8)[:, None]) & 15
        high_at = first + 128 + part * 32 + side
        bits = (tl.load(high_at[:, None] + value, mask, other=0) >> (2 * quarter).to(tl.uint8)[:, None]) & 3
        code = (low | (bits << 4)).to(tl.float32) - 32
        scale = tl.load(first + 192 + sub, there, other=0).to(tl.int8, bitcast=True).to(tl.float32)
        found = (_half(first + 208, there) * scale)[:, None] * code
    else:  # q4_0, q4_1, q5_0, q5_1
        first = blocks + group * BYTES
        LEAST: tl.constexpr = 2 if FORMAT == "q4_1" or FORMAT == "q5_1" else 0
        FIFTH: tl.constexpr = 4 if FORMAT == "q5_0" or FORMAT == "q5_1" else 0
        at = first + 2 + LEAST + FIFTH
        code = (tl.load(at[:, None] + half_value, mask, other=0) >> (4 * high).to(tl.uint8)) & 15
        if FIFTH:
            bits = tl.load((first + 2 + LEAST)[:, None] + value // 8, mask, other=0) >> (value % 8).to(tl.uint8)
            code = code | ((bits & 1) << 4)
        scale = _half(first, there)[:, None]
        if LEAST:
            found = scale * code.to(tl.float32) + _half(first + 2, there)[:, None]
        else:
            found = scale * (code.to(tl.float32) - (16 if FIFTH else 8))
    tl.store(out + group[:, None] * WIDTH + value, found.to(out.dtype.element_ty), mask)


@triton.jit  # type: ignore[untyped-decorator]
def apart(
    codes: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    out: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.tensor,
    codes_row: tl.tensor,
    scales_row: tl.tensor,
    zeros_row: tl.tensor,
    wide: tl.tensor,
    high: tl.tensor,
    FORMAT: tl.constexpr,
    POWERS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """``out`` is ``outputs`` x ``inputs``; ``*_row``: from one row of a part to the next, in elements. ``wide`` inputs
    and ``high`` outputs share a scale. A program takes ``ROWS`` outputs and ``COLUMNS`` inputs, which share one.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    begin = tl.program_id(1) * COLUMNS
    column = begin + tl.arange(0, COLUMNS)[None, :]
    group = begin // wide
    there = row < outputs
    mask = there[:, None] & (column < inputs)
    if FORMAT == "fp8" or FORMAT == "s8" or FORMAT == "u8":
        scale = tl.load(scales + (row // high) * scales_row + group, there, other=0)
    else:
        scale = tl.load(scales + group * scales_row + row, there, other=0)
    scale = _power(scale) if POWERS else scale.to(tl.float32)
    if FORMAT == "fp8" or FORMAT == "s8" or FORMAT == "u8":
        byte = tl.load(codes + row[:, None] * codes_row + column, mask, other=0)
        if FORMAT == "fp8":
            code = _fp8(byte)
        elif FORMAT == "s8":
            code = byte.to(tl.int8, bitcast=True).to(tl.float32)
        else:
            code = byte.to(tl.float32) - 128.0
        found = code * scale[:, None]
    else:
        eighth = (row % 8).to(tl.int32)
        if FORMAT == "awq":
            eighth = eighth // 2 + 4 * (eighth % 2)
            words = codes + column * codes_row + (row // 8)[:, None]
            code = (tl.load(words, mask, other=0) >> (4 * eighth)[:, None]) & 15
        else:
            words = codes + column // 8 * codes_row + row[:, None]
            code = (tl.load(words, mask, other=0) >> (4 * (column % 8))) & 15
        zero = tl.load(zeros + group * zeros_row + row // 8, there, other=0)
        if FORMAT == "gptq":
            zero = zero + 0x11111111  # all of a word's at once: see _gptq in weights/quantized/formats.py
        zero = ((zero >> (4 * eighth)) & 15).to(tl.float32)
        found = (code.to(tl.float32) - zero[:, None]) * scale[:, None]
    tl.store(out + row[:, None] * inputs + column, found.to(out.dtype.element_ty), mask)
