"""Replaces methods of a model with offloaded weights: saving and training do what is possible, the rest raises
ModelError with the reason. Each replacement is an attribute of this one object, in front of its class's method.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Container, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import TransformType

from stowage.errors import ModelError
from stowage.weights import saving
from stowage.weights.offloaded_parameter import OffloadedError, OffloadedParameter

_MERGE = (
    "the weights that it would be added to lie in the checkpoint's files. Save the adapter, and merge it in memory: "
    "PeftModel.from_pretrained(BASE, DIR).merge_and_unload().save_pretrained(NEW_DIR)"
)
_WHOLE = "Load it without a budget for that, or with device_memory so large that everything stays."
_NAMES = (
    "save_pretrained", "state_dict", "load_state_dict", "resize_token_embeddings", "train", "_apply",
    "gradient_checkpointing_enable", "add_adapter", "load_adapter", "share_memory", "named_parameters",
    "__deepcopy__", "__getstate__",
)  # fmt: skip


def guard(
    model: Any,
    read: saving.Read,
    offloaded: bool,
    learns: Callable[[], Any],
    checkpoint: Callable[..., Any],
    placed: Container[int],
) -> None:
    """Replace the methods of ``model``. ``read(name)``: a copy of a parameter or buffer. ``offloaded``: whether some
    parameters are offloaded (else all are resident or mapped). ``learns``: returns ``None`` if a forward would compute
    no gradients, and may raise. ``checkpoint``: as ``torch.utils.checkpoint.checkpoint``. ``placed``: ids of the
    parameters that lie where the placement says, and stay there; later ones were added.
    """
    own: dict[str, Any] = {name: getattr(model, name, None) for name in _NAMES}
    told = {
        "state_dict": (
            "its weights do not fit into memory together. Save it with model.save_pretrained(DIR), which writes one "
            "tensor after the other, or take them one by one: for name, tensor in model.stowage.tensors()."
        ),
        "load_state_dict": f"its weights are read from the checkpoint's files. {_WHOLE}",
        "resize_token_embeddings": f"its embeddings are read from the checkpoint's files. {_WHOLE}",
        "add_adapter": "an adapter inside of it is not saved with it. Put it around: peft.get_peft_model(model, ...).",
        "load_adapter": "give the adapter when the model is loaded (stowage.offload(MODEL, adapter=DIR)), or put it "
        "around: peft.PeftModel.from_pretrained(model, DIR, is_trainable=True).",
        "share_memory": f"its memory is this process's. Load it in each process. {_WHOLE}",
        "__deepcopy__": f"a copy would share its files and memory. Load it again instead. {_WHOLE}",
        "__getstate__": "its weights are in files. Save it with model.save_pretrained(DIR), and load it from there.",
    }
    whole_state = told.pop("state_dict")
    if not offloaded:
        del told["load_state_dict"]
    for name, why in told.items():
        if own[name] is not None or name.startswith("__"):
            _put(model, name, own[name], functools.partial(_refuse, name, why))
    plain = own["save_pretrained"]
    if plain is not None:

        def save_pretrained(save_directory: str | os.PathLike[str], is_main_process: bool = True, **given: Any) -> None:
            given = {"max_shard_size": "50GB", **given, "is_main_process": is_main_process}
            saving.save(model, read, plain, save_directory, **given)

        _put(model, "save_pretrained", plain, save_pretrained)
    if offloaded and own["state_dict"] is not None:
        _put(model, "state_dict", own["state_dict"], functools.partial(_state, own["state_dict"], whole_state))
    _put(model, "train", own["train"], functools.partial(_train, model, own["train"], learns))
    if offloaded:
        _put(
            model,
            "named_parameters",
            own["named_parameters"],
            functools.partial(_named, model, own["named_parameters"]),
        )
    if own["gradient_checkpointing_enable"] is not None:
        enable = functools.partial(_checkpoint, model, own["gradient_checkpointing_enable"], checkpoint)
        _put(model, "gradient_checkpointing_enable", own["gradient_checkpointing_enable"], enable)
    _put(model, "_apply", own["_apply"], functools.partial(_apply, model, own["_apply"], placed))


def refuse_transforms(offloaded: bool) -> None:
    """Raise ModelError where something else than autograd would differentiate the forward that begins, or record it.
    ``offloaded``: see `guard`.
    """
    stack = torch._C._functorch.get_interpreter_stack() or ()
    if any(each.key() in (TransformType.Grad, TransformType.Jvp) for each in stack):
        raise ModelError(
            "torch.func.grad(), vjp(), jvp() and the like do not see weights that come and go. Compute gradients with "
            "loss.backward() or torch.autograd.grad(), of a frozen model: model.requires_grad_(False)."
        )
    if offloaded and torch._C._get_tracing_state() is not None:
        raise ModelError(f"a traced graph would compute from weights that are not there: NaN. {_WHOLE}")


def _put(model: Any, name: str, own: Any, instead: Callable[..., Any]) -> None:
    if own is not None and hasattr(own, "__func__"):
        functools.update_wrapper(instead, own)
    model.__dict__[name] = instead


def _refuse(what: str, why: str, *_args: Any, **_kwargs: Any) -> Any:
    done = {"__deepcopy__": "be copied", "__getstate__": "be pickled", "state_dict": "give all of them at once"}
    raise ModelError(f"a model with offloaded weights cannot {done.get(what, f'do {what}()')}: {why}")


def _state(own: Callable[..., Any], why: str, *args: Any, **given: Any) -> Any:
    """Modules around the model, such as PEFT's, ask for a dictionary of all parameters to take their own from it. They
    get it; offloaded parameters in it raise when they are read.
    """
    if given.get("destination") is None:
        _refuse("state_dict", why)
    found = own(*args, **{**given, "keep_vars": True})
    if not given.get("keep_vars"):
        for name, value in found.items():
            if isinstance(value, Tensor) and not isinstance(value, OffloadedParameter):
                found[name] = value.detach()
    return found


def _train(model: nn.Module, own: Callable[[bool], Any], learns: Callable[[], Any], mode: bool = True) -> Any:
    if mode and learns() is None and any(p.requires_grad for p in model.parameters()):
        raise ModelError(
            "offloaded weights have no gradients, so the model cannot be trained as it is. What is added to it "
            "can, LoRA for example, while its weights are frozen: peft.get_peft_model(model, LoraConfig(...)). "
            f"{_WHOLE}"
        )
    return own(mode)


def _named(model: nn.Module, own: Callable[..., Any], *args: Any, **given: Any) -> Any:
    """PEFT calls this after it has put adapters into the model. From then on its layers refuse ``merge``: it would
    change those in memory before it fails at the first one that is offloaded.
    """
    for module in model.modules():
        if hasattr(module, "base_layer") and hasattr(module, "merge"):  # PEFT's
            module.__dict__["merge"] = functools.partial(_refuse, "merge", _MERGE)
    return own(*args, **given)


def _checkpoint(
    model: nn.Module, own: Callable[..., Any], checkpoint: Callable[..., Any], *args: Any, **given: Any
) -> None:
    """As Transformers' own, with ``checkpoint``, which delivers a layer's weights for the second computation."""
    own(*args, **given)
    for module in model.modules():
        if hasattr(module, "_gradient_checkpointing_func"):
            module.__dict__["_gradient_checkpointing_func"] = checkpoint


def _apply(
    model: nn.Module, own: Callable[..., Any], placed: Container[int], fn: Callable[[Any], Any], recurse: bool = True
) -> Any:
    """``to``, ``half`` and the like: buffers and what was added follow. Where a placed parameter would change they
    raise, before anything does.
    """
    added = list(model.buffers())
    with torch.no_grad():
        for parameter in model.parameters():
            if id(parameter) not in placed:
                added.append(parameter)
            elif not _stays(fn, parameter):
                raise ModelError(f"offloaded weights keep their dtype and their device. {_WHOLE}")
        if all(fn(tensor) is tensor for tensor in added):
            return model
    with _without(model, placed):
        return own(fn, recurse)


def _stays(fn: Callable[[Any], Any], parameter: nn.Parameter) -> bool:
    try:
        return fn(parameter) is parameter
    except OffloadedError:
        return False


@contextlib.contextmanager
def _without(model: nn.Module, placed: Container[int]) -> Iterator[None]:
    """Context: modules do not show these parameters, since torch writes to all that it finds, changed or not."""
    found = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if id(parameter) in placed
    ]
    for module, name, _ in found:
        module._parameters[name] = None
    try:
        yield
    finally:
        for module, name, parameter in found:
            module._parameters[name] = parameter
