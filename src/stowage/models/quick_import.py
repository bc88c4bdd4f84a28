"""Imports Transformers into a process of the ``stowage`` command without what a CPU and one process never use.

Importing Transformers brings torch's tools for many devices (``torch.distributed.tensor``, and sympy with it) and its
compiler (Dynamo): 40 % of all imports. The first is left out as on a torch that was built without it, which
Transformers provides for. In place of the compiler stands a module that has its decorators, which keep functions as
they are: nothing is compiled here. Who asks it for anything else gets the compiler. A program that has imported
Transformers itself keeps what it has.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

__all__ = ["import_transformers"]

_DECORATORS = ("allow_in_graph", "assume_constant_result", "disable")
_COMPILER = "torch._dynamo"
_OF_MASKS = f"{_COMPILER}._trace_wrapped_higher_order_op"


def import_transformers() -> None:
    """Import Transformers and what it loads models with; where it or the compiler is there already, do nothing."""
    if "transformers" in sys.modules or _COMPILER in sys.modules:
        return
    with _compiler_later(), _one_device():
        import transformers.integrations.finegrained_fp8
        import transformers.masking_utils
        import transformers.modeling_utils  # noqa: F401


class _Later(ModuleType):
    """Stands in for the compiler until something but a decorator is wanted of it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # what Python asks any module for
            raise AttributeError(name)
        import torch

        if sys.modules.get(_COMPILER) is self:
            del sys.modules[_COMPILER]
            sys.modules.pop(_OF_MASKS, None)
            vars(torch).pop("_dynamo", None)
        return getattr(import_module(_COMPILER), name)


@contextmanager
def _compiler_later() -> Iterator[None]:
    """A stand-in for the compiler from now on, and in here for a context that is imported from a module of it."""
    import torch

    later, masks = _Later(_COMPILER), ModuleType(_OF_MASKS)
    vars(later).update(dict.fromkeys(_DECORATORS, _as_it_is))
    vars(masks).update(TransformGetItemToIndex=_index_by_items)
    compiler = vars(torch.compiler)
    own = {name: compiler[name] for name in _DECORATORS if name in compiler}
    compiler.update(dict.fromkeys(own, _as_it_is))
    sys.modules[_COMPILER], sys.modules[_OF_MASKS] = later, masks
    vars(torch)["_dynamo"] = later
    try:
        yield
    finally:
        compiler.update(own)
        if sys.modules.get(_OF_MASKS) is masks:
            del sys.modules[_OF_MASKS]


@contextmanager
def _one_device() -> Iterator[None]:
    import torch.distributed

    available = torch.distributed.is_available
    torch.distributed.is_available = lambda: False
    try:
        from transformers.utils.import_utils import is_torch_distributed_available

        is_torch_distributed_available()  # it remembers what it is told
        yield
    finally:
        torch.distributed.is_available = available


def _as_it_is(function: Any = None, *rest: Any, **options: Any) -> Any:
    """A decorator, called with a function or with options, that changes nothing."""
    return function if function is not None else _as_it_is


def _index_by_items() -> Any:
    """The context in which a mask's rule indexes tensors by tensors."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    return TransformGetItemToIndex()
