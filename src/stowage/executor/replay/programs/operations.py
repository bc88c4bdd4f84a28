"""Lowers the calls of a traced step to operations of the kernels, where the kernels can make them.

    add sub mul neg             numbers, rounded once          cat stack contiguous to ...   copies
    silu gelu ... of bfloat16   a table of all results         linear, experts, norm         the kernels

``encoding`` is how operations are written. Only float32 and bfloat16 are known here. Every operation is bit-identical
to torch: a sum or a product has one correctly rounded result, and an elementwise function of bfloat16 has a table of
all its results, which the function itself has made.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from stowage.executor import kernels
from stowage.executor.determinism.row_invariance import RowInvariance, is_elementwise
from stowage.executor.format_numbers import number_of
from stowage.executor.fused.norms import norm_of
from stowage.executor.fused.rotary import Rotary
from stowage.executor.replay.backend import CaptureError
from stowage.executor.replay.calls.call_list import ARRIVAL, PART, WHOLE, TracedCall, arguments_of, linears
from stowage.executor.replay.calls.recordable import ALLOWED, has_tensor
from stowage.executor.replay.programs.buffers import Address, Buffers
from stowage.executor.replay.programs.encoding import (
    ADD,
    COPY,
    LINEAR,
    LOOK_UP,
    LOOK_UP_ROWS,
    MULTIPLY,
    NEGATE,
    NORM,
    NOWHERE,
    ROTATE,
    STACKED,
    SUBTRACT,
    Operand,
    Operation,
    UnsupportedCall,
    bits,
    check,
    folded,
    new,
    pointwise,
    read,
    whole,
)
from stowage.weights.offloaded_parameter import OffloadedParameter

_IN_ORDER = 4
_ROWS_OF_EXPERT = 2
"""With one row per two experts a few experts are chosen twice; with more rows, reading them repeatedly is slower."""
_BINARY = {"add": ADD, "__add__": ADD, "__radd__": ADD, "sub": SUBTRACT, "subtract": SUBTRACT}
_BINARY |= {"__sub__": SUBTRACT, "mul": MULTIPLY, "multiply": MULTIPLY, "__mul__": MULTIPLY, "__rmul__": MULTIPLY}
_NEGATIONS = frozenset("neg negative __neg__".split())
_COPIES = frozenset("contiguous clone reshape flatten to float bfloat16 type type_as".split())
_CLAMPS = frozenset("clamp clamp_min clamp_max".split())
_JOINTS = frozenset("cat concat concatenate stack".split())


def operations(buffers: Buffers, call: TracedCall) -> list[Operation] | None:
    """Operations of ``call``: none for a view; ``None``: it stays a Python call. Called for each call, in turn."""
    found = buffers.step.objects.get(call.result)
    if call.name == ARRIVAL:
        buffers.forget(found)
    for value in (buffers.step.values[index] for index in call.arguments):
        if isinstance(value, Tensor):
            buffers.address_of(value)
    if call.name == WHOLE or _is_view(buffers, call, found):
        return []
    count = buffers.count
    try:
        return _lowered(buffers, call, found)
    except UnsupportedCall:
        buffers.undo(count)
        buffers.called(found)
        return None


def _is_view(buffers: Buffers, call: TracedCall, found: Any) -> bool:
    if call.name != PART and call.name not in ALLOWED:
        return False
    parts = found if isinstance(found, (tuple, list)) else (found,)
    return all(isinstance(part, Tensor) and buffers.buffer(part) is not None for part in parts)


def _lowered(buffers: Buffers, call: TracedCall, found: Any) -> list[Operation]:
    function, args, keywords = arguments_of(call.function, [buffers.at(index) for index in call.arguments])
    if call.name == "linear":
        return _linear(buffers, function, args, found)
    if function is Rotary.compute:
        return _rotated(buffers, args, found)
    if not buffers.is_new(found):
        raise UnsupportedCall
    if call.name == "embedding":
        return [_embedded(buffers, args, keywords, found)]
    if (norm := norm_of(function, args)) is not None:
        return _norm(buffers, *norm, found)
    if call.name in _BINARY and len(args) == 2 and not keywords:
        return [_two(buffers, _BINARY[call.name], args[0], args[1], found)]
    if call.name in _NEGATIONS and len(args) == 1:
        return [pointwise(found.shape, NEGATE, new(buffers, found), read(buffers, args[0], found.shape))]
    if call.name in _COPIES and _is_widened_weight(buffers, call, args[0], found):
        buffers.narrow[id(found)] = args[0]
        return []
    if call.name in _COPIES:
        return [_copied(buffers, args[0], found)]
    if call.name in _JOINTS:
        dim = keywords.get("dim", args[1] if len(args) > 1 else 0)
        return _joined(buffers, args[0], dim, found, stacked=call.name == "stack")
    if call.name == "stacked_linear":
        return _stacked(buffers, function, args, found)
    if call.name == "repeat_interleave" and len(args) == 2 and keywords == {"dim": 0} and isinstance(args[1], int):
        return [_repeated(buffers, args[0], args[1], found)]
    if call.name == "sum" and len(args) == 1 and keywords == {"dim": 1}:
        return _added(buffers, args[0], found)
    if is_elementwise(function) or (call.name in _CLAMPS and not has_tensor(keywords)):
        return [_looked_up(buffers, call.function, args, found)]
    raise UnsupportedCall


def _two(buffers: Buffers, way: int, a: Any, b: Any, out: Tensor) -> Operation:
    """``out`` from ``a`` and ``b``, a tensor or a number. torch rounds a number that is added to the type of ``a``, and
    multiplies with an unrounded one.
    """
    if isinstance(b, (int, float)) and not isinstance(b, bool) and buffers.is_ours(a):
        b = torch.tensor(b, dtype=torch.float32 if way == MULTIPLY else a.dtype).float()
        types = {a.dtype}
    else:
        check(buffers.is_ours(a) and buffers.is_ours(b))
        types = {a.dtype, b.dtype}
        check(len(types) == 1 or (a.dim() > 0 and b.dim() > 0))  # else the type of one alone is the result's
    check(out.dtype is (types.pop() if len(types) == 1 else torch.float32))
    sides = read(buffers, a, out.shape), read(buffers, b, out.shape)
    return pointwise(out.shape, way, new(buffers, out), *sides)


def _copied(buffers: Buffers, x: Any, out: Tensor) -> Operation:
    side, end = read(buffers, x, x.shape if isinstance(x, Tensor) else ()), new(buffers, out)
    if out.shape != x.shape:  # a copy in row-major order
        check(out.is_contiguous())
        end = end._replace(strides=whole(x.shape))
    return pointwise(x.shape, COPY, end, side)


def _is_widened_weight(buffers: Buffers, call: TracedCall, x: Any, out: Tensor) -> bool:
    """Whether ``out`` is a whole parameter converted to float32 that only linear layers use, as routers do."""
    users = [one for one in buffers.step.calls if call.result in one.arguments]
    wide = isinstance(x, Parameter) and x.dtype is torch.bfloat16 and out.dtype is torch.float32
    plain = wide and x.dim() == 2 and x.shape == out.shape and buffers.is_ours(x) and x.stride(1) == 1
    return plain and all(one.name == "linear" and one.arguments[1:] == (call.result,) for one in users)


def _joined(buffers: Buffers, parts: Any, dim: Any, out: Tensor, *, stacked: bool) -> list[Operation]:
    check(isinstance(parts, (tuple, list)) and isinstance(dim, int))
    parts = [part for part in parts if part.numel()]
    check(all(map(buffers.is_ours, parts)))
    if stacked:
        parts = [part.unsqueeze(dim) for part in parts]
    check(all(part.dim() == out.dim() for part in parts))
    buffers.made(out)
    done: list[Operation] = []
    begin = 0
    for part in parts:
        there = out.narrow(dim, begin, part.shape[dim])
        begin += part.shape[dim]
        done.append(pointwise(part.shape, COPY, new(buffers, there), read(buffers, part, part.shape)))
    return done


def _looked_up(buffers: Buffers, function: Any, args: list[Any], out: Tensor) -> Operation:
    """An elementwise function, as a look-up in the table of its results."""
    x, *more = args
    check(buffers.is_ours(x) and x.dtype is torch.bfloat16 and out.dtype is torch.bfloat16 and x.shape == out.shape)
    check(not any(isinstance(part, Tensor) for part in more))
    keywords = tuple(function.keywords.items()) if isinstance(function, partial) else ()
    key = (function.func if isinstance(function, partial) else function, keywords, *more)
    if key not in buffers.tables:
        every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
        buffers.tables[key] = function(every, *more)
    table = Operand(buffers.address_of(buffers.tables[key]), torch.bfloat16, (0,) * x.dim())
    return pointwise(out.shape, LOOK_UP, new(buffers, out), read(buffers, x, out.shape), table)


def _embedded(buffers: Buffers, args: list[Any], keywords: dict[str, Any], out: Tensor) -> Operation:
    """Rows of a parameter, or of a matrix in a published format, by token ids."""
    ids, table = args[:2]
    check(keywords.get("max_norm", args[3] if len(args) > 3 else None) is None)  # it changes the rows that are read
    check(out.is_contiguous() and ids.dtype is torch.int64 and ids.is_contiguous() and buffers.buffer(ids) is not None)
    if kernels.supports_lookup(ids, table):
        form, narrow, rows = number_of(table.spec.name), int(out.dtype is torch.bfloat16), table.parts[""]
        row, numbers = rows.stride(0), out.shape[-1]
    else:
        check(buffers.is_ours(table) and table.dim() == 2 and table.stride(1) == 1 and table.dtype is out.dtype)
        form, narrow, rows = 0, 0, table
        row, numbers = table.stride(0) * table.element_size(), out.shape[-1] * out.element_size()
    words = (buffers.made(out), buffers.address_of(rows), buffers.address_of(ids), ids.numel(), rows.shape[0])
    return Operation((LOOK_UP_ROWS, *words, numbers, row, form, narrow, 0))


def _linear(buffers: Buffers, function: Any, args: list[Any], found: Any) -> list[Operation]:
    """A linear layer, or several that are computed together."""
    if function is linears:
        matrices, outs, bias = [kernels.of_plain(weight) for weight in args[1:]], found, None
    else:
        check(getattr(function, "__func__", None) is RowInvariance.alone)
        matrix = function.__self__.matrix(*args[:2])
        few = function.__self__.exact or kernels.has_few_rows(args[0])
        if few and id(args[1]) in buffers.narrow and args[0].dtype is torch.float32:
            matrix = kernels.of_plain(buffers.narrow[id(args[1])])
        check(matrix is not None)
        matrices, outs, bias = [matrix], [found], args[2] if len(args) > 2 else None
    x = args[0]
    form, halves = kernels.form_of(x, matrices[0])
    check(buffers.is_ours(x) and all(map(buffers.is_new, outs)) and (halves or x.dtype is torch.float32))
    inputs, rows, group = x.shape[-1], x.numel() // x.shape[-1], matrices[0].group
    begin, row, done = *_rows(buffers, x), []
    if row is None or (matrices[0].form and row != inputs):
        begin, row = buffers.temporary(x.nbytes), inputs
        copy = Operand(begin, x.dtype, whole(x.shape))
        done = [pointwise(x.shape, COPY, copy, read(buffers, x, x.shape))]
    ends = [buffers.made(out) for out in outs] if bias is None else [buffers.temporary(rows * matrices[0].outputs * 4)]
    common = begin, rows, inputs, row, group, form, int(halves and bias is None)
    done.append(Operation((LINEAR, *_layers(buffers, common, matrices, ends))))
    if bias is not None:
        sums, out = Operand(ends[0], torch.float32, whole(outs[0].shape)), new(buffers, outs[0])
        done.append(pointwise(outs[0].shape, ADD, out, sums, read(buffers, bias, outs[0].shape)))
    return done


def _layers(
    buffers: Buffers, common: tuple[int | Address, ...], matrices: Sequence[kernels.Matrix], ends: Sequence[Address]
) -> list[int | Address]:
    """Linear layers of one input each, or all of the same rows."""
    words: list[int | Address] = [len(ends), *common]
    for matrix, end in zip(matrices, ends, strict=True):
        words += [buffers.address_of(matrix.codes), *_optional(buffers, matrix.scales), end, matrix.outputs, matrix.row]
        words += [matrix.form, *_optional(buffers, matrix.zeros), matrix.block_rows, matrix.kind]
    return words


def _stacked(buffers: Buffers, function: Any, args: list[Any], out: Tensor) -> list[Operation]:
    """Rows times the matrices of their chosen experts, plus biases. Each row reads its expert's matrix by itself; where
    there are so many rows that experts are shared, the Python call is kept, which reads a matrix once for all its rows.
    """
    if buffers.any_rows:
        raise CaptureError("experts are computed in another way where rows are many")
    check(getattr(function, "__func__", None) is RowInvariance.stacked and len(args) == 4)
    x, module, own, chosen = args
    if _ROWS_OF_EXPERT * len(x) > module.num_experts:
        raise UnsupportedCall
    stack = getattr(module, own)
    parts = [part for piece in getattr(stack, "pieces", ()) for part in piece.values()]
    check(bool(parts) and not any(isinstance(part, OffloadedParameter) for part in parts))  # its address is constant
    stacks = function.__self__.stacks(x, module, own)
    if stacks is None or len(stacks) > kernels.TOGETHER:
        raise UnsupportedCall
    check(buffers.is_ours(x) and x.is_contiguous())
    check(chosen.dtype is torch.int64 and chosen.is_contiguous() and buffers.buffer(chosen) is not None)
    form, halves = kernels.form_of(x, stacks[0].first)
    check(halves or x.dtype is torch.float32)
    rows, inputs = x.shape
    wide = [stack.first.outputs for stack in stacks]
    interleaved = len(stacks) > 1 and stack.how.interleaved
    begin = buffers.made(out)
    if interleaved:
        ends = [buffers.temporary(rows * outputs * out.element_size()) for outputs in wide]
    else:
        at = [sum(wide[:number]) * out.element_size() for number in range(len(wide))]
        ends = [begin._replace(offset=begin.offset + offset) for offset in at]
    common = buffers.address_of(x), rows, inputs, inputs, stacks[0].first.group, form, int(halves)
    words: list[int | Address] = [STACKED, module.num_experts, buffers.address_of(chosen)]
    words += _layers(buffers, common, [stack.first for stack in stacks], ends)
    for stack, outputs in zip(stacks, wide, strict=True):
        words += [(outputs if interleaved else sum(wide)) * out.element_size(), *stack.apart]
    done = [Operation(tuple(words))]
    for number, end in enumerate(ends if interleaved else ()):
        there = out[:, number :: len(ends)]
        done.append(pointwise(there.shape, COPY, new(buffers, there), Operand(end, out.dtype, whole(there.shape))))
    if module.has_bias:
        done += _plus_rows(buffers, getattr(module, f"{own}_bias"), chosen, out)
    return done


def _plus_rows(buffers: Buffers, table: Tensor, chosen: Tensor, out: Tensor) -> list[Operation]:
    """Add the ``chosen`` rows of ``table`` to ``out``; a missing row counts as zeros."""
    check(buffers.is_ours(table) and table.is_contiguous() and table.dtype is out.dtype)
    nbytes = out.shape[1] * out.element_size()
    picked = buffers.temporary(len(chosen) * nbytes)
    words = (picked, buffers.address_of(table), buffers.address_of(chosen), len(chosen), len(table))
    rows = Operand(picked, out.dtype, whole(out.shape))
    picks = Operation((LOOK_UP_ROWS, *words, nbytes, nbytes, 0, 0, 1))
    return [picks, pointwise(out.shape, ADD, new(buffers, out), new(buffers, out), rows)]


def _rotated(buffers: Buffers, args: Sequence[Any], found: Any) -> list[Operation]:
    """``rotary.rotated``."""
    q, k, cos, sin = args
    pairs = list(zip((q, k), found, strict=True))
    check(all(map(buffers.is_ours, (q, k, cos, sin))) and all(map(buffers.is_new, found)))
    check(cos.is_contiguous() and sin.is_contiguous() and q.stride(3) == k.stride(3) == 1)
    tokens, width = q.shape[2:]
    words: list[int | Address] = [ROTATE, buffers.address_of(cos), buffers.address_of(sin)]
    words += [tokens, width, int(q.dtype is torch.bfloat16)]
    for x, out in pairs:
        words += [buffers.address_of(x), buffers.made(out), x.shape[1], x.stride(2), x.stride(1)]
    return [Operation(tuple(words))]


def _repeated(buffers: Buffers, x: Tensor, times: int, out: Tensor) -> Operation:
    """Each row of ``x`` repeated ``times`` times, one after the other."""
    shape = (len(x), times, *x.shape[1:])
    check(buffers.is_ours(x))
    return pointwise(shape, COPY, new(buffers, out)._replace(strides=whole(shape)), read(buffers, x[:, None], shape))


def _added(buffers: Buffers, x: Tensor, out: Tensor) -> list[Operation]:
    """``out``: the sum over the second of three dimensions. Up to four numbers torch adds to 0 in their order, in
    float32, whatever vectors and threads it uses.
    """
    check(buffers.is_ours(x) and x.dim() == 3 and x.dtype is out.dtype and x.shape[1] <= _IN_ORDER)
    sums = Operand(buffers.temporary(out.numel() * 4), torch.float32, whole(out.shape))
    done, before = [], read(buffers, torch.zeros(()), out.shape)
    for at in range(x.shape[1]):
        to = sums if at < x.shape[1] - 1 else new(buffers, out)
        done.append(pointwise(out.shape, ADD, to, read(buffers, x[:, at], out.shape), before))
        before = sums
    return done


def _optional(buffers: Buffers, tensor: Tensor | None) -> Sequence[int | Address]:
    return NOWHERE if tensor is None else (buffers.address_of(tensor),)


def _norm(
    buffers: Buffers, x: Tensor, weight: Tensor, eps: float, more: float, rounded: bool, out: Tensor
) -> list[Operation]:
    """The norm of contiguous rows, in any order of memory; ``out`` has the same order."""
    check(buffers.is_ours(x) and x.stride() == out.stride())
    rows = x.numel() // weight.shape[0]
    check(x.is_contiguous() or (x.dim() == 4 and x.transpose(1, 2).is_contiguous()))
    half, way = int(x.dtype is torch.bfloat16), 0 if rounded else 1
    addresses = buffers.address_of(x), buffers.address_of(weight), buffers.made(out)
    return [Operation((NORM, *addresses, rows, weight.shape[0], bits(eps), bits(more), half, way))]


def _rows(buffers: Buffers, x: Tensor) -> tuple[Address, int | None]:
    """Address and stride of the rows of ``x``; ``None``: no constant stride, or rows that are not contiguous."""
    begin = buffers.address_of(x)
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        return begin, None
    _, (strides,) = folded(x.shape[:-1], [x.stride()[:-1]])
    return begin, strides[0] if len(strides) == 1 else None if strides else x.shape[-1]
