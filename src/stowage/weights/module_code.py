"""What a model computes besides its weights and its config, as bytes for its identity: the code and the settings of its
modules.

    class or function of torch, Transformers, Stowage    its name
    the same of a file of somebody else's                its name, and the digest of the file
    number, text, tensor that is an attribute            its value: a layer's scale, a norm's epsilon
    hook, forward of one module, closure, lambda         nothing says what they compute: a random name, so what is
                                                         stored serves the object that it was stored for

Code that is put in the place of Transformers' own (a class's forward, a function of its module) counts as what it is.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from blake3 import blake3
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

logger = logging.getLogger("stowage.models")
_NAMED: Final = frozenset({"torch", "transformers", "accelerate", "stowage", "safetensors", "huggingface_hub", "numpy"})
"""Packages whose code is what its name and their versions say, like the standard library's."""
_NOT_CONTENT: Final = frozenset(
    {"training", "forward", "name_or_path", "warnings_issued", "stowage", "hf_device_map", "layer_types"}
)
"""``layer_types``: the config has them, and Cohere's Compass keeps them as a set, in another order in each process."""
_FUNCTIONS: Final = (types.FunctionType, types.MethodType, functools.partial, type)
_PLAIN: Final = (bool, int, float, complex, str, bytes, torch.dtype, type(None))


def settings(model: nn.Module) -> bytes:
    """Of every module of ``model``: its class and its attributes."""
    found = _Found()
    for name, module in model.named_modules():
        found.lines.append(f"{name}|{_name(type(module))}")
        if not type(module).__module__.startswith("stowage."):  # those hold places in files
            found.lines += [f"{key}={found.value(value)}" for key, value in sorted(_attributes(module))]
    return found.bytes()


def code_of_others(model: nn.Module, own: frozenset[int] = frozenset()) -> bytes:
    """What others put into ``model``, or in the place of its code, but for the hooks ``own``. Empty: nothing."""
    found = _Found()
    for name, module in model.named_modules():
        found.lines += [f"{name}.{what}" for what in found.put_into(name or "the model", module, own)]
    for kind in sorted({kind for module in model.modules() for kind in type(module).__mro__}, key=_name):
        forward = vars(kind).get("forward")
        if not _is_named(_module_of(kind)) or (forward is not None and not _is_named(_module_of(forward))):
            found.lines.append(f"{_name(kind)}: {found.code(kind)} {found.code(forward)}")
    for place in sorted({type(module).__module__ for module in model.modules()}):
        if place.startswith("transformers.") and place in sys.modules:
            values = sorted(vars(sys.modules[place]).items())
            found.lines += [f"{place}.{key}: {found.code(value)}" for key, value in values if _is_put_there(value)]
    return found.bytes()


class FamilyHook(functools.partial[Any]):
    """A hook by which a family is computed: no change of the model. The hook itself says so, as another thread may see
    it while the first computes.
    """


def hooks_of_others(model: nn.Module, own: frozenset[int] = frozenset()) -> frozenset[int]:
    """The numbers of the hooks on its modules and on all modules, except ``own``, its family's, and those that
    Transformers puts in once hidden states or attentions are asked for, which only record.
    """
    found = [torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks]
    for module in model.modules():
        found += [module._forward_hooks, module._forward_pre_hooks]
    every = (number for hooks in found for number, hook in tuple(hooks.items()) if not _changes_nothing(hook))
    return frozenset(every) - own


def _changes_nothing(hook: Any) -> bool:
    return isinstance(hook, FamilyHook) or _module_of(hook) == "transformers.utils.output_capturing"


class _Found:
    """Lines about a model."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._unnamed = ""

    def bytes(self) -> bytes:
        if self._unnamed:
            logger.warning(
                "%s is code that no name tells from other code: what is stored serves this model in this process "
                "alone, and no later one",
                self._unnamed,
                extra={"stowage_event": "unnamed-code"},
            )
        return "\n".join(self.lines).encode()

    def put_into(self, name: str, module: nn.Module, own: frozenset[int]) -> Iterator[str]:
        """Hooks and a forward of its own, whose state may be anywhere, so that no file says what they compute."""
        hooks = {**module._forward_hooks, **module._forward_pre_hooks}
        if name == "the model":
            hooks |= {**torch_module._global_forward_hooks, **torch_module._global_forward_pre_hooks}
        placed = vars(module).get("_hf_hook")
        codes = [hook for number, hook in hooks.items() if number not in own]
        codes += [type(each) for each in getattr(placed, "hooks", (placed,))]
        if not all(map(_is_named, map(_module_of, codes))):
            yield self._private(f"a hook on {name}")
        wrapped = list(_wrapped(vars(module).get("forward")))
        if not all(map(_is_named, map(_module_of, wrapped))):
            yield self._private(f"the forward of {name}")
        if len({hasattr(each, "_torchdynamo_orig_callable") for each in wrapped}) > 1 or _is_compiled(module):
            yield "compiled"

    def code(self, code: Any) -> str:
        """The name of a function or a class."""
        if code is None:
            return ""
        if isinstance(code, functools.partial):
            return f"{self.code(code.func)}({self.value(code.args)}, {self.value(code.keywords)})"
        if isinstance(code, types.MethodType):
            return f"{self.code(code.__func__)} of {self.code(type(code.__self__))}"
        place, name = _module_of(code), getattr(code, "__qualname__", type(code).__name__)
        if _is_named(place):
            return f"{place}.{name}"
        file = getattr(sys.modules.get(place), "__file__", None)
        if file is None or _looked_up(place, name) is not code or not Path(file).is_file():
            return self._private(f"{place}.{name}")
        return f"{place}.{name}/{blake3(Path(file).read_bytes()).hexdigest()}"

    def value(self, value: Any) -> str:
        """An attribute's value; of an object that is no number, text or code, the name of its class."""
        if isinstance(value, _PLAIN):
            return repr(value)
        if isinstance(value, tuple | list):
            return f"[{', '.join(map(self.value, value))}]"
        if isinstance(value, set | frozenset):
            return f"{{{', '.join(sorted(map(self.value, value)))}}}"
        if isinstance(value, dict):
            return f"{{{', '.join(sorted(f'{key}: {self.value(each)}' for key, each in value.items()))}}}"
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, types.BuiltinFunctionType):
            return f"{value.__module__}.{value.__qualname__}"
        if isinstance(value, _FUNCTIONS):
            return self.code(value)
        kind = type(value)
        return self.code(kind) if not callable(value) or _is_named(kind.__module__) else self._private(_name(kind))

    def _tensor(self, tensor: Tensor) -> str:
        form = f"{tensor.dtype}{tuple(tensor.shape)}"
        if tensor.device.type == "meta":
            return form
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return f"{form}/{blake3(raw).hexdigest()}"

    def _private(self, what: str) -> str:
        self._unnamed = self._unnamed or what
        return f"private:{os.urandom(16).hex()}"


def _wrapped(code: Any) -> Iterator[Any]:
    """``code``, and what it calls in turn where it says so."""
    while code is not None:
        yield code
        code = getattr(code, "_torchdynamo_orig_callable", None) or getattr(code, "__wrapped__", None)


def _is_compiled(module: nn.Module) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for key, value in vars(module).items():
        if not key.startswith("_") and key not in _NOT_CONTENT:
            yield key, value


def _module_of(code: Any) -> str:
    """Where code is from: of a function not what it says, which a decorator copies from what it wraps."""
    if isinstance(code, functools.partial):
        return _module_of(code.func)
    if isinstance(code, types.MethodType):
        code = code.__func__
    said = code.__globals__.get("__name__") if isinstance(code, types.FunctionType) else None
    return str(said or getattr(code, "__module__", None) or "builtins")


def _is_named(place: str) -> bool:
    root = place.partition(".")[0]
    return root in _NAMED or root in sys.stdlib_module_names


def _is_put_there(value: Any) -> bool:
    """Whether a value in a module of Transformers is code of others."""
    return isinstance(value, types.FunctionType | type) and not _is_named(_module_of(value))


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _looked_up(place: str, name: str) -> Any:
    found: Any = sys.modules.get(place)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found
