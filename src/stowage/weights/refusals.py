"""What a model whose weights come and go says to those who want more of it than answers: that it can be saved, or be
trained with what was added to it, or why not. Every method here takes the place of the model's own, on this one object.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from stowage.errors import ModelError
from stowage.weights import saving
from stowage.weights.offloaded_parameter import OffloadedParameter

__all__ = ["guard"]

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
    model: Any, read: saving.Read, offloaded: bool, learns: Callable[[], Any], checkpoint: Callable[..., Any]
) -> None:
    """Put them there. ``read`` gives a copy of a parameter or buffer by its name; ``offloaded``: whether some are
    offloaded. ``learns`` gives something where a forward would compute gradients, and may refuse; ``checkpoint``
    computes a layer and, for its gradients, computes it again.
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
    _put(model, "_apply", own["_apply"], functools.partial(_apply, model, own["_apply"]))


def _put(model: Any, name: str, own: Any, instead: Callable[..., Any]) -> None:
    if own is not None and hasattr(own, "__func__"):
        functools.update_wrapper(instead, own)
    model.__dict__[name] = instead


def _refuse(what: str, why: str, *_args: Any, **_kwargs: Any) -> Any:
    done = {"__deepcopy__": "be copied", "__getstate__": "be pickled", "state_dict": "give all of them at once"}
    raise ModelError(f"a model whose weights come and go cannot {done.get(what, f'do {what}()')}: {why}")


def _state(own: Callable[..., Any], why: str, *args: Any, **given: Any) -> Any:
    """What is around the model, as PEFT's adapters are, may ask for a dictionary of everything, and take its own from
    it. In that a weight is what it is in the model: one that is offloaded says so to who reads it.
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
            "weights that come and go have no gradients, so the model cannot be trained as it is. What is added to it "
            "can, LoRA for example, while its weights are frozen: peft.get_peft_model(model, LoraConfig(...)). "
            f"{_WHOLE}"
        )
    return own(mode)


def _named(model: nn.Module, own: Callable[..., Any], *args: Any, **given: Any) -> Any:
    """Who puts adapters into a model looks through its parameters then, to freeze the others. From then on none of
    these layers can be merged: the first might stay in memory, and be changed before the next one says that it is
    offloaded.
    """
    for module in model.modules():
        if hasattr(module, "base_layer") and hasattr(module, "merge"):  # PEFT's
            module.__dict__["merge"] = functools.partial(_refuse, "merge", _MERGE)
    return own(*args, **given)


def _checkpoint(
    model: nn.Module, own: Callable[..., Any], checkpoint: Callable[..., Any], *args: Any, **given: Any
) -> None:
    """As Transformers does it, and weights are there when a layer is computed again."""
    own(*args, **given)
    for module in model.modules():
        if hasattr(module, "_gradient_checkpointing_func"):
            module.__dict__["_gradient_checkpointing_func"] = checkpoint


def _apply(model: nn.Module, own: Callable[..., Any], fn: Callable[[Any], Any], recurse: bool = True) -> Any:
    """``to``, ``half`` and the like: what leaves everything as it is may be asked for, and anything else is refused
    before something has changed.
    """
    for parameter in model.parameters():
        if isinstance(parameter, OffloadedParameter) and fn(parameter) is not parameter:
            raise ModelError(f"weights that come and go are of the type and on the device that they have. {_WHOLE}")
    return model if all(fn(t) is t for t in model.buffers()) else own(fn, recurse)
