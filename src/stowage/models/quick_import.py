"""Imports Transformers into a process of the ``stowage`` command without what a CPU and one process never use.

Importing Transformers brings torch's tools for many devices (``torch.distributed.tensor``, and sympy with it) and its
compiler (Dynamo): 40 % of all imports. The first is left out as on a torch that was built without it, which
Transformers provides for. In place of the compiler stands a module that has its decorators, which keep functions as
they are: nothing is compiled here. Who asks it for anything else gets the compiler. So it is with symbolic shapes,
and with sympy: plain conditions are answered without. accelerate, which is of no use without several devices, counts
as not installed; what Transformers finds out about its own files by reading all of them is remembered
(`import_structure`). torch asks from which module its own functions are called, and is answered without a look at the
files of all. A program that has imported Transformers itself keeps what it has.
"""

from __future__ import annotations

import ctypes
import inspect
import operator
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import Any

from stowage.models.import_structure import remembering

_DECORATORS = ("allow_in_graph", "assume_constant_result", "disable")
_COMPILER = "torch._dynamo"
_SYMBOLS = "torch.fx.experimental.symbolic_shapes"
_PLAIN: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(
        ("expect_true", "guard_bool", "guard_or_false", "guard_or_true", "guard_size_oblivious"), lambda said, *_: said
    ),
    "guarding_hint_or_throw": lambda size, *_: size,
    "has_guarding_hint": lambda *_: True,
    "is_nested_int": lambda *_: False,
    "statically_known_true": lambda said, *_: said,
    "sym_and": lambda *said: all(said),
    "sym_eq": operator.eq,
    "sym_or": lambda *said: any(said),
}
"""What functions of symbolic shapes answer for numbers and conditions that are no symbols."""
_LOADED_BEFORE = ("contextvars", "hashlib", "mmap", "pickle", "queue", "ssl", "unicodedata", "yaml")
"""Modules in C that the hub's client needs: libraries are loaded one at a time, so they would wait for torch's."""
_OF_MASKS = f"{_COMPILER}._trace_wrapped_higher_order_op"


def import_transformers() -> None:
    """Import Transformers and what it loads models with; where it or the compiler is there already, do nothing."""
    if "transformers" in sys.modules or _COMPILER in sys.modules:
        return
    import huggingface_hub.hf_api  # noqa: F401  # it needs no torch, whose library is being loaded meanwhile

    with _modules_by_their_names(), _compiler_later(), remembering(), _one_device():
        import transformers.integrations.finegrained_fp8
        import transformers.masking_utils
        import transformers.modeling_utils  # noqa: F401
    loading = sys.modules.get("transformers.core_model_loading")
    if getattr(loading, "re", None) is re:
        vars(loading)["re"] = _Expressions()


def begin_import() -> None:
    """Let another thread load torch's largest library, while this one imports what it needs before torch. Where the
    library is not found, nothing is lost.
    """
    spec = find_spec("torch") if "torch" not in sys.modules else None
    if spec is None or spec.origin is None:
        return
    library = Path(spec.origin).parent / "lib" / "libtorch_cpu.so"
    if library.is_file():
        for name in _LOADED_BEFORE:
            with suppress(ImportError):
                import_module(name)
        load = ctypes.CDLL(None).dlopen  # a C function's call leaves the interpreter to others; ``CDLL(path)`` does not
        Thread(target=load, args=(os.fsencode(library), os.RTLD_NOW), daemon=True, name="stowage-import").start()


class _LazyModule(ModuleType):
    """Stands in for a module until something is wanted of it that it was not given; then ``needed`` stand-ins make room
    for their modules, too. A ``package`` is asked for modules as well.
    """

    def __init__(self, name: str, needed: tuple[str, ...] = (), *, package: bool = False, **given: Any) -> None:
        super().__init__(name)
        self.__spec__ = PathFinder.find_spec(name) if "." not in name else None  # others ask whether it is installed
        vars(self).update(given, _needed=needed, _package=package)
        outer, _, here = name.rpartition(".")
        sys.modules[name] = self
        if outer in sys.modules:
            vars(sys.modules[outer])[here] = self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and not (name == "__path__" and vars(self)["_package"]):  # what Python asks any module
            raise AttributeError(name)
        return getattr(_own(self.__name__), name)


def _own(name: str) -> Any:
    """The module ``name`` itself, in place of what stands in for it and for what it needs."""
    standing = sys.modules.get(name)
    for module in (name, *vars(standing)["_needed"]) if isinstance(standing, _LazyModule) else ():
        if isinstance(sys.modules.get(module), _LazyModule):
            del sys.modules[module]
            outer, _, here = module.rpartition(".")
            vars(sys.modules.get(outer, standing)).pop(here, None)
    return import_module(name)


class _Basic:
    """Stands in for the class of all symbols. As long as sympy is not imported nothing is one."""

    def __instancecheck__(self, instance: Any) -> bool:
        loaded = sys.modules.get("sympy")
        return not isinstance(loaded, _LazyModule | None) and isinstance(instance, loaded.Basic)

    def __mro_entries__(self, bases: Any) -> tuple[Any, ...]:
        return (_own("sympy").Basic,)

    def __or__(self, other: Any) -> Any:  # in what functions say of their types
        return _own("sympy").Basic | other

    def __getattr__(self, name: str) -> Any:
        return getattr(_own("sympy").Basic, name)


class _Expressions:
    """``re`` for the module of Transformers that makes an expression for every renaming of weights in every family,
    hundreds of them, and then uses those of one family.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(re, name)

    @staticmethod
    def compile(pattern: Any, flags: int = 0) -> Any:
        return _Expression(pattern, flags)


class _Expression:
    """A regular expression that is compiled when something is first wanted of it."""

    def __init__(self, pattern: Any, flags: int) -> None:
        self._given = pattern, flags

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = vars(self)[name] = getattr(re.compile(*self._given), name)
        return found

    def __deepcopy__(self, _: Any) -> _Expression:
        return self


@contextmanager
def _modules_by_their_names() -> Iterator[None]:
    """In here, ``inspect`` knows a frame's module by the name that stands in it, if its variables are the frame's. Else
    it looks for the frame's file, and resolves the paths of all modules for it.
    """
    look = inspect.getmodule

    def module_of(object: Any, _filename: str | None = None) -> ModuleType | None:
        if inspect.isframe(object):
            module = sys.modules.get(object.f_globals.get("__name__", ""))
            if isinstance(module, ModuleType) and module.__dict__ is object.f_globals:
                return module
        return look(object, _filename)

    inspect.getmodule = module_of
    try:
        yield
    finally:
        inspect.getmodule = look


@contextmanager
def _compiler_later() -> Iterator[None]:
    """A stand-in for the compiler from now on, and in here for a context that is imported from a module of it."""
    import torch

    compiler = vars(torch.compiler)
    own = {name: compiler[name] for name in _DECORATORS if name in compiler}
    compiler.update(dict.fromkeys(own, _as_it_is))
    _LazyModule(_COMPILER, (_OF_MASKS, _SYMBOLS, "sympy"), package=True, **dict.fromkeys(_DECORATORS, _as_it_is))
    masks = _LazyModule(_OF_MASKS, TransformGetItemToIndex=_index_by_items)
    if _SYMBOLS not in sys.modules and "sympy" not in sys.modules:
        answers: dict[str, Any] = {name: _of_plain(name) for name in _PLAIN}
        _LazyModule(_SYMBOLS, ("sympy",), **answers)
        _LazyModule("sympy", package=True, Basic=_Basic())
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
        from transformers.utils import import_utils

        import_utils.is_torch_distributed_available()  # it remembers what it is told
        _without(import_utils, "accelerate")
        yield
    finally:
        torch.distributed.is_available = available


def _without(import_utils: Any, package: str) -> None:
    """Let Transformers find no ``package``, which it looks for once."""
    look = getattr(import_utils, "_is_package_available", None)
    if look is None:
        return

    def absent(name: str, *rest: Any, return_version: bool = False, **options: Any) -> Any:
        if name != package:
            return look(name, *rest, return_version=return_version, **options)
        return (False, "N/A") if return_version else (False, None)

    known = getattr(import_utils, f"is_{package}_available")
    import_utils._is_package_available = absent
    try:
        if hasattr(known, "cache_clear"):  # it was asked while Transformers was imported, and remembers that
            known.cache_clear()
            known()
    finally:
        import_utils._is_package_available = look


def _as_it_is(function: Any = None, *rest: Any, **options: Any) -> Any:
    """A decorator, called with a function or with options, that changes nothing."""
    return function if function is not None else _as_it_is


def _of_plain(name: str) -> Callable[..., Any]:
    """The function ``name`` of symbolic shapes."""

    def answer(*asked: Any, **options: Any) -> Any:
        if not options and all(map(_is_plain, asked)):
            return _PLAIN[name](*asked)
        return getattr(_own(_SYMBOLS), name)(*asked, **options)

    return answer


def _is_plain(one: Any) -> bool:
    return type(one) in (bool, int, float) or (type(one) is tuple and all(map(_is_plain, one)))


def _index_by_items() -> Any:
    """The context in which a mask's rule indexes tensors by tensors."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    return TransformGetItemToIndex()
