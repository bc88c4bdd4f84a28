"""Exact sizes of a checkpoint from the headers of its safetensors files; no tensor is read.

Owns what tensor names mean: which layer a tensor belongs to, and whether it is an expert's.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stowage.core.geometry import Kind
from stowage.errors import CheckpointError
from stowage.models.files import unreadable, weight_files
from stowage.planner.model_config import ITEM_BYTES, LOSSLESS, PACKED, Fields
from stowage.planner.shapes import (
    ATTENTION,
    DENSE,
    EXPERTS,
    HEAD,
    MLP,
    NORMS,
    RECURRENT,
    ROUTER,
    SHARED,
    USUAL_WIDTH,
    Attention,
    CacheLayer,
    Layer,
    Model,
)
from stowage.weights.file import safetensors_header, safetensors_place

if TYPE_CHECKING:
    from stowage.weights.quantized.formats import Spec
    from stowage.weights.quantized.published import Plan

_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_FLOATS = {entry: ITEM_BYTES[name] for entry, name in _NAMES.items()}
_OTHERS = {"F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F4": 1, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_LAYER = re.compile(r"(?:^|\.)(?:layers?|h|blocks)\.(\d+)\.(.*)")
_NOT_TEXT = ("vision", "visual", "audio", "multi_modal", "mm_projector", "connector", "image_newline", "mtp.")
_EMBEDDING = re.compile(r"embed_tokens|embeddings|embed_in|embed_positions|(?:^|\.)(?:wte|wpe|w)\.")
_HEAD = re.compile(
    r"(?:^|[._])(?:lm_head|embed_out|output_layer|output_projection)\.|^head\.|^(?:cls\.predictions\.)?decoder\.\w+$"
)
_RECURRENT = re.compile(r"linear_attn|mamba|conv|mixer\.(?:in|out|x|dt)_proj|A_log|mixer\.(?:D|dt_bias)$")
_EXPERT = re.compile(r"(?:^|\.)experts\.|(?:moe|^mlp)\.(?:in|out)put_linear\.")


@dataclass(frozen=True, slots=True)
class Tensor:
    """One entry of a header. ``nbytes``: in the file. ``packed``: the number of weights in a quantized tensor, whose
    shape does not tell it; else 0. ``format``: a name of ``Machine.formats``; empty: unquantized. ``rows``: the
    matrix's outputs, where its shape does not tell them.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    packed: int = 0
    format: str = ""
    rows: int = 0

    @property
    def elements(self) -> int:
        return self.packed or prod(self.shape)

    @property
    def outputs(self) -> int:
        """Outputs of all its matrices, which count as ``USUAL_WIDTH`` wide where the width is not known."""
        if self.rows or self.packed:
            return self.rows or self.packed // USUAL_WIDTH
        return prod(self.shape[:-1]) if len(self.shape) > 1 else 0

    @property
    def floating(self) -> bool:
        return self.dtype in _FLOATS


def read_header(path: Path) -> list[Tensor]:
    """The tensors of one file. Raises ``CheckpointError`` for one that is cut short or no safetensors file."""
    try:
        with path.open("rb") as file:
            entries, data_at = safetensors_header(file.fileno())
            data_bytes = os.fstat(file.fileno()).st_size - data_at
        metadata = entries.pop("__metadata__", None) or {}
        packed, lossless = (json.loads(metadata.get(name, "{}")) for name in (PACKED, LOSSLESS))
        found = [_tensor(name, entry, data_bytes, packed.get(name, 0)) for name, entry in entries.items()]
        return [_unpacked(tensor, lossless[tensor.name]) if tensor.name in lossless else tensor for tensor in found]
    except PermissionError as error:
        raise CheckpointError(unreadable(path, error)) from error
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; download the checkpoint again.") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is no whole safetensors file ({error}); download it again.") from error


def _unpacked(tensor: Tensor, entry: Mapping[str, Any]) -> Tensor:
    """A losslessly packed tensor as it is in memory."""
    shape, dtype = tuple(int(n) for n in entry["shape"]), str(entry["dtype"])
    return Tensor(tensor.name, dtype, shape, prod(shape) * _FLOATS[dtype])


def _tensor(name: str, entry: Mapping[str, Any], data_bytes: int, packed: Any) -> Tensor:
    begin, end, shape = safetensors_place(name, entry, data_bytes)
    dtype = str(entry["dtype"])
    known = (_FLOATS | _OTHERS).get(dtype)
    if known is not None and dtype != "F4" and prod(shape) * known != end - begin:
        raise ValueError(f"{name} has another size than its shape")
    if not isinstance(packed, int) or not 0 <= packed <= 2 * (end - begin):
        raise ValueError(f"{name} cannot hold {packed!r} weights")
    return Tensor(name, dtype, shape, end - begin, packed, _form_of(name) if packed else "")


def _form_of(name: str) -> str:
    from stowage.weights.quantized.codes import form_of  # with torch, which headers do not need

    return form_of(name)


def read_tensors(directory: Path) -> list[Tensor]:
    """All tensors of the language model in a checkpoint; empty where no weights are there."""
    found = [tensor for path in weight_files(directory) for tensor in read_header(path)]
    return [t for t in found if not any(part in t.name for part in _NOT_TEXT)]


def of_plan(plan: Plan) -> list[Tensor]:
    """The parameters of a model that is run in its published format."""
    from stowage.weights.quantized.formats import PLAIN

    kept, beside = [], set[str]()
    for path, one in plan.kept.items():
        own = [own for own in one.names(path).values() if own in plan.values]
        nbytes = one.nbytes + sum(plan.values[name].nbytes for name in own)
        beside.update(own)
        name = one.spec.name if one.spec is not None and one.spec.name not in PLAIN else ""
        kept.append(Tensor(path, "U8", (1, nbytes), nbytes, one.elements, name, one.outputs))
    others = {path: values for path, values in plan.values.items() if path not in beside}
    values = [Tensor(path, "U8", tuple(v.shape), v.nbytes, v.numel()) for path, v in others.items()]
    return kept + values


def of_specs(specs: Mapping[str, tuple[Spec, int]], model: Iterable[Tensor]) -> list[Tensor]:
    """The parameters of ``model``, some of them in the formats of ``specs`` (format and number of experts, by name)."""
    found = []
    for tensor in model:
        spec, experts = specs.get(tensor.name, (None, 0))
        if spec is not None:
            nbytes, outputs = spec.nbytes * max(1, experts), spec.outputs * max(1, experts)
            tensor = Tensor(tensor.name, "U8", (1, nbytes), nbytes, tensor.elements, spec.name, outputs)
        found.append(tensor)
    return found


def first_dtype(tensors: Iterable[Tensor]) -> str:
    """The type of the first numbers, in which Transformers runs a model whose config names none; empty without any."""
    return next((_NAMES[tensor.dtype] for tensor in tensors if tensor.floating), "")


def are_mostly(tensors: Iterable[Tensor], dtype: str) -> bool:
    """Whether numbers are stored in ``dtype``, but for a few that a model keeps in another."""
    counts = Counter[str]()
    for tensor in tensors:
        if tensor.floating:
            counts[_NAMES[tensor.dtype]] += tensor.elements
    return 2 * counts[dtype] >= counts.total()


@dataclass(slots=True)
class _Sum:
    parameters: int = 0
    nbytes: int = 0
    formats: Counter[str] = field(default_factory=Counter)
    outputs: Counter[str] = field(default_factory=Counter)

    def add(self, tensor: Tensor, item_bytes: int) -> None:
        """``item_bytes`` of one element in memory; 0: as in the file. What is packed stays as it is."""
        self.parameters += tensor.elements
        if tensor.format:
            self.formats[tensor.format] += tensor.elements
        if tensor.outputs:
            self.outputs[tensor.format] += tensor.outputs
        self.nbytes += tensor.elements * item_bytes if item_bytes and tensor.floating else tensor.nbytes


def measured(model: Model, tensors: list[Tensor], dtype: str = "") -> Model:
    """``model`` with the bytes that ``tensors`` take in memory: as they are stored, or in ``dtype`` where it is given.

    Tensors of layers beyond the model's (for predicting several tokens) are left out, as Transformers does.
    """
    item_bytes = ITEM_BYTES[dtype] if dtype else 0
    layers: dict[int, dict[str, _Sum]] = {}
    ends: dict[str, _Sum] = {}
    for index, kind, tensor in _sorted(tensors):
        if model.tied and kind == "head" and len(tensor.shape) > 1:
            continue  # a copy of the embedding
        sums = ends if index < 0 else layers.setdefault(index, {})
        sums.setdefault(kind, _Sum()).add(tensor, item_bytes)
    grown = tuple(_exact(layer, layers.get(layer.index, {})) for layer in model.layers)
    if any(not layers.get(layer.index) for layer in model.layers):
        raise CheckpointError(
            f"the safetensors files hold weights of {len(layers)} layers, and config.json speaks of "
            f"{len(model.layers)}: a file is missing, or they belong to different models."
        )
    embedding, head = ends.get("embedding", _Sum()), ends.get("head", _Sum())
    rest = ends.get("rest", _Sum())
    last = embedding if model.tied else head
    formats = {DENSE: Counter[str](), EXPERTS: Counter[str](), HEAD: last.formats}
    outputs = {DENSE: Counter[str](), EXPERTS: Counter[str](), HEAD: last.outputs}
    for sums in layers.values():
        for kind, found in sums.items():
            part = EXPERTS if kind == "experts" else DENSE
            formats[part] += found.formats
            outputs[part] += found.outputs
    return replace(
        model,
        layers=grown,
        embedding=embedding.parameters,
        embedding_bytes=embedding.nbytes,
        head=head.parameters,
        head_bytes=head.nbytes,
        rest=rest.parameters,
        rest_bytes=rest.nbytes,
        head_reads=model.head_reads if model.tied else head.parameters,
        source="headers",
        formats={part: dict(counts) for part, counts in formats.items() if counts},
        outputs={part: dict(counts) for part, counts in outputs.items() if counts},
    )


def _exact(layer: Layer, sums: Mapping[str, _Sum]) -> Layer:
    """``layer`` with the exact sizes of its tensors."""
    experts = sums.get("experts", _Sum())
    parameters = {kind: found.parameters for kind, found in sums.items() if kind != "experts"}
    dense = sum(found.nbytes for kind, found in sums.items() if kind != "experts")
    count = layer.experts if experts.parameters else 0
    if experts.parameters and not count:  # an unknown family: all experts count as used
        return replace(
            layer,
            parameters={**parameters, MLP: parameters.get(MLP, 0) + experts.parameters},
            dense_bytes=dense + experts.nbytes,
        )
    return replace(
        layer,
        parameters=parameters,
        dense_bytes=dense,
        experts=count,
        expert_parameters=experts.parameters // max(count, 1),
        expert_bytes=-(-experts.nbytes // max(count, 1)),
    )


def _sorted(tensors: list[Tensor]) -> Iterator[tuple[int, str, Tensor]]:
    """Layer (-1: none) and kind of each tensor, from its name."""
    for tensor in tensors:
        match = _LAYER.search(tensor.name)
        if match is not None:
            yield int(match[1]), _kind(match[2], tensor), tensor
        elif _HEAD.search(tensor.name):
            yield -1, "head", tensor
        elif _EMBEDDING.search(tensor.name):
            yield -1, "embedding", tensor
        else:
            yield -1, "rest", tensor


def _kind(name: str, tensor: Tensor) -> str:
    """The kind of a layer's tensor: which part of the layer it belongs to."""
    if "shared_expert" in name or "shared_mlp" in name:
        return SHARED
    if _EXPERT.search(name):
        return "experts"
    if name.split(".")[-2:-1] in (["gate"], ["router"], ["wg"]) or ".router." in f".{name}":
        return ROUTER
    if len(tensor.shape) < 2 and ("norm" in name or "ln_" in name):
        return NORMS
    if _RECURRENT.search(name):
        return RECURRENT
    if "attn" in name or "attention" in name or re.search(r"mixer\.[qkvo]_proj", name):
        return ATTENTION
    return MLP


def has_head(tensors: list[Tensor]) -> bool:
    """Whether an output layer's matrix is among them: its own, or a copy of the embedding."""
    return any(kind == "head" and len(tensor.shape) > 1 for _, kind, tensor in _sorted(tensors))


def layer_count(tensors: list[Tensor]) -> int:
    """How many layers they belong to: one more than the highest number."""
    return 1 + max((index for index, _, _ in _sorted(tensors)), default=-1)


def plain(fields: Fields, tensors: list[Tensor], dtype: str) -> Model:
    """An unknown model in ``dtype``, from its layers' sizes: all count as full attention, which keeps most."""
    count = fields.number("num_hidden_layers", 0) or layer_count(tensors)
    vocab, hidden, heads = (fields.number(n) for n in ("vocab_size", "hidden_size", "num_attention_heads"))
    size = fields.number("head_dim", hidden // max(1, heads))
    row_bytes = 2 * fields.number("num_key_value_heads", heads) * size * ITEM_BYTES[dtype]
    experts, chosen = fields.number("num_experts", 0), fields.number("num_experts_per_tok", 0)
    return Model(
        family=fields.family,
        layers=tuple(Layer(index, {}, experts=experts, experts_per_token=chosen) for index in range(count)),
        kept=tuple(CacheLayer(index, Kind.FULL, row_bytes) for index in range(count)),
        attention=(Attention(4 * heads * size, row_bytes),) * count,
        tied=not any("lm_head" in t.name for t in tensors),
        vocab=vocab,
        hidden=hidden,
        dtype=dtype,
        item_bytes=ITEM_BYTES[dtype],
        context_tokens=fields.number("max_position_embeddings", 1 << 20),
        head_reads=vocab * hidden,
        notes=(
            f"{fields.family} is not a family that is run here: weights are exact, and each layer is taken to keep the "
            "keys and values of all tokens.",
        ),
    )
