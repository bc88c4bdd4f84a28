"""What a model whose weights come and go says to those who want more of it than answers: that it can be saved, or why
not. Every method here takes the place of the model's own, on this one object.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from torch import nn

from stowage.errors import ModelError
from stowage.weights import saving
from stowage.weights.away import AwayParameter

__all__ = ["guard"]

_WHOLE = "Load it without a budget for that, or with device_memory so large that everything stays."
_NAMES = (
    "save_pretrained", "state_dict", "load_state_dict", "resize_token_embeddings", "train", "_apply",
    "gradient_checkpointing_enable", "enable_input_require_grads", "add_adapter", "load_adapter", "share_memory",
    "__deepcopy__", "__getstate__",
)  # fmt: skip


def guard(model: Any, read: saving.Read, away: bool) -> None:
    """Put them there. ``read`` gives a copy of a parameter or buffer by its name; ``away``: whether some are away."""
    own: dict[str, Any] = {name: getattr(model, name, None) for name in _NAMES}
    told = {
        "state_dict": (
            "its weights do not fit into memory together. Save it with model.save_pretrained(DIR), which writes one "
            "tensor after the other, or take them one by one: for name, tensor in model.stowage.tensors()."
        ),
        "load_state_dict": f"its weights are read from the checkpoint's files. {_WHOLE}",
        "resize_token_embeddings": f"its embeddings are read from the checkpoint's files. {_WHOLE}",
        "gradient_checkpointing_enable": f"its weights have no gradients. {_WHOLE}",
        "enable_input_require_grads": f"its weights have no gradients. {_WHOLE}",
        "add_adapter": f"an adapter that is put into it has no gradients and cannot be saved with it. {_WHOLE}",
        "load_adapter": f"adapters are not put on weights that come and go yet. {_WHOLE}",
        "share_memory": f"its memory is this process's. Load it in each process. {_WHOLE}",
        "__deepcopy__": f"a copy would share its files and memory. Load it again instead. {_WHOLE}",
        "__getstate__": "its weights are in files. Save it with model.save_pretrained(DIR), and load it from there.",
    }
    if not away:
        del told["state_dict"], told["load_state_dict"]
    for name, why in told.items():
        if own[name] is not None or name.startswith("__"):
            _put(model, name, own[name], functools.partial(_refuse, name, why))
    plain = own["save_pretrained"]
    if plain is not None:

        def save_pretrained(save_directory: str | os.PathLike[str], is_main_process: bool = True, **given: Any) -> None:
            given = {"max_shard_size": "50GB", **given, "is_main_process": is_main_process}
            saving.save(model, read, plain, save_directory, **given)

        _put(model, "save_pretrained", plain, save_pretrained)
    _put(model, "train", own["train"], functools.partial(_train, own["train"]))
    _put(model, "_apply", own["_apply"], functools.partial(_apply, model, own["_apply"]))


def _put(model: Any, name: str, own: Any, instead: Callable[..., Any]) -> None:
    if own is not None and hasattr(own, "__func__"):
        functools.update_wrapper(instead, own)
    model.__dict__[name] = instead


def _refuse(what: str, why: str, *_args: Any, **_kwargs: Any) -> Any:
    done = {"__deepcopy__": "be copied", "__getstate__": "be pickled", "state_dict": "give all of them at once"}
    raise ModelError(f"a model whose weights come and go cannot {done.get(what, f'do {what}()')}: {why}")


def _train(own: Callable[[bool], Any], mode: bool = True) -> Any:
    if mode:
        raise ModelError(f"weights that come and go have no gradients, so the model cannot be trained. {_WHOLE}")
    return own(mode)


def _apply(model: nn.Module, own: Callable[..., Any], fn: Callable[[Any], Any], recurse: bool = True) -> Any:
    """``to``, ``half`` and the like: what leaves everything as it is may be asked for, and anything else is refused
    before something has changed.
    """
    for parameter in model.parameters():
        if isinstance(parameter, AwayParameter) and fn(parameter) is not parameter:
            raise ModelError(f"weights that come and go are of the type and on the device that they have. {_WHOLE}")
    return model if all(fn(t) is t for t in model.buffers()) else own(fn, recurse)
