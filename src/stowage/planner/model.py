"""Reads the shape of a model before it is loaded: the parameters of every layer by kind, what it caches, what it
multiplies.

Transformers builds the model of a config on the meta device, without weights, and a forward there shows what its cache
keeps: the same as in the engine, for every family that the engine runs. Where the checkpoint's weights are beside the
config, sizes are those in their headers. A family that the engine does not run is planned by headers alone, or refused
with advice. torch is imported when a model is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stowage.core.geometry import Kind
from stowage.errors import CheckpointError, UnsupportedModelError
from stowage.models.files import weight_files
from stowage.models.hub import find_config, find_gguf
from stowage.planner import headers
from stowage.planner.model_config import ITEM_BYTES, PACKED, Fields, read_config, run_dtype
from stowage.planner.shapes import Attention, CacheLayer, Layer, Model

if TYPE_CHECKING:
    from stowage.models.meta_forward import Described
    from stowage.models.multimodal import TextPart

_WAY_OUT = "With the checkpoint's *.safetensors files beside config.json any model's sizes are read from their headers."


def read_model(path: str | Path, dtype: str = "auto", *, on_cpu: bool = True) -> Model:
    """The model in a directory, or of a config file, as it is in memory when it is run in ``dtype``; ``on_cpu``: with
    the kernels that there are for one.

    Raises ``CheckpointError``, ``UnsupportedModelError``, ``ConfigError``.
    """
    from stowage.models.directory import part_of, refuse_absurd
    from stowage.models.layout import refuse_unsupported
    from stowage.weights.quantized.published import run_in

    gguf = _gguf(find_gguf(str(path)) or Path(path).expanduser(), dtype)
    if gguf is not None:
        return gguf
    file = find_config(str(path))
    refuse_absurd(file)
    fields, directory = read_config(file), Path(path).expanduser()
    tensors = headers.read_tensors(directory) if directory.is_dir() else []
    chosen = run_dtype(fields.dtype or headers.first_dtype(tensors) or "float32", dtype)
    stored = "" if dtype == "auto" and headers.are_mostly(tensors, chosen) else chosen
    try:
        part = part_of(file)
        refuse_unsupported(part.config)
    except (CheckpointError, UnsupportedModelError) as error:
        if not tensors:
            raise type(error)(f"{error} {_WAY_OUT}") from error
        return headers.measured(headers.plain(fields, tensors, chosen), tensors, stored)
    if is_published := fields.packed_as not in ("", PACKED):
        chosen = run_in(chosen, dtype, on_cpu=on_cpu)
    model = shape(part.config, chosen)
    if is_published:
        return _published(model, part, weight_files(directory) if tensors else [])
    if model.tied and headers.has_head(tensors) and _own_head(part, weight_files(directory), chosen):
        model = replace(model, tied=False)
    return headers.measured(model, tensors, stored) if tensors else model


def _own_head(part: TextPart, files: list[Path], dtype: str) -> bool:
    """Whether ``files`` hold an output layer other than the embedding, which is loaded then, whatever the config says.
    These two tensors are read as far as they are the same.
    """
    import torch

    from stowage.models.published.checkpoint import meta_model
    from stowage.weights.checkpoint import Checkpoint
    from stowage.weights.tied import resolve_tied

    try:
        model = meta_model(part, getattr(torch, dtype))
    except UnsupportedModelError:
        return False
    checkpoint = Checkpoint(files)
    try:
        resolve_tied(model, checkpoint)
    finally:
        checkpoint.close()
    head = next(name for name, module in model.named_modules() if module is model.get_output_embeddings())
    return f"{head}.weight" not in model.all_tied_weights_keys


def _gguf(path: Path, dtype: str) -> Model | None:
    """The model in a GGUF file, or in a directory with one; ``None`` where there is none."""
    from stowage.models.gguf.checkpoint import file_in, open_gguf
    from stowage.models.layout import refuse_unsupported

    file = file_in(path)
    if file is None:
        return None
    found = open_gguf(file)
    refuse_unsupported(found.config)
    chosen = run_dtype(str(found.config.dtype).removeprefix("torch."), dtype)
    plan = found.plan(chosen)
    return headers.measured(shape(found.config, chosen), headers.of_plan(plan))


def _published(model: Model, part: TextPart, files: list[Path]) -> Model:
    """``model`` with the sizes of its published quantization: those in ``files``, or else by its config."""
    import torch

    from stowage.models.published.checkpoint import expandable, meta_model, plan_of, specs_of
    from stowage.models.published.method import method_of

    method = None
    try:
        method = method_of(part.config)
        assert method is not None, "the config says that it is quantised"
        if files:
            plan = plan_of(files, part, method, getattr(torch, model.dtype), read=False)
            tied = model.tied and not plan.untied
            return headers.measured(replace(model, tied=tied), headers.of_plan(plan))
        plain = meta_model(part, getattr(torch, model.dtype))
        specs = specs_of(plain, method, getattr(torch, model.dtype))
        counted = headers.of_specs(specs, _parameters(plain))
    except UnsupportedModelError as error:
        runs = method is not None and expandable(files, method)
        note = f"it is planned as expanded to {model.dtype}: {error}"
        return replace(model, notes=(note if runs else f"it does not run as it is: {note}",))
    note = f"weights are counted as they are published ({method.name}), which the files may do otherwise in places."
    return replace(headers.measured(model, counted), source="config", notes=(note,))


def shape(config: Any, dtype: str) -> Model:
    """The shape of the text model of ``config`` when it is run in ``dtype``."""
    import torch

    from stowage.models.layout import context_tokens
    from stowage.models.meta_forward import describe

    found = describe(config, getattr(torch, dtype))
    embedding, head = found.model.get_input_embeddings(), found.model.get_output_embeddings()
    parameters = _parameters(found.model)
    model = Model(
        family=config.model_type,
        layers=tuple(_layers(config, headers.layer_count(parameters))),
        kept=tuple(
            CacheLayer(layer.index, layer.kind, layer.nbytes, layer.window, layer.tensors[0].every)
            for layer in found.layers
        ),
        attention=tuple(_attention(found)),
        tied=head.weight is embedding.weight,
        vocab=int(config.vocab_size),
        hidden=int(head.weight.shape[-1]),
        dtype=dtype,
        item_bytes=ITEM_BYTES[dtype],
        context_tokens=context_tokens(config),
        head_reads=sum(p.numel() for p in head.parameters()),
    )
    return replace(headers.measured(model, parameters, dtype), source="config")


def _parameters(model: Any) -> list[headers.Tensor]:
    return [headers.Tensor(name, "F32", tuple(p.shape), p.nbytes) for name, p in model.named_parameters()]


def _layers(config: Any, count: int) -> Iterator[Layer]:
    fields = Fields(_with_experts(config))
    experts = fields.number("num_experts", 0)
    chosen = min(experts, fields.number("num_experts_per_tok", 0)) or experts
    for index in range(count):
        yield Layer(index, {}, experts=experts, experts_per_token=chosen)


def _with_experts(config: Any) -> dict[str, Any]:
    nested = getattr(config, "ffn_config", None)  # of DBRX
    return {**(nested.to_dict() if nested is not None else {}), **config.to_dict()}


def _attention(found: Described) -> Iterator[Attention]:
    """Each call of attention. Where none was recorded, each layer that keeps rows reads them with all heads."""
    rows = {layer.index: layer for layer in found.layers if layer.kind is not Kind.RECURRENT}
    for read in found.reads:
        layer, query = rows[read.source], read.query
        assert query is not None, "every call that was recorded has a query"
        columns = sum(tensor.shape[-1] for tensor in layer.tensors)
        if layer.latent:  # projections are absorbed, so that scores are made with the latents themselves
            columns += query.rank
        yield Attention(2 * query.heads * columns, layer.nbytes, layer.window)
    if found.reads:
        return
    heads = Fields(found.model.config.to_dict()).number("num_attention_heads", 0)
    for layer in found.layers:
        if layer.kind is not Kind.RECURRENT:
            keys, values, *_ = layer.tensors * 2  # one tensor is both
            columns = keys.shape[-1] + values.shape[-1]
            yield Attention(2 * heads * columns, layer.nbytes, layer.window, keys.every)
