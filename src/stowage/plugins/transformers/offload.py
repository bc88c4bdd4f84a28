"""`stowage.offload`: a Transformers model whose weights live where a budget says, for calls of ``generate()``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from stowage.config import arguments
from stowage.config.memory import RULES_MAX, parse_disk, parse_size, ram_total_bytes
from stowage.config.wording import shown_value
from stowage.errors import BudgetError, ConfigError, ModelError, UnsupportedModelError
from stowage.weights.placement import more_for, parse_rules
from stowage.weights.scratch_file import scratch_directory

_OF_THE_HUB: Final[Mapping[str, str]] = {
    "subfolder": "download it, and give the directory in it that holds config.json",
    "revision": "give the directory that huggingface_hub.snapshot_download(MODEL, revision=...) returns",
    "cache_dir": "set HF_HOME to the directory that models are to be kept in",
    "token": "set HF_TOKEN",
    "force_download": "download it with huggingface_hub.snapshot_download(MODEL, force_download=True) first",
    "local_files_only": "set HF_HUB_OFFLINE=1",
    "proxies": "set HTTPS_PROXY",
}
"""Options of ``from_pretrained`` that say where the hub's files come from, and what to do instead."""


def offload(
    model: str | Path | Any,
    *,
    device_memory: int | str = 0,
    host_memory: int | str = 0,
    disk: str = "",
    dtype: Any = "auto",
    weights: str = "auto",
    device: str = "",
    threads: str = "wait",
    model_class: Any = None,
    adapter: str | Path = "",
    **options: Any,
) -> Any:
    """A model that answers as it would without a budget, and keeps no more of its weights in memory than it is given.

    Args:
        model: checkpoint directory, hub id, or any Transformers model in memory, whose weights are then moved.
        device_memory: what weights may take in the memory that the model computes from, such as ``"3GiB"``; 0: no
            limit. KV cache and activations are the script's own and come on top.
        host_memory: memory for weights besides: views over the checkpoint's files, shared with the page cache.
        disk: ``"DIR:SIZE"`` for weights whose form in memory is not the checkpoint's (another ``dtype``, a model in
            memory). A file without a name that vanishes with the process. Where ``device_memory`` is given and this is
            not, it is made where the system keeps large temporary files, of at most half of what is free there.
        dtype: ``auto`` (the checkpoint's own), ``float32``, ``bfloat16`` or ``float16``, or torch's.
        weights: ``auto``, or rules such as ``"model.layers.*=stream"`` and ``"last 1 of 4=resident"``, with commas
            between.
        device: what the model computes on: ``cpu`` (the default), ``cuda``, ``cuda:1``.
        threads: what becomes of a forward that begins while another thread is in one: ``wait`` for its turn, or
            ``refuse`` it with a ModelError.
        model_class: what the checkpoint is loaded as: a class of Transformers, one of its Auto classes, or a name of
            one. Left out, the class that config.json names. ``AutoModelForCausalLM`` of a model that takes pictures
            gives its text model alone.
        adapter: a LoRA adapter's directory, as PEFT saves it, which is added to every answer. Its matrices stay on the
            device, in float32, and count as ``device_memory``.
        options: for Transformers' ``from_pretrained``, such as ``attn_implementation``. ``subfolder`` (of a directory)
            and ``gguf_file`` say which checkpoint.

    Returns the model. Its ``stowage`` attribute has ``placement``, ``stats()`` and ``close()``. Any number of threads
    may call it: whole forwards take turns. Raises BudgetError (with the least that works), ConfigError,
    CheckpointError, StorageError, UnsupportedModelError.
    """
    arguments.checkpoint("model", model)
    if "torch_dtype" in options:  # as from_pretrained() called it, and still takes it
        if dtype != "auto":
            raise ConfigError("dtype and torch_dtype are the same: give one of them.")
        dtype = options.pop("torch_dtype")
    if type(dtype).__name__ == "dtype":  # torch.bfloat16
        dtype = str(dtype).removeprefix("torch.")
    for name, value in (("disk", disk), ("dtype", dtype), ("device", device)):
        arguments.text(name, value)
    arguments.text("weights", weights, RULES_MAX)
    arguments.text("threads", threads)
    device_bytes = _size("device_memory", device_memory)
    _refuse_options(options)
    model = _named(model, options)
    host_bytes = _size("host_memory", host_memory)
    scratch = parse_disk(disk) if disk else scratch_directory() if device_bytes else None
    if threads not in ("wait", "refuse"):
        raise ConfigError(f"threads={shown_value(threads)} is unknown: say 'wait' or 'refuse'.")
    rules = parse_rules(weights)
    if not device_bytes and not rules:
        raise ConfigError(
            'offload() was given no budget: say what weights may take, such as device_memory="3GiB", or where they '
            "lie, "
            'such as weights="model.layers.*=stream".'
        )
    import torch

    from stowage.executor.device import carrier, device_of
    from stowage.models import loading
    from stowage.models.adapters import read_all
    from stowage.weights.loading import Budget

    in_memory = not isinstance(model, str | Path)
    if in_memory:
        _refuse(model, {**options, **({"model_class": model_class} if model_class is not None else {})})
    here = device_of(model, device)
    files = read_all(adapter)
    beside = sum(file.nbytes for file in files)
    if device_bytes and beside >= device_bytes:
        raise BudgetError(f"device_memory={device_memory!r}, and the adapter alone takes {beside:,} bytes of it.")
    limit = device_bytes - beside if device_bytes else None
    budget = Budget(limit, host_bytes, scratch, rules, carrier(here), more=lambda needed: more_for(needed + beside))
    load = partial(loading.load, device=here, whole=True, model_class=model_class)
    loaded = load(model, dtype, None, lambda _config: budget, options)
    offloaded = loaded.model
    offloaded.stowage.waits = threads == "wait"
    if files:
        with torch.inference_mode(False):
            _put_on(loaded, files)
    return offloaded


def _put_on(loaded: Any, files: list[Any]) -> None:
    """The adapter in ``files``, on for good: what the model answers has another name from now on."""
    from stowage.core.key import adapter_namespace
    from stowage.models.adapters import Adapters
    from stowage.models.model_class import trial_inputs

    model, source = loaded.model, loaded.model.stowage
    try:
        adapters = Adapters(model, files, loaded.renamed)
        adapter = adapters.named(files[0].name)
        adapters.put_on(adapter)
        given = trial_inputs(model, 1)
        if given is not None and adapter is not None:
            model(**given)
            missed = sorted(adapter.layers.keys() - adapter.called)
            if missed:
                raise UnsupportedModelError(
                    f"the adapter changes {missed[0]}, whose weight the model uses without calling it. Merge it with "
                    "PEFT: PeftModel.from_pretrained(BASE, DIR).merge_and_unload().save_pretrained(NEW_DIR)"
                )
        source.name(adapter_namespace(bytes.fromhex(source.identity), files[0].digest).hex())
        for name in ("save_pretrained", "merge_and_unload"):
            model.__dict__[name] = partial(_refuse_adapted, name)
    except BaseException:
        source.close()
        raise


def _refuse_adapted(name: str, *_args: Any, **_kwargs: Any) -> None:
    raise ModelError(
        f"a model with an adapter cannot do {name}(): its weights are the base's, and the adapter is added to what "
        "they compute. Merge it in memory: "
        "PeftModel.from_pretrained(BASE, DIR).merge_and_unload().save_pretrained(NEW_DIR)"
    )


def _size(name: str, size: int | str) -> int:
    try:
        return parse_size(size, ram_total_bytes())
    except ConfigError as error:
        raise ConfigError(f"{name} cannot be used. {error}") from error


def _refuse_options(options: dict[str, Any]) -> None:
    """Those of ``from_pretrained`` that are said in another way here. Takes out ``trust_remote_code=False``."""
    if options.pop("trust_remote_code", False):
        raise ConfigError(
            "trust_remote_code=True: no code that comes with a checkpoint is run here. Load the model yourself, where "
            "you trust it, and give it in place of its name: stowage.offload(model.eval(), device_memory=...)"
        )
    for name in ("device_map", "max_memory"):
        if options.pop(name, None) is not None:
            raise ConfigError(
                f"{name}: where weights lie is said by device_memory, host_memory and weights, and what computes by "
                "device. Leave it out."
            )
    if options.pop("variant", None):
        raise ConfigError(
            "variant: a checkpoint's files are read under their usual names. Give a directory that holds those of the "
            "variant alone, called as Transformers calls them without it, such as model.safetensors."
        )
    if options.get("use_safetensors"):
        del options["use_safetensors"]  # nothing else is read


def _named(model: Any, options: dict[str, Any]) -> Any:
    """The checkpoint that ``model`` is, or the one in it that ``options`` name as Transformers does. Takes those out
    that say where files are: of another checkpoint than is looked at here, they would be taken for its.
    """
    if not isinstance(model, str | Path):
        return model
    said = {name: value for name in (*_OF_THE_HUB, "gguf_file") if (value := options.pop(name, None))}
    for name in said.keys() & {"subfolder", "gguf_file"}:
        arguments.text(name, said[name])
    if os.path.exists(os.path.expanduser(model)):
        path = Path(model).expanduser().absolute() / said.get("subfolder", "") / said.get("gguf_file", "")
        return path if said.keys() & {"subfolder", "gguf_file"} else model
    for name, instead in _OF_THE_HUB.items():
        if name in said:
            raise ConfigError(f"{name}={shown_value(said[name])} is not taken for a model on the hub: {instead}.")
    return f"{model}:{said['gguf_file']}" if "gguf_file" in said else model


def _refuse(model: Any, options: dict[str, Any]) -> None:
    if getattr(model, "config", None) is None or not hasattr(model, "named_parameters"):
        raise UnsupportedModelError(
            f"a {type(model).__name__} is no Transformers model: give a checkpoint's directory, a hub id, or a model "
            "that from_pretrained() made."
        )
    if getattr(model, "stowage", None) is not None:
        raise ModelError("this model's weights are placed already: load it anew for another budget.")
    if options:
        raise ConfigError(
            f"{', '.join(options)}: these are for a model that is loaded, and this one is in memory already."
        )
    if model.training:
        raise ModelError("the model is in training mode, and offloaded weights cannot be trained: call model.eval().")
