"""Stacked experts in the format in which they were published, and how a module computes with those that are chosen.

    few tokens    all experts' products in one call (``stacked_linear``), which can be recorded
    many tokens   one expert after the other, so that only one expert's activations are in memory
    Llama 4       Transformers' own forward gives every expert all tokens, those that did not choose it as zeros: rows
                  of zeros are not multiplied (``multiply_experts``)

A token's experts are always added up as in Transformers' grouped products. Where experts are delivered one by one
(``arriving``), those in memory are computed first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from stowage.weights.quantized.blocks import (
    BlockMatrix,
    BlockRows,
    Packing,
    exchange,
    matrix_of,
    parameter_names,
    parts_of,
    register,
)
from stowage.weights.quantized.codes import Form, PackedMatrix
from stowage.weights.quantized.formats import Spec

DOWN: Final = "down_proj"
"""The stack of the experts' last matrices."""
Run = tuple[int, int, int]
"""An expert, and the begin and end of its rows."""
_ROWS_FEW: Final = 512
"""Up to this number of (token, expert) pairs are computed in one call."""


@dataclass(frozen=True, slots=True)
class Stacking:
    """How a stack of experts is kept: each matrix as ``pieces`` of ``spec``, concatenated along the outputs or, if
    ``interleaved``, with alternating rows. ``transposed``: the module expects matrices (inputs, outputs).
    """

    spec: Packing
    transposed: bool = False
    pieces: int = 1
    interleaved: bool = False


class BlockStack:
    """A stack of experts that a module's loop indexes. ``pieces``: for each piece its parts, (experts, ...)."""

    __slots__ = ("dtype", "how", "pieces")

    def __init__(self, how: Stacking, pieces: Sequence[Mapping[str, Tensor]], dtype: torch.dtype) -> None:
        self.how, self.pieces, self.dtype = how, pieces, dtype

    def __getitem__(self, expert: Tensor | int) -> PackedMatrix:
        number = int(expert)
        own = [{part: values[number] for part, values in parts.items()} for parts in self.pieces]
        spec, transposed = self.how.spec, self.how.transposed
        if len(own) == 1:
            return matrix_of(spec, own[0], self.dtype, transposed)
        assert isinstance(spec, Spec), "forms of ours have one piece"
        return BlockRows([BlockMatrix(spec, parts, self.dtype, transposed) for parts in own], self.how.interleaved)

    @property
    def is_here(self) -> bool:
        """Whether the bytes are in memory: an offloaded parameter is not contiguous."""
        return all(part.is_contiguous() for parts in self.pieces for part in parts.values())

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(next(iter(self.pieces[0].values()))), *self[0].shape))

    @classmethod
    def __torch_function__(cls, function: Any, _types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """``torch.bmm`` of modules that give every expert all tokens. Torch function modes come first."""
        if function is not torch.bmm or kwargs or not isinstance(args[1], cls):
            return NotImplemented
        return args[1].multiply_each(args[0], expert_linear)

    def multiply_each(self, x: Tensor, linear: Callable[..., Tensor]) -> Tensor:
        """``multiply_experts`` with these matrices, each product by ``linear``."""
        return multiply_experts(x, self.shape[2], lambda rows, expert: linear(rows, self[expert].as_linear_weight()))


def has_transposed_experts(module: Any) -> bool:
    """Whether a module's experts are matrices (inputs, outputs). Llama 4's are, without an attribute for it."""
    return bool(getattr(module, "is_transposed", type(module).__name__ == "Llama4TextExperts"))


def multiply_experts(x: Tensor, outputs: int, multiply: Callable[[Tensor, int], Tensor]) -> Tensor:
    """The product (experts, tokens, ``outputs``) of ``x`` (experts, tokens, inputs) with each expert's matrix, by
    ``multiply(rows, expert)``. Rows of zeros, of tokens that did not choose the expert, are left out: they stay zeros.
    """
    out, chosen = x.new_zeros(*x.shape[:2], outputs), dict[int, list[int]]()
    for expert, row in x.ne(0).any(-1).nonzero().tolist():
        chosen.setdefault(expert, []).append(row)
    for expert, rows in chosen.items():
        out[expert, rows] = multiply(x[expert, rows], expert)
    return out


def put_stacks(module: nn.Module, stacks: Mapping[str, Stacking], dtype: torch.dtype) -> None:
    """Replace the named stacks of experts of ``module`` by parameters on the meta device. The module then multiplies
    with
    one expert after the other.
    """
    plain: Any = type(module)
    for own, how in stacks.items():
        experts = len(getattr(module, own))
        delattr(module, own)
        for piece in _pieces(own, how):
            register(module, how.spec, piece, (experts,))
    module._is_hf_initialized = True  # type: ignore[assignment]  # see above
    module.__class__ = _with_stacks(plain, dtype, tuple(sorted(stacks.items())))


def stackings(module: nn.Module) -> Mapping[str, Stacking]:
    """How each of the module's stacks is kept, by name; none: it has no such stacks."""
    return getattr(type(module), "stackings", {})


def put_other_stacks(module: nn.Module, stacks: Mapping[str, tuple[Packing, Sequence[Mapping[str, Tensor]]]]) -> None:
    """Have the same experts as pieces in another format: its spec, and the parts of each piece."""
    hows = dict(stackings(module))
    for own, (spec, pieces) in stacks.items():
        for piece, parts in zip(_pieces(own, hows[own]), pieces, strict=True):
            exchange(module, parameter_names(hows[own].spec, piece), parameter_names(spec, piece), parts)
        hows[own] = replace(hows[own], spec=spec)
    members: Any = type(module)
    module.__class__ = _with_stacks(members.__base__, members.values_dtype, tuple(sorted(hows.items())))


def _pieces(own: str, how: Stacking) -> list[str]:
    """What the parameters of each piece of the stack ``own`` are named after."""
    return [own] if how.pieces == 1 else [f"{own}_{number}" for number in range(how.pieces)]


@functools.lru_cache(maxsize=256)
def _with_stacks(plain: Any, dtype: torch.dtype, stacks: tuple[tuple[str, Stacking], ...]) -> type[nn.Module]:
    def stack_of(own: str, how: Stacking) -> property:
        names = [parameter_names(how.spec, piece) for piece in _pieces(own, how)]
        return property(lambda self: BlockStack(how, [parts_of(self, n) for n in names], dtype))

    members: dict[str, Any] = {own: stack_of(own, how) for own, how in stacks}
    members |= {"block_specs": tuple(how.spec for _, how in stacks), "stackings": dict(stacks), "values_dtype": dtype}
    if not hasattr(plain.forward, "__wrapped__"):  # every expert gets all tokens
        return type(f"Block{plain.__name__}", (plain,), members)
    own_loop = plain.forward.__wrapped__
    if any(isinstance(how.spec, Form) for _, how in stacks):  # computed as Transformers does, one after the other
        members["forward"] = own_loop
        return type(f"Block{plain.__name__}", (plain,), members)

    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        whole = _forward_grouped if _is_grouped(self) else own_loop
        result: Tensor = whole(self, hidden_states, top_k_index, top_k_weights)
        return result

    members["forward"], members["bears_gaps"] = forward, True  # it reads one expert at a time
    return type(f"Block{plain.__name__}", (plain,), members)


def computes_one_by_one(module: nn.Module) -> bool:
    """Whether ``module`` reads experts one by one from such stacks, in any order: in that of
    ``module.arriving(experts)``,
    if it has that attribute.
    """
    return bool(getattr(type(module), "bears_gaps", False)) and _is_grouped(module)


def _is_grouped(module: Any) -> bool:
    """Whether Transformers would multiply with these experts by grouped or batched products."""
    known = all(hasattr(module, name) for name in ("num_experts", "has_gate", "has_bias", "is_transposed", "config"))
    return known and getattr(module.config, "_experts_implementation", None) in ("grouped_mm", "batched_mm")


def _forward_grouped(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The forward of a module of experts. Adds a token's experts as Transformers' grouped products do: in the order of
    choice, before rounding (Transformers, ``integrations/moe.py``).
    """
    product = _of_few if top_k_index.numel() <= _ROWS_FEW else _of_many
    weighted = product(module, hidden_states, top_k_index) * top_k_weights.reshape(-1, 1)
    return weighted.view(*top_k_index.shape, -1).sum(dim=1).to(hidden_states.dtype)


def _of_few(module: Any, hidden_states: Tensor, top_k_index: Tensor) -> Tensor:
    """The outputs of the chosen experts (tokens x experts per token, outputs), all in one call per stack."""
    chosen = top_k_index.reshape(-1)
    rows = hidden_states.repeat_interleave(top_k_index.shape[-1], dim=0)
    wide = stacked_linear(rows, module, _first(module), chosen)
    return stacked_linear(_gated(module, wide), module, DOWN, chosen)


def _of_many(module: Any, hidden_states: Tensor, top_k_index: Tensor) -> Tensor:
    """The same, one expert after the other."""
    chosen = top_k_index.reshape(-1)
    out = hidden_states.new_zeros(len(chosen), hidden_states.shape[-1])
    for expert in _in_turn(module, {e for e in chosen.tolist() if 0 <= e < module.num_experts}):
        rows = (chosen == expert).nonzero()[:, 0]
        wide = up_projection(module, expert, hidden_states[rows // top_k_index.shape[-1]])
        out[rows] = projected(module, DOWN, expert, wide)
    return out


@functools.lru_cache(maxsize=64)
def has_grouped_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch has a grouped kernel, ``torch._grouped_mm``, on ``device``. On an H100 (compute capability 9) a row
    of it did not depend on the expert's other rows; elsewhere torch multiplies one expert after the other.
    """
    return device.type == "cuda" and dtype is torch.bfloat16 and torch.cuda.get_device_capability(device)[0] == 9


def expert_linear(x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
    """A linear layer of an expert: by the grouped kernel where there is one, since in a plain product the order of
    torch's sums depends on the number of rows.
    """
    if not has_grouped_products(x.device, x.dtype):
        return nn.functional.linear(x, weight, bias)
    if isinstance(weight, PackedMatrix):
        return weight.multiply(x, bias, expert_linear)
    ends = torch.full((1,), len(x), dtype=torch.int32, device=x.device)
    found = torch._grouped_mm(x, weight.t()[None], offs=ends)
    return found if bias is None else found + bias


def one_by_one(x: Tensor, module: Any, own: str, runs: Iterable[Run], linear: Any = expert_linear) -> Tensor:
    """The product (rows, outputs) of ``x`` (rows, inputs), each run of rows with its expert of ``own``; no biases."""
    found = {begin: linear(x[begin:end], weight_of(module, own, expert)) for expert, begin, end in runs}
    return torch.cat([found[begin] for begin in sorted(found)] or [linear(x, weight_of(module, own, 0))])


def stacked_linear(
    x: Tensor, module: Any, own: str, chosen: Tensor, multiply: Callable[..., Tensor] = one_by_one
) -> Tensor:
    """The product (rows, outputs) of ``x`` (rows, inputs), each row with the expert ``chosen`` (rows) of the module's
    stack ``own``, plus its bias. Experts that the module does not have give zeros. ``multiply``: as `one_by_one`; torch
    function modes pass their own.
    """
    if has_torch_function((x,)):
        found: Tensor = handle_torch_function(stacked_linear, (x,), x, module, own, chosen)
        return found
    numbers = chosen.tolist()
    order = sorted((row for row, e in enumerate(numbers) if 0 <= e < module.num_experts), key=numbers.__getitem__)
    spans: dict[int, tuple[int, int]] = {}
    for at, row in enumerate(order):
        spans[numbers[row]] = (spans.get(numbers[row], (at, at))[0], at + 1)
    in_order = order == list(range(len(numbers)))
    runs = ((expert, *spans[expert]) for expert in _in_turn(module, spans))
    out = multiply(x if in_order else x[order], module, own, runs)
    if module.has_bias:
        out += getattr(module, f"{own}_bias")[[numbers[row] for row in order]]
    if in_order:
        return out
    whole = out.new_zeros(len(numbers), out.shape[1])
    whole[order] = out
    return whole


def _in_turn(module: Any, experts: Iterable[int]) -> Iterable[int]:
    """``experts`` in the order in which they are delivered, if they are delivered one by one, else by number."""
    ordered = sorted(experts)
    return module.arriving(ordered) if hasattr(module, "arriving") else ordered


def up_projection(module: Any, expert: int, x: Tensor) -> Tensor:
    """The activations of one expert for ``x`` (tokens, inputs) before its last product."""
    return _gated(module, projected(module, _first(module), expert, x))


def _first(module: Any) -> str:
    """The stack of the experts' first matrices."""
    return "gate_up_proj" if module.has_gate else "up_proj"


def _gated(module: Any, wide: Tensor) -> Tensor:
    inner: Tensor = module._apply_gate(wide) if module.has_gate else module.act_fn(wide)
    return inner


def projected(module: Any, own: str, expert: int, x: Tensor) -> Tensor:
    """The product (tokens, outputs) of ``x`` (tokens, inputs) with one expert of the stack ``own``, plus its bias."""
    out = expert_linear(x, weight_of(module, own, expert))
    return out.add_(getattr(module, f"{own}_bias")[expert]) if module.has_bias else out


def weight_of(module: Any, own: str, expert: int) -> Any:
    """The matrix of one expert of the stack ``own``, as a linear layer's weight (outputs, inputs)."""
    weight = getattr(module, own)[expert]
    if isinstance(weight, PackedMatrix):
        return weight.as_linear_weight()
    return weight.t() if module.is_transposed else weight
