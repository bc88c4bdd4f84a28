"""Models with packed matrices: which matrices of a model can be packed, and how a file that has them is loaded.

The modules that compute with them are those of ``blocks`` and ``stacks``; all else of the model is Transformers' own.
Transformers builds such a model because a quantizer is registered with it under ``METHOD``, which replaces the modules
before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from stowage.errors import CheckpointError
from stowage.weights.file import safetensors_header
from stowage.weights.quantized import quantizer
from stowage.weights.quantized.blocks import packings, put_linear, put_matrix
from stowage.weights.quantized.codes import FORMS, Form, form_of
from stowage.weights.quantized.fitting import Inputs
from stowage.weights.quantized.stacks import Stacking, put_stacks

METHOD: Final = "stowage_pack"
"""``quant_method`` in the ``quantization_config`` of config.json."""
VERSION: Final = 2
VARIANT: Final = "stowage"
FILE: Final = f"model.{VARIANT}.safetensors"
"""Not the name that Transformers looks for: without Stowage it finds no weights, instead of random ones."""
_KEPT: Final = frozenset(("gate", "router", "wg", "shared_expert_gate", "kv_b_proj"))
"""Layers that are not packed, by a name in their path: routers are small and decide much; kv_b_proj's weight is used
by other code than the layer's forward."""
_OUTPUTS_LEAST, _INPUTS_LEAST = 16, 32
_SMALLER: Final[Mapping[str, tuple[str, ...]]] = {"q4_k": ("q5_0",), "q5_k": ("q5_1",)}
"""Forms with smaller groups, for matrices that are no multiple of a form's group."""


@dataclass(frozen=True, slots=True)
class Target:
    """A parameter that can be packed: ``own`` of ``module``. ``experts``: how many it stacks, 0 for a linear layer.
    ``head``: it is the output layer's weight; ``module`` is the embedding where these are tied.
    """

    path: str
    module: nn.Module
    own: str
    outputs: int
    inputs: int
    experts: int = 0
    transposed: bool = False
    head: bool = False

    def form(self, name: str) -> Form:
        """The form in which it is packed when ``name`` was asked for. A matrix that is no multiple of its groups of 256
        gets smaller groups, as in llama.cpp. If these do not fit either, and for the output layer, whose errors no
        later layer evens out, it is int8.
        """
        forms = (Form(each, self.outputs, self.inputs) for each in (name, *_SMALLER.get(name, ())))
        found = None if self.head else next((form for form in forms if form.fits), None)
        return found or Form("int8", self.outputs, self.inputs)

    def packed_name(self, form: str) -> str:
        """The name of the packed parameter."""
        return f"{self.path}_{form}" if self.experts else f"{self.path.removesuffix('.weight')}.{form}"

    def shape(self, form: Form) -> tuple[int, ...]:
        """The shape of the packed parameter."""
        tensors = form.tensors(stacked=self.experts > 0) if form.spec is None else form.spec.tensors()
        return (self.experts, *tensors[""][0])[0 if self.experts else 1 :]

    def pack(self, values: Tensor, form: Form, inputs: Iterable[Inputs | None] = ()) -> Tensor:
        """The packed bytes of ``values``, in the shape that they have in the file. ``inputs``: statistics of the inputs
        that it multiplies, if known; for stacked experts, one per expert. Raises CheckpointError.
        """
        each = iter(inputs)
        if not self.experts:
            return form.pack(values, next(each, None)).view(self.shape(form))
        packed = torch.empty(self.shape(form), dtype=torch.uint8)
        for expert in range(self.experts):
            one = values[expert].t() if self.transposed else values[expert]
            packed[expert] = form.pack(one, next(each, None)).view(packed.shape[1:])
        return packed


def targets(model: Any) -> Iterator[Target]:
    """The parameters of ``model`` (which may be on the meta device) that can be packed: linear layers, and stacked
    experts whose module loops over them. Left out are tied parameters, routers, and small matrices. If there are any
    others, the table that is both embedding and output layer comes last.
    """
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    shared = {*tied.keys(), *tied.values()}
    head, some = _head(model), False
    for target in _untied(model, head, shared):
        some = True
        yield target
    if some and (table := _tied_table(model, head, tied)) is not None:
        path, module = table
        outputs, width = module.weight.shape
        yield Target(path, module, "weight", outputs, width, head=True)


def _head(model: Any) -> Any:
    find = getattr(model, "get_output_embeddings", None)
    return find() if find is not None else None


def _tied_table(model: Any, head: Any, tied: Mapping[str, str]) -> tuple[str, nn.Embedding] | None:
    """The embedding whose table is tied to the output layer ``head``, and to nothing else; and its parameter's path."""
    if len(tied) != 1 or type(head) is not nn.Linear:
        return None
    ((copy, path),) = tied.items()
    module = model.get_submodule(path.rpartition(".")[0])
    is_head = model.get_submodule(copy.rpartition(".")[0]) is head
    return (path, module) if is_head and isinstance(module, nn.Embedding) and path.endswith(".weight") else None


def _untied(model: Any, head: Any, shared: Collection[str]) -> Iterator[Target]:
    for name, module in model.named_modules():
        if type(module) is nn.Linear:
            path = f"{name}.weight"
            large = module.out_features >= _OUTPUTS_LEAST and module.in_features >= _INPUTS_LEAST
            floats = module.weight is not None and module.weight.is_floating_point()
            if large and floats and path not in shared and _KEPT.isdisjoint(name.split(".")):
                outputs, inputs = module.weight.shape
                yield Target(path, module, "weight", outputs, inputs, head=module is head)
        elif _loops(module):
            for own, stack in module.named_parameters(recurse=False):
                if stack.dim() == 3 and len(stack) > 1 and stack.is_floating_point() and f"{name}.{own}" not in shared:
                    outputs, inputs = stack.shape[1:][:: -1 if module.is_transposed else 1]
                    if outputs >= _OUTPUTS_LEAST and inputs >= _INPUTS_LEAST:
                        path = f"{name}.{own}"
                        yield Target(path, module, own, outputs, inputs, len(stack), bool(module.is_transposed))


def _loops(module: nn.Module) -> bool:
    """Whether ``module`` is experts that Transformers can run as a loop that indexes the stacks by expert."""
    stated = all(hasattr(module, name) for name in ("is_transposed", "has_gate", "is_concatenated"))
    return stated and hasattr(type(module).forward, "__wrapped__")


def forms_in(names: Sequence[str]) -> dict[str, str]:
    """The packed tensors among ``names``, with the name of each one's form."""
    return {name: form for name in names if (form := form_of(name))}


def replace(model: Any, names: Sequence[str], dtype: torch.dtype) -> list[Form]:
    """Replace the modules of ``model`` whose weights are packed in a file with tensors ``names``. Returns their forms.

    Raises CheckpointError when the model has no matrix for one of the packed tensors.
    """
    packed, forms = forms_in(names), list[Form]()
    stacks: dict[int, tuple[nn.Module, dict[str, Stacking]]] = {}
    for target in list(targets(model)):
        found = next((form for form in FORMS if target.packed_name(form) in packed), None)
        if found is None:
            continue
        del packed[target.packed_name(found)]
        form = Form(found, target.outputs, target.inputs)
        forms.append(form)
        if isinstance(target.module, nn.Embedding):
            _put_table(model, target, form, dtype)
        elif target.experts:
            stacking = Stacking(form.spec or form, target.transposed)
            stacks.setdefault(id(target.module), (target.module, {}))[1][target.own] = stacking
        else:
            put_linear(model, target.path.removesuffix(".weight"), form.spec or form, dtype)
    if packed:
        raise CheckpointError(
            f"{next(iter(packed))} is packed, and this model has no such matrix: config.json and {FILE} do not belong "
            "together, or Transformers has changed the model. Pack it again: stowage pack MODEL DIR"
        )
    for module, stackings in stacks.values():
        put_stacks(module, stackings, dtype)
    return forms


def _put_table(model: Any, target: Target, form: Form, dtype: torch.dtype) -> None:
    """Replace an embedding and the output layer that is tied to it; both have one packed parameter."""
    ((copy, _),) = model.all_tied_weights_keys.items()
    path, embedding = copy.rpartition(".")[0], target.module
    packed = put_linear(model, path, form, dtype)
    put_matrix(embedding, "weight", form, dtype)
    embedding.register_parameter(form.name, packed._parameters[form.name])
    model.all_tied_weights_keys = {f"{path}.{form.name}": target.packed_name(form.name)}


def packed_forms(model: Any) -> list[Form]:
    """The forms of all matrices of ``model`` in forms of our own."""
    return [form for form in packings(model) if isinstance(form, Form)]


def has_packed_experts(model: Any) -> bool:
    """Whether ``model`` has experts in a form of our own, which are computed one after the other."""
    stacks = (module for module in model.modules() if hasattr(module, "is_transposed"))
    return any(isinstance(form, Form) for module in stacks for form in getattr(module, "block_specs", ()))


def is_packed(model: Any) -> bool:
    """Whether ``model`` has quantized matrices, in our forms or published formats."""
    return bool(packings(model))


def marked(config: Any) -> dict[str, Any]:
    """The ``quantization_config`` of a packed checkpoint; empty if the checkpoint is not packed.

    Raises CheckpointError for a version that this Stowage does not read.
    """
    stated: Any = getattr(config, "quantization_config", None)
    stated = stated.to_dict() if hasattr(stated, "to_dict") else stated
    if not isinstance(stated, dict) or stated.get("quant_method") != METHOD:
        return {}
    if stated.get("version") != VERSION:
        raise CheckpointError(
            f"the checkpoint was packed in version {stated.get('version')!r}, and this Stowage reads version "
            f"{VERSION}: pack it again with stowage pack, or upgrade Stowage."
        )
    return dict(stated)


def register() -> None:
    """Register the quantizer with Transformers, so that it builds packed models. Idempotent."""

    def before(model: Any, config: Any, dtype: torch.dtype, files: Sequence[str]) -> Mapping[str, torch.Size]:
        (file,) = files
        replace(model, names_in(Path(file)), dtype)
        return {name: tensor.shape for name, tensor in model.state_dict().items()}

    quantizer.register(METHOD, before, _check_shapes)


def _check_shapes(model: Any, shapes: Mapping[str, torch.Size]) -> None:
    """Transformers does not compare shapes of quantized models, so bytes could be taken for other weights."""
    for name, tensor in model.state_dict().items():
        if tensor.shape != shapes.get(name):
            raise CheckpointError(
                f"{name} in {FILE} is {tuple(tensor.shape)}, and config.json describes {tuple(shapes.get(name, ()))}: "
                "they are of different checkpoints. Copy both files that stowage pack wrote."
            )


def names_in(path: Path) -> list[str]:
    """The names of the tensors in a safetensors file, whose header was checked before."""
    with path.open("rb") as file:
        return [name for name in safetensors_header(file.fileno())[0] if name != "__metadata__"]
