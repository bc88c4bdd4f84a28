"""A checkpoint that others quantised, as ``loading`` asks for any: which bytes of its files are which parameter.

Owns the plan of such a model. Matrices, and experts one after the other, stay in the files; norms, biases and what is
computed with as numbers are read. A bias that a file has and the model has not is refused unless it is nothing.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from stowage.errors import CheckpointError, StowageError, UnsupportedModelError
from stowage.models.multimodal import TextPart, class_of
from stowage.models.published.matrices import Matrices, Matrix, base_of, unexpected_tensor
from stowage.models.published.method import Method
from stowage.models.published.names import Sources, sources_of
from stowage.weights.checkpoint import Checkpoint, Stored, stored_in
from stowage.weights.quantized.formats import SINGLE_CODES, Spec, gptq_first
from stowage.weights.quantized.published import Kept, Part, Plan
from stowage.weights.quantized.stacks import has_transposed_experts

_AS_NUMBERS: Final = "kv_b_proj"
"""Of latent attention: its weight itself is computed with at every step, so it is read once."""
_FP8: Final = (torch.float8_e4m3fn, torch.float8_e5m2)
_QUANTISED: Final = re.compile(r".+(?:\.weight_scale(?:_inv)?|\.weight_packed|\.qweight|_proj_blocks)")
"""Names that tools give to what makes numbers of codes, or to codes."""
_WHOLE: Final = ("I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64")
"""Types of files whose numbers are no weights."""


def meta_model(part: TextPart, dtype: torch.dtype) -> Any:
    """The model of ``part`` as Transformers builds it to be run in ``dtype``, without values; what its class makes in
    another type whatever it is run in, is so here. Raises UnsupportedModelError for a class that is not known before it
    is loaded.
    """
    from transformers import PreTrainedModel
    from transformers.modeling_utils import local_torch_dtype

    kind = class_of(part)
    if not (isinstance(kind, type) and issubclass(kind, PreTrainedModel)):
        raise UnsupportedModelError(f"a model that is loaded as {kind.__name__} is not read as it lies.")
    config = copy.deepcopy(part.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"), local_torch_dtype(dtype):
        return kind(config)


def dtype_of(config: Any, files: Sequence[Path], asked: str) -> str:
    """What a model is to be run in: as ``asked``; ``auto``: as the config says, or the type of most other weights."""
    if asked != "auto":
        return asked
    stated = getattr(config, "dtype", None)
    if stated is not None:
        return str(stated).removeprefix("torch.")
    sizes = dict[torch.dtype, int]()
    for stored in (one for path in files for one in stored_in(path)):
        if stored.dtype in (torch.float32, torch.float16, torch.bfloat16) and base_of(stored.name) is not None:
            sizes[stored.dtype] = sizes.get(stored.dtype, 0) + stored.span.length
    return str(max(sizes, key=lambda dtype: sizes[dtype], default=torch.bfloat16)).removeprefix("torch.")


def plan_of(files: Sequence[Path], part: TextPart, method: Method, dtype: torch.dtype, *, read: bool = True) -> Plan:
    """Where each parameter of the model of ``part`` lies in ``files``, when it is run in ``dtype``. ``read``: with the
    values that are read already; else these have no memory, and only their sizes are of interest.

    Raises CheckpointError for what is missing, damaged or does not fit, UnsupportedModelError for what is not read.
    """
    stored = {one.name: one for path in files for one in stored_in(path)}
    _refuse_divided(stored)
    model = meta_model(part, dtype)
    names = [base for name in stored if (base := base_of(name)) is not None]
    sources = sources_of(model, names, part.renamed)
    matrices, in_float32 = Matrices(stored, method, dtype), _in_float32(model, dtype)
    zeros = next((stored[name] for name in sorted(stored) if name.endswith(".qzeros")), None)
    second = method.second or (zeros is not None and matrices.shows_second(zeros))
    reading = _Reading(replace(matrices, second=second), read)
    said: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    untied = frozenset(path for path in said if _differs(path, said[path], sources, stored))
    tied = said.keys() - untied
    kept, values = dict[str, Kept](), dict[str, Tensor]()
    for path, parameter in model.state_dict(keep_vars=True).items():
        if path in tied:
            continue
        own = sources.get(path)
        if own is None:
            raise _absent(path, names, sources.values())
        kind = torch.float32 if any(part in path for part in in_float32) else parameter.dtype
        shape = tuple(parameter.shape)
        if not isinstance(parameter, nn.Parameter):
            values[path] = reading.numbers(path, shape, own, kind)
            continue
        found = reading.parameter(path, shape, own, kind, model.get_submodule(path.rpartition(".")[0]))
        if isinstance(found, Kept):
            kept[path], made = reading.in_memory(path, found)
            values |= made
        else:
            values[path] = found
    _refuse_biases(stored, names, sources.values())
    return Plan(kept, values, untied)


def _differs(path: str, source: str, sources: Mapping[str, Sources], stored: Mapping[str, Stored]) -> bool:
    """Whether the files have ``path``, and it is not what they have as ``source``: quantised, or other numbers. A pair
    that differs is not tied, whatever the config says (``weights.tied``).
    """
    own, other = (sources[name].single if name in sources else "" for name in (path, source))
    if not own or not other:
        return False
    pair = stored.get(own), stored.get(other)
    return pair[0] is None or pair[1] is None or not pair[0].is_as(pair[1])


def refuse_unsaid(directory: Path, files: Sequence[Path]) -> None:
    """Refuse quantised weights of which config.json says nothing: Transformers would take codes for numbers, without
    their scales, whatever these are called. Raises UnsupportedModelError, CheckpointError.
    """
    checkpoint = Checkpoint(files)
    kinds = checkpoint.kinds
    checkpoint.close()
    beside = {name.rpartition(".")[0] for name in kinds if not name.endswith((".weight", ".bias"))}
    names = [
        name
        for name, kind in kinds.items()
        if _QUANTISED.fullmatch(name)
        or (name.endswith(".weight") and kind in _WHOLE)
        or (kind.startswith("F8_") and not beside.isdisjoint((name, name.removesuffix(".weight"))))
    ]
    if names:
        raise UnsupportedModelError(
            f"{directory} holds quantised weights ({min(names)}), and its config.json does not say how they are to be "
            "read (quantization_config). Give a checkpoint whose config.json says it, or the original."
        )


def expandable(files: Sequence[Path], method: Method) -> bool:
    """Whether Transformers alone makes plain numbers of such a checkpoint, and the right ones: of FP8 it takes blocks
    for equal parts of a matrix, so that those of a matrix with a cut last block would be others, and codes with scales
    of another name for numbers.
    """
    if method.name != "fp8":
        return method.name == "mxfp4"
    stored = {one.name: one for path in files for one in stored_in(path)}
    codes = {name: one for name, one in stored.items() if one.dtype in _FP8}
    if any(len(one.shape) != 2 or f"{name}_scale_inv" not in stored for name, one in codes.items()):
        return False
    for name, scales in stored.items():
        whole = stored.get(name.removesuffix("_scale_inv")) if name.endswith("_scale_inv") else None
        if whole is not None and any(
            count > 1 and block and size != count * block
            for size, count, block in zip(whole.shape, scales.shape, method.block, strict=False)
        ):
            return False
    return True


def finish(model: Any, directory: Path) -> Any:
    """``model``, that ends and samples as the checkpoint in ``directory`` says. Raises CheckpointError."""
    from transformers import GenerationConfig

    if (directory / "generation_config.json").is_file():
        try:
            model.generation_config = GenerationConfig.from_pretrained(directory, local_files_only=True)
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(f"{directory / 'generation_config.json'} cannot be read: {error}") from error
    model.name_or_path = str(directory)
    return model


def specs_of(model: Any, method: Method, dtype: torch.dtype) -> dict[str, tuple[Spec, int]]:
    """Which parameters of ``model``, built without values and run in ``dtype``, a checkpoint has quantised as it is
    published, where there are no files: by name the format, and how many experts are stacked.
    """
    found = {path: (spec, experts) for path, spec, experts in method.specs(model, dtype)}
    return {path: one for path, one in found.items() if _AS_NUMBERS not in path.split(".")}


def _in_float32(model: Any, dtype: torch.dtype) -> tuple[str, ...]:
    """Parts of names of what Transformers keeps in float32 whatever the rest is in."""
    strict = tuple(model._keep_in_fp32_modules_strict or ()) if dtype is not torch.float32 else ()
    return (*strict, *(model._keep_in_fp32_modules or ())) if dtype is torch.float16 else strict


def _absent(path: str, names: Iterable[str], used: Iterable[Sources]) -> StowageError:
    """What is said of a parameter that no tensor of the files is: one that a tool has taken apart has its parts there,
    which are no parameters.
    """
    taken, parent = {name for one in used for name in one.names}, path.removesuffix(".weight").rpartition(".")[0]
    parts = sorted(name for name in names if name.startswith(f"{parent}.") and name not in taken and "weight" in name)
    if not parts:
        return CheckpointError(
            f"the checkpoint is incomplete: it has no {path}, which its model needs. Download it again."
        )
    return UnsupportedModelError(
        f"the checkpoint has no {path}, which its model needs, and has {parts[0]}, which its model has not: a tool has "
        "taken apart what is one matrix there, which is not read. Give another checkpoint of the model."
    )


def _refuse_divided(stored: Mapping[str, Stored]) -> None:
    """AutoAWQ scales what some families' activations make (Falcon's, StarCoder2's), in a module of its own that no
    model of Transformers has. Raises UnsupportedModelError.
    """
    for name in sorted(stored):
        base, _, own = name.rpartition(".")
        if own == "scales" and f"{base}.qweight" not in stored:
            raise UnsupportedModelError(
                f"{name} scales what is computed with in the checkpoint, beside its weights, and Transformers' model "
                "has no place for it: it is not read. Give another checkpoint of the model, or the original."
            )


def _refuse_biases(stored: Mapping[str, Stored], names: Iterable[str], used: Iterable[Sources]) -> None:
    """Tools write a bias of zeros beside every matrix. One that is none, and has no place in the model, is refused."""
    taken = {name for one in used for name in one.names}
    for name in names:
        matrix = name.removesuffix(".bias") + ".weight"
        if name not in taken and name.endswith(".bias") and matrix in taken and bool(stored[name].read().any()):
            raise UnsupportedModelError(
                f"{name} is added in the checkpoint, and Transformers' model has no place for it: it is another model "
                "than its config.json says."
            )


@dataclass(frozen=True, slots=True)
class _Reading:
    matrices: Matrices
    read: bool

    def parameter(
        self, path: str, shape: tuple[int, ...], sources: Sources, kind: torch.dtype, module: nn.Module
    ) -> Kept | Tensor:
        """Where it lies; one that is small, or no matrix, or of another ``kind`` than the model is run in, as numbers.
        So are codes with scales apart whose rows are looked up: an embedding's; and a router's numbers of another type
        than is run, which its family may turn into float32 itself. ``module``: whose it is.
        """
        transposed, looked_up = has_transposed_experts(module), isinstance(module, nn.Embedding)
        as_numbers = _AS_NUMBERS in path.split(".") or kind is not self.matrices.dtype
        if sources.experts:
            return self._experts(path, shape, sources.experts, transposed)
        name = sources.single
        if self.matrices.is_stacked(name) and not (transposed and name in self.matrices.stored):
            return self._stack(path, name, shape, transposed)
        inputs_first = type(module).__name__ == "Conv1D"
        if inputs_first and name not in self.matrices.stored:
            raise UnsupportedModelError(
                f"{path} has inputs before outputs, as GPT-2 has them, and is quantised, which is not read. Give the "
                "original checkpoint."
            )
        if len(shape) == 2 and path.endswith(".weight") and not inputs_first:
            matrix = self.matrices.of(name, shape)
            in_parts = matrix.spec is not None and matrix.parts.keys() != {""}
            scored = matrix.spec is not None and not in_parts and not isinstance(module, nn.Linear | nn.Embedding)
            if as_numbers or scored or (looked_up and in_parts):
                in_type = self.matrices.dtype if in_parts else kind
                return matrix.numbers(in_type) if self.read else torch.empty(shape, dtype=kind, device="meta")
            return self._kept(path, shape, [[matrix]], 0, False)
        found = self.matrices.get(name)
        if found.shape == shape and found.dtype is self.matrices.dtype and len(shape) > 1 and not as_numbers:
            return Kept({"": Part(shape, found.dtype, (found.span,))})
        return self.numbers(path, shape, sources, kind)

    def in_memory(self, path: str, kept: Kept) -> tuple[Kept, dict[str, Tensor]]:
        """``kept`` without what is read once, and that: global scales of NVFP4, a few bytes each in many places, and
        zero points of GPTQ's second format as the first has them, which is computed with: one less, of a word's eight
        at once.
        """
        name = kept.spec.name if kept.spec is not None else ""
        own = {"nvfp4": "globals", "gptq": "zeros" if self.matrices.second else ""}.get(name, "")
        names, made = kept.names(path), dict[str, Tensor]()
        parts = {part: tensor for part, tensor in kept.parts.items() if own and part.rpartition(".")[2] == own}
        for part, tensor in parts.items():
            if self.read:
                raw = [Stored("", torch.uint8, (span.length,), span).read() for span in tensor.spans]
                whole = torch.cat(raw).view(tensor.dtype).view(tensor.shape)
                made[names[part]] = gptq_first(whole) if own == "zeros" else whole
            else:
                made[names[part]] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        return replace(kept, parts={part: one for part, one in kept.parts.items() if part not in parts}), made

    def numbers(self, path: str, shape: tuple[int, ...], sources: Sources, kind: torch.dtype) -> Tensor:
        """The values of a tensor that is stored as numbers; ``kind``: what it will be."""
        found = self.matrices.get(sources.single)
        if found.shape != shape:
            raise unexpected_tensor(path, found, shape)
        if found.dtype in _FP8:
            stacked = "experts stacked in FP8, with inputs first, as Meta publishes Llama 4, or without scales"
            what = stacked if len(shape) == 3 else "of FP8, and no matrix"
            raise UnsupportedModelError(
                f"{found.name} is {what}, which is not read: matrices are, whose outputs come first. Give a checkpoint "
                "of the model that llm-compressor wrote, a GGUF file, or the original."
            )
        return found.read() if self.read else torch.empty(shape, dtype=kind, device="meta")

    def _stack(self, path: str, name: str, shape: tuple[int, ...], transposed: bool) -> Kept:
        """Experts that the files have stacked already."""
        if len(shape) != 3:
            raise UnsupportedModelError(f"{path} is packed in blocks, and is no stack of experts.")
        experts, *sizes = shape
        outputs, inputs = sizes[::-1] if transposed else sizes
        matrix = self.matrices.stacked(name, (experts, outputs, inputs))
        assert matrix.spec is not None
        parts = {
            part: Part((experts, *own), dtype, (matrix.parts[part].span,))
            for part, (own, dtype) in matrix.spec.tensors().items()
        }
        return Kept(parts, matrix.spec, experts, transposed=transposed)

    def _experts(
        self, path: str, shape: tuple[int, ...], found: Mapping[int, Mapping[int, str]], transposed: bool
    ) -> Kept:
        """Stacked experts that the files have one by one."""
        experts = shape[0]
        width = max(len(names) for names in found.values())
        if len(shape) != 3 or sorted(found) != list(range(experts)) or {len(n) for n in found.values()} != {width}:
            raise CheckpointError(
                f"the checkpoint is incomplete: {path} is made of {experts} experts, and it has {len(found)} of them, "
                "or of one a part only. Download it again."
            )
        outputs, inputs = shape[:0:-1] if transposed else shape[1:]
        each = [
            [self.matrices.of(found[e][part], (outputs // width, inputs)) for part in range(width)]
            for e in range(experts)
        ]
        return self._kept(path, (outputs, inputs), each, experts, transposed)

    def _kept(
        self, path: str, shape: tuple[int, ...], each: Sequence[Sequence[Matrix]], experts: int, transposed: bool
    ) -> Kept:
        """``each`` expert's matrices, one below the other, or the one that there is."""
        first, several = each[0][0], len(each[0]) > 1
        if any(matrix.spec != first.spec for row in each for matrix in row):
            raise UnsupportedModelError(f"{path} has experts that are quantised in several ways, which is not read.")
        before = (experts,) if experts else ()
        if first.spec is None:
            if transposed:
                raise UnsupportedModelError(f"{path} has experts whose inputs come first, which is not read.")
            return Kept({"": Part((*before, *shape), self.matrices.dtype, _spans(each, ""))})
        spec = first.spec
        if several and spec.name in (*SINGLE_CODES, "nvfp4") and not spec.block_rows:
            spec = replace(spec, block_rows=spec.outputs)
        if several and (spec.name in ("gptq", "awq") or spec.outputs % max(1, spec.block_rows, 8 * spec.zeros)):
            return self._pieces(first.spec, each, experts, transposed)
        spec = replace(spec, outputs=shape[0])
        parts = {
            part: Part((*before, *own), dtype, _spans(each, part)) for part, (own, dtype) in spec.tensors().items()
        }
        return Kept(parts, spec, experts, transposed=transposed)

    def _pieces(self, spec: Spec, each: Sequence[Sequence[Matrix]], experts: int, transposed: bool) -> Kept:
        """Experts of which two matrices' bytes do not make one: each is a stack of its own."""
        pieces = [[[row[number]] for row in each] for number in range(len(each[0]))]
        parts = {
            f"{number}.{part}": Part((experts, *own), dtype, _spans(piece, part))
            for number, piece in enumerate(pieces)
            for part, (own, dtype) in spec.tensors().items()
        }
        return Kept(parts, spec, experts, transposed=transposed, pieces=len(pieces))


def _spans(each: Sequence[Sequence[Matrix]], part: str) -> tuple[Any, ...]:
    return tuple(matrix.parts[part].span for row in each for matrix in row)
