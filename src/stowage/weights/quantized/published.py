"""Models that are computed from as they were published: each large parameter is the bytes of its file, in its place.

A plan says which tensors of a model are which bytes of which files. The model that Transformers builds of it has, in
the place of each, what shows nothing (``absent``): whoever loads it puts there what lies in the files, where and when
it is needed. Nothing is converted, and nothing is written.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from stowage.native import is_wanted
from stowage.weights.checkpoint import Checkpoint, Span, read_segments
from stowage.weights.grouping import is_plain_lookup
from stowage.weights.offloaded_parameter import nan_placeholder
from stowage.weights.quantized import quantizer
from stowage.weights.quantized.blocks import deinterleave_heads, joined, parameter_names, put_linear, put_matrix
from stowage.weights.quantized.formats import Spec, dequantized
from stowage.weights.quantized.stacks import Stacking, put_stacks
from stowage.weights.resident import ResidentMemory

METHOD: Final = "stowage_published"
"""What ``quantization_config`` calls it, while such a model is built."""


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of ``shape`` and ``dtype`` that lies in ``spans`` of files, end to end."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    spans: tuple[Span, ...]

    def __post_init__(self) -> None:
        assert sum(span.length for span in self.spans) == self.nbytes

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Kept:
    """A parameter that lies in files as it is computed with: one part that is called "", of plain numbers or, where
    there is a ``spec``, the parts of that. ``experts``: how many matrices of ``spec``, 0 for one. ``heads``: of whose
    rows the rotated halves are interleaved. ``transposed``: experts that the model takes for (inputs, outputs).
    ``pieces``: matrices of ``spec`` that one expert's is made of, one below the other or (``interleaved``) a row of
    each after the other; their parts are called ``0.…``.
    """

    parts: Mapping[str, Part]
    spec: Spec | None = None
    experts: int = 0
    heads: int = 0
    transposed: bool = False
    pieces: int = 1
    interleaved: bool = False

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())

    @property
    def elements(self) -> int:
        """How many weights there are."""
        if self.spec is None:
            return prod(self.parts[""].shape)
        return self.outputs * self.spec.inputs

    @property
    def outputs(self) -> int:
        """Of all matrices together; 0 where it is none."""
        if self.spec is None:
            return prod(self.parts[""].shape[:-1]) if len(self.parts[""].shape) > 1 else 0
        return max(1, self.experts) * self.pieces * self.spec.outputs

    def names(self, path: str) -> dict[str, str]:
        """What the tensor of each part is called in the model, for the parameter at ``path`` of Transformers'."""
        if self.spec is None:
            return {"": path}
        module, _, own = path.rpartition(".")
        names = parameter_names(self.spec, own if self.experts else "", self.pieces)
        return {part: f"{module}.{name}" for part, name in names.items()}

    def numbers(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """What ``parts`` stand for: the parameter, in ``dtype``."""
        if self.spec is None:
            return parts[""].to(dtype)
        if not self.experts:
            return deinterleave_heads(dequantized(self.spec, parts, dtype), self.heads)
        each = ({name: part[expert] for name, part in parts.items()} for expert in range(self.experts))
        whole = torch.stack([self._expert(self.spec, one, dtype) for one in each])
        return whole.transpose(1, 2).contiguous() if self.transposed else whole

    def _expert(self, spec: Spec, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        if self.pieces == 1:
            return dequantized(spec, parts, dtype)
        each = [{part: parts[f"{number}.{part}"] for part in spec.tensors()} for number in range(self.pieces)]
        return joined([dequantized(spec, one, dtype) for one in each], 0, self.interleaved)


@dataclass(frozen=True, slots=True)
class Plan:
    """How the parameters of a published checkpoint are loaded. ``kept``: by a parameter's name in Transformers' model.
    ``values``: others, as they are in memory. ``untied``: those that the config ties to another, and that the files
    have as something else.
    """

    kept: Mapping[str, Kept]
    values: Mapping[str, Tensor] = field(default_factory=dict)
    untied: frozenset[str] = frozenset()

    def tensors(self) -> dict[str, Part]:
        """What lies in files, by names in the model that is built."""
        named = ((kept, kept.names(path)) for path, kept in self.kept.items())
        return {names[part]: tensor for kept, names in named for part, tensor in kept.parts.items()}

    @property
    def spans(self) -> Mapping[str, tuple[Span, ...]]:
        """By names in the model that is built."""
        return {name: part.spans for name, part in self.tensors().items()}

    def dequantized(self, files: Sequence[Path], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """All parameters as numbers of ``dtype``, under Transformers' names. Raises CheckpointError."""
        checkpoint = Checkpoint(files)
        try:
            for path, kept in self.kept.items():
                segments = checkpoint.segments({name: part.spans for name, part in kept.parts.items()})
                parts = {
                    name: read_segments(segments[name], torch.empty(part.shape, dtype=part.dtype))
                    for name, part in kept.parts.items()
                }
                yield path, kept.numbers(parts, dtype)
        finally:
            checkpoint.close()
        for path, values in self.values.items():
            matrix = self.kept.get(f"{path.removesuffix('bias')}weight")
            if path.endswith(".bias") and matrix is not None:  # of outputs, which lie as the rows do
                values = deinterleave_heads(values[:, None], matrix.heads)[:, 0]
            yield path, values

    def state(self) -> dict[str, Tensor]:
        """What Transformers is given to load: values, and in the place of what is kept what shows nothing."""
        shown = {name: nan_placeholder(part.shape, part.dtype) for name, part in self.tensors().items()}
        return {**shown, **self.values}


def run_in(stated: str, asked: str, *, on_cpu: bool) -> str:
    """The type that a quantised checkpoint is run in: as ``asked``, or where that is ``auto`` as it is ``stated``. The
    kernels of a CPU know no float16: float32 instead of it rounds no more, and is many times as quick as unpacking the
    weights at every step.
    """
    if asked != "auto":
        return asked
    return "float32" if stated == "float16" and on_cpu and is_wanted() else stated


def fill(model: Any, files: Sequence[Path], spans: Mapping[str, Sequence[Span]], memory: ResidentMemory) -> None:
    """All parameters of ``model`` that stay as they lie in ``files``, into ``memory``. Raises CheckpointError."""
    checkpoint, done = Checkpoint(files), set[int]()
    try:
        segments = checkpoint.segments(spans)
        for name, parameter in model.named_parameters():
            if name in segments and id(parameter) not in done:
                done.add(id(parameter))
                parameter.data = read_segments(segments[name], memory.empty(parameter.shape, parameter.dtype))
    finally:
        checkpoint.close()


def computes_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Let ``model``'s type be ``dtype``: Transformers takes the first parameter's, which may be a code or a scale."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module.dtype is not dtype:
            plain: Any = type(module)
            module.__class__ = _computing_in(plain, dtype)


@functools.lru_cache(maxsize=256)
def _computing_in(plain: Any, dtype: torch.dtype) -> Any:
    members = {"dtype": property(lambda _self: dtype), "__module__": plain.__module__, "__doc__": plain.__doc__}
    return type(plain.__name__, (plain,), members)


def replace(model: Any, plan: Plan, dtype: torch.dtype) -> None:
    """Put packed modules in the place of those of ``model`` whose parameters are kept packed; of tied ones too."""
    said: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    tied = {path: source for path, source in said.items() if path not in plan.untied}
    packed = {path: kept for path, kept in plan.kept.items() if kept.spec is not None}
    packed |= {path: packed[source] for path, source in tied.items() if source in packed}
    stacks: dict[str, dict[str, Stacking]] = {}
    for path, kept in packed.items():
        parent, _, own = path.rpartition(".")
        module: Any = model.get_submodule(parent)
        assert kept.spec is not None
        if kept.experts:
            stacks.setdefault(parent, {})[own] = Stacking(kept.spec, kept.transposed, kept.pieces, kept.interleaved)
        elif type(module) is nn.Linear:
            put_linear(model, parent, kept.spec, dtype, kept.heads)
        else:
            with torch.device("cpu"):  # it is tried, and all else is built without values
                finds = isinstance(module, nn.Embedding) and is_plain_lookup(module)
            put_matrix(module, own, kept.spec, dtype, finds)
    for parent, specs in stacks.items():
        put_stacks(model.get_submodule(parent), specs, dtype)
    made = set(plan.values)
    model.made_parameters = frozenset(made | {path for path, source in tied.items() if source in made})
    model.all_tied_weights_keys = {}
    for path, source in tied.items():
        own_names, others = (packed[p].names(p) if p in packed else {"": p} for p in (path, source))
        model.all_tied_weights_keys |= {own_names[part]: others[part] for part in own_names}


def mark(plan: Plan) -> dict[str, Any]:
    """What a config says, as ``quantization_config``, of a model that is to be built of ``plan``."""
    quantizer.register(METHOD, lambda model, config, dtype, _files: replace(model, config.plan, dtype))
    return {"quant_method": METHOD, "plan": plan}
