"""Which tensors of a GGUF file are which parameters of Transformers' model, and which of them stay as they are.

Names come from the ``gguf`` package (``get_tensor_name_map``). Matrices stay in the file; norms, biases and other
single numbers are read. Every parameter must be found, and every tensor used: else it is another model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stowage.errors import CheckpointError, ConfigError, UnsupportedModelError
from stowage.models.gguf.config import heads_of
from stowage.models.gguf.families import unused_in
from stowage.models.gguf.layouts import adds_1, layout_of, named, part_of
from stowage.models.gguf.refusals import refuse_other_rotation
from stowage.models.gguf.tensor_layout import Made, Rows, Stated
from stowage.weights.checkpoint import Span
from stowage.weights.gguf import TYPES, GgufFile, GgufTensor
from stowage.weights.quantized.blocks import joined
from stowage.weights.quantized.formats import BLOCKS, Spec, dequantized
from stowage.weights.quantized.published import Kept, Part, Plan
from stowage.weights.quantized.stacks import has_transposed_experts

_PLAIN: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NAMES: Final = {"MXFP4": "mxfp4_block"}
"""Types that are called otherwise here."""
_ROPE_FACTORS: Final = ("rope_freqs", "rope_factors_short", "rope_factors_long")
_EXPERTS: Final = re.compile(
    r"model\.layers\.(\d+)\.(?:(?:mlp|block_sparse_moe|feed_forward|mixer)\.)?experts\.(gate_up|up|down)_proj(_bias)?"
)
_BIASES: Final = {"e_score_correction_bias": "e_score_correction.bias", "expert_bias": "expert_bias.bias"}
"""Parameters without a module of their own, as the package gguf knows them."""


def rope_factors(file: GgufFile) -> dict[str, NDArray[np.float32]]:
    """By a tensor's name, what each rotary frequency is divided by, if a file says so. Raises CheckpointError."""
    found = {name: file.tensors[f"{name}.weight"] for name in _ROPE_FACTORS if f"{name}.weight" in file.tensors}
    for tensor in found.values():
        if tensor.type.name != "F32" or len(tensor.shape) != 1 or not 1 <= tensor.shape[0] <= 1 << 12:
            raise CheckpointError(f"{tensor.path} has odd factors of rotary embeddings ({tensor.name}).")
    return {name: _numbers(tensor).numpy() for name, tensor in found.items()}


def plan_of(file: GgufFile, config: Any, dtype: torch.dtype) -> Plan:
    """Where each parameter of the model of ``config`` lies, when it is run in ``dtype``.

    Raises CheckpointError when parameters and tensors do not fit, UnsupportedModelError for a way to pack that is not
    known, ConfigError where the package gguf is not installed.
    """
    model = _meta_model(file, config, dtype)
    refuse_other_rotation(file, model)
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    parameters = {name: p for name, p in model.state_dict(keep_vars=True).items() if name not in tied}
    heads, names = heads_of(file, config), _names(file, config)
    kept, values, used = dict[str, Kept](), dict[str, Tensor](), {f"{name}.weight" for name in _ROPE_FACTORS}
    rows = {path: len(parameter) for path, parameter in parameters.items() if parameter.dim()}
    in_float32 = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    for path, parameter in parameters.items():
        layout = layout_of(file.architecture, config, path, file.tensors, rows)
        if isinstance(layout, Stated):
            values[path] = torch.full(parameter.shape, _stated(file, layout)).to(dtype)
            continue
        wanted = names(path) if layout is None else layout.names
        found = [file.tensors[name] for name in wanted if name in file.tensors]
        missing = next((name for name in wanted if name not in file.tensors), None)
        if missing is not None or not found:
            raise CheckpointError(
                f"{file.paths[0]} has no {missing or path}, which Transformers' {config.model_type} computes with: it "
                "is a variant that is not read from GGUF, or was converted without it. Give the Hugging Face "
                "checkpoint that it was made from."
            )
        used |= {tensor.name for tensor in found}
        shape, module = tuple(parameter.shape), model.get_submodule(path.rpartition(".")[0])
        own = torch.float32 if any(f".{part}." in f".{path}." for part in in_float32) else parameter.dtype
        if isinstance(layout, Rows) and len(shape) > 1 and len({tensor.type for tensor in found}) == 1:
            kept[path] = _moved(path, shape, layout, file.tensors, dtype, heads.get(part_of(path), 0))
        elif layout is not None:
            values[path] = _made(path, shape, layout, found, own)
        elif len(shape) > 1 and len(found[0].shape) == len(shape) and not path.endswith("bias"):
            kept[path] = _kept(path, shape, found, dtype, heads.get(found[0].name.split(".")[-2], 0), module)
        else:
            numbers = _values(file, path, shape, found, module)
            values[path] = numbers.to(own)
    left = sorted(name for name in file.tensors.keys() - used if not name.startswith(unused_in(file)))
    if left:
        raise UnsupportedModelError(
            f"{file.paths[0]} has {left[0]}, and {len(left) - 1} other tensors for which Transformers' "
            f"{config.model_type} has no parameters: it is of a kind that is not read from GGUF. Give its Hugging Face "
            "checkpoint."
        )
    return Plan(kept, values)


def _meta_model(file: GgufFile, config: Any, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=dtype)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise CheckpointError(
            f"{file.paths[0]} describes no {config.model_type}: {' '.join(str(error).split())[:200]}"
        ) from error


def _names(file: GgufFile, config: Any) -> Any:
    """From a parameter's name to those of its tensors in the file; more than one are side by side in its rows."""
    try:
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
    except ImportError as error:
        raise ConfigError("GGUF files need the package gguf. Run: pip install 'stowage[gguf]'") from error
    arch = next(number for number, name in MODEL_ARCH_NAMES.items() if name == file.architecture)
    table = get_tensor_name_map(arch, config.num_hidden_layers)

    def names(path: str) -> list[str]:
        experts = _EXPERTS.fullmatch(path)
        if experts is not None:
            parts, last = experts[2].split("_"), "bias" if experts[3] else "weight"
            merged = f"blk.{experts[1]}.ffn_{experts[2]}_exps.{last}"
            return (
                [merged] if merged in file.tensors else [f"blk.{experts[1]}.ffn_{part}_exps.{last}" for part in parts]
            )
        path = named(file.architecture, path)
        parent, _, own = path.rpartition(".")
        base, _, last = f"{parent}.{_BIASES.get(own, own)}".rpartition(".")
        whole, found = None if own in _BIASES else table.get_name(path), table.get_name(base)
        if whole is not None:
            return [whole if whole in file.tensors else f"{whole}.weight"]
        return [f"{found}.{last}"] if found is not None else []

    return names


def _kept(
    path: str, shape: Sequence[int], found: Sequence[GgufTensor], dtype: torch.dtype, heads: int, module: Any
) -> Kept:
    """A matrix, or experts' matrices, where they lie."""
    experts, first = shape[0] if len(shape) == 3 else 0, found[0]
    transposed = bool(experts and has_transposed_experts(module))
    interleaved = len(found) > 1 and not getattr(module, "is_concatenated", True)
    outputs, inputs = shape[:-3:-1] if transposed else shape[-2:]
    other = next((tensor for tensor in found if tensor.type is not first.type), None)
    if other is not None:
        raise UnsupportedModelError(
            f"{first.path} has {first.name} in {first.type.name} and {other.name} in {other.type.name}, which are one "
            "parameter here: give a file with both in one type."
        )
    odd = any(tensor.shape[-1] != inputs or tensor.shape[:-2] != tuple(shape[:-2]) for tensor in found)
    if odd or sum(tensor.shape[-2] for tensor in found) != outputs or (interleaved and first.shape != found[1].shape):
        raise _other_models(first, path, shape)
    if _PLAIN.get(first.type.name) is dtype and not (heads or transposed or interleaved):
        return Kept({"": Part(tuple(shape), dtype, tuple(_spans(found, experts)))})
    pieces = [[tensor] for tensor in found] if interleaved else [found]
    spec = _spec(first, outputs // len(pieces), inputs)
    ((own, kind),) = spec.tensors().values()
    parts = [Part((*shape[:-2], *own), kind, tuple(_spans(piece, experts))) for piece in pieces]
    named = {f"{number}.": part for number, part in enumerate(parts)} if interleaved else {"": parts[0]}
    return Kept(named, spec, experts, heads, transposed, len(pieces), interleaved)


def _spec(tensor: GgufTensor, outputs: int, inputs: int) -> Spec:
    name = _NAMES.get(tensor.type.name, tensor.type.name.lower())
    if name not in BLOCKS:
        known = sorted({each.name for each in TYPES.values()} & {*_NAMES, *map(str.upper, BLOCKS)})
        raise UnsupportedModelError(
            f"{tensor.path} has {tensor.name} in {tensor.type.name}, which is not computed with here: "
            f"{', '.join(known)} are. Models are most often published in several of them."
        )
    return Spec(name, outputs, inputs)


def _moved(
    path: str, shape: Sequence[int], rows: Rows, tensors: Mapping[str, GgufTensor], dtype: torch.dtype, heads: int
) -> Kept:
    """A matrix whose rows lie in pieces of the file, in the order in which it has them."""
    first, count = tensors[rows.names[0]], sum(end - begin for _, begin, end in rows.pieces)
    _refuse_other_rows(path, shape, rows, tensors)
    spans = []
    for name, begin, end in rows.pieces:
        tensor = tensors[name]
        row = tensor.nbytes // tensor.shape[0]
        spans.append(Span(tensor.path, tensor.offset + begin * row, (end - begin) * row))
    if _PLAIN.get(first.type.name) is dtype and not heads:
        return Kept({"": Part(tuple(shape), dtype, tuple(spans))})
    spec = _spec(first, count, shape[1])
    ((own, kind),) = spec.tensors().values()
    return Kept({"": Part(tuple(own), kind, tuple(spans))}, spec, heads=heads)


def _refuse_other_rows(path: str, shape: Sequence[int], rows: Rows, tensors: Mapping[str, GgufTensor]) -> None:
    """Every row of every tensor is in one piece. Raises CheckpointError."""
    for name in rows.names:
        tensor, own = tensors[name], sorted((begin, end) for each, begin, end in rows.pieces if each == name)
        whole = [0, *(end for _, end in own[:-1])] == [begin for begin, _ in own] and own[-1][1] == tensor.shape[0]
        whole = tensor.shape[0] == rows.of if rows.of else whole
        if not whole or tensor.shape[1:] != tuple(shape[1:]):
            raise _other_models(tensor, path, shape)
    if sum(end - begin for _, begin, end in rows.pieces) != shape[0]:
        raise _other_models(tensors[rows.names[0]], path, shape)


def _other_models(tensor: GgufTensor, path: str, shape: Sequence[int]) -> CheckpointError:
    return CheckpointError(
        f"{tensor.name} in {tensor.path} is {tensor.shape}, and {path} would be {tuple(shape)}: its fields and its "
        "tensors are of different models."
    )


def _made(
    path: str, shape: Sequence[int], layout: Rows | Made, found: Sequence[GgufTensor], dtype: torch.dtype
) -> Tensor:
    """Numbers in memory: of tensors that are put together otherwise than they lie."""
    each = {tensor.name: _unpacked(tensor) for tensor in found}
    try:
        if isinstance(layout, Rows):
            numbers = torch.cat([each[name][begin:end] for name, begin, end in layout.pieces])
        else:
            numbers = layout.make([each[name] for name in layout.names])
        return numbers.reshape(tuple(shape)).to(dtype).contiguous()
    except (RuntimeError, IndexError) as error:
        raise _other_models(found[0], path, shape) from error


def _stated(file: GgufFile, layout: Stated) -> float:
    said = file.fields.get(layout.field)
    own = said[layout.layer] if isinstance(said, list) and layout.layer < len(said) else said
    if not isinstance(own, float):
        raise CheckpointError(f"{file.paths[0]} does not say {layout.field} of each layer; download it again.")
    return own


def _unpacked(tensor: GgufTensor) -> Tensor:
    """All of ``tensor``, of any type, in float32."""
    if tensor.type.name in _PLAIN:
        return _numbers(tensor)
    spec = _spec(tensor, tensor.elements // tensor.shape[-1], tensor.shape[-1])
    ((part, (own, kind)),) = spec.tensors().items()
    raw = torch.frombuffer(bytearray(_bytes(tensor)), dtype=torch.uint8).view(kind).view(own)
    return dequantized(spec, {part: raw}, torch.float32).view(tensor.shape)


def _spans(found: Sequence[GgufTensor], experts: int) -> Iterator[Span]:
    """Their bytes in the order of the parameter: of each expert, the rows of one tensor after those of the other."""
    if len(found) == 1:
        yield Span(found[0].path, found[0].offset, found[0].nbytes)
        return
    for expert in range(experts):
        for tensor in found:
            length = tensor.nbytes // experts
            yield Span(tensor.path, tensor.offset + expert * length, length)


def _values(file: GgufFile, path: str, shape: Sequence[int], found: Sequence[GgufTensor], module: Any) -> Tensor:
    """Numbers of float32: a norm, a bias, a gate, a sink."""
    first, interleaved = found[0], not getattr(module, "is_concatenated", True)
    numbers = joined([_numbers(tensor) for tensor in found], -1, interleaved) if len(found) > 1 else _numbers(first)
    if numbers.numel() != int(np.prod(shape)):
        raise CheckpointError(f"{first.name} in {first.path} is {first.shape}, and {path} would be {tuple(shape)}.")
    if adds_1(file.architecture, path):
        numbers -= 1
    return numbers.view(tuple(shape))


def _numbers(tensor: GgufTensor) -> Tensor:
    """All of ``tensor``, which is small, in float32."""
    dtype = _PLAIN.get(tensor.type.name)
    if dtype is None:
        raise UnsupportedModelError(f"{tensor.name} in {tensor.path} is packed ({tensor.type.name}), and is no matrix.")
    return torch.frombuffer(bytearray(_bytes(tensor)), dtype=dtype).float().view(tensor.shape)


def _bytes(tensor: GgufTensor) -> bytes:
    with tensor.path.open("rb") as file:
        file.seek(tensor.offset)
        raw = file.read(tensor.nbytes)
    if len(raw) != tensor.nbytes:
        raise CheckpointError(f"{tensor.path} is shorter than it was; download it again.")
    return raw
