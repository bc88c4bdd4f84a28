"""Intercepts the parameters of a model while Transformers builds it: each once, in its final form.

Uses torch's global hooks for the registration of modules and parameters, so Transformers has renamed, cast, stacked and
fused a parameter before it is seen here. Owns the hooks while a model is built, and frees the memory that building
takes temporarily.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as seams

from stowage.weights.checkpoint import Checkpoint

_SEQUENTIAL = "HF_DEACTIVATE_ASYNC_LOAD"
"""Transformers' own switch: one parameter after the other, instead of all at once in the background."""
_MADV_DONTNEED = 4
_FORGET_EVERY_BYTES = 16 << 20
_one_at_a_time = threading.Lock()
"""The seams are global: one model at a time is built under them."""


class Building(ABC):
    """The build of one model from ``checkpoint``. A subclass decides what happens to its parameters."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._thread = threading.get_ident()
        self._parents: dict[int, tuple[nn.Module, str]] = {}
        self._names: dict[int, str] = {}
        self._given: dict[int, nn.Parameter] = {}
        self._begun = False
        self._unforgotten_bytes = 0

    @abstractmethod
    def begin(self, root: nn.Module) -> None:
        """``root`` has all its modules, with names, shapes and dtypes, but no values yet."""

    @abstractmethod
    def put(self, path: str, parameter: nn.Parameter) -> nn.Parameter:
        """``parameter``, called ``path``, has its final form; the model gets the returned one instead."""

    def build(self, build: Callable[[], Any]) -> Any:
        """The model that ``build`` makes with Transformers. Raises what it and the two methods above raise."""
        with _one_at_a_time, _sequential(), self._watching():
            return build()

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        # torch's annotations say that these hooks return nothing; its documentation knows better
        adopted: Any = self._adopted
        registered: Any = self._registered
        buffered: Any = self._buffered
        handles = [
            seams.register_module_module_registration_hook(adopted),
            seams.register_module_parameter_registration_hook(registered),
            seams.register_module_buffer_registration_hook(buffered),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _adopted(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        if child is not None and threading.get_ident() == self._thread:
            self._parents[id(child)] = (parent, name)

    def _buffered(self, _module: nn.Module, _name: str, buffer: Tensor | None) -> Tensor | None:
        """A loaded buffer must not stay a view of the mapped file, because that file's pages are dropped."""
        if buffer is None or buffer.device.type == "meta" or threading.get_ident() != self._thread:
            return None
        kept = buffer.detach().clone()
        if getattr(buffer, "_is_hf_initialized", False):  # else Transformers takes it for missing, and makes it anew
            kept._is_hf_initialized = True  # type: ignore[attr-defined]
        return kept

    def _registered(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or threading.get_ident() != self._thread or parameter.device.type == "meta":
            return None
        if torch.get_default_device().type == "meta":  # a class that makes values itself: they are loaded later
            return None
        if id(parameter) in self._given:  # tied to another module: it was placed already
            return None
        if not self._begun:
            self._begin(module)
        path = f"{self._names[id(module)]}.{name}".lstrip(".") if id(module) in self._names else name
        placed = self.put(path, parameter)
        placed._is_hf_initialized = True  # type: ignore[attr-defined]  # Transformers would fill it with random numbers
        self._given[id(placed)] = placed
        self._forget_pages(parameter.numel() * parameter.element_size())
        return placed

    def _begin(self, module: nn.Module) -> None:
        root = module
        while id(root) in self._parents:
            root = self._parents[id(root)][0]
        self._names = {id(part): name for name, part in root.named_modules()}
        self._begun = True
        self.begin(root)

    def _forget_pages(self, nbytes: int) -> None:
        """Free what loading took temporarily and no budget counts: pages of the files that Transformers has mapped, and
        memory of its conversions. No parameter lies in those pages and nothing writes to them, so they can be read
        again.
        """
        self._unforgotten_bytes += nbytes
        if self._unforgotten_bytes < _FORGET_EVERY_BYTES:
            return
        self._unforgotten_bytes = 0
        libc = ctypes.CDLL(None, use_errno=True)
        libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        for begin, end, _, _ in self.checkpoint.mappings():
            libc.madvise(begin, end - begin, _MADV_DONTNEED)  # a failure costs memory that is not ours
        if hasattr(libc, "malloc_trim"):
            libc.malloc_trim(0)  # what was stacked and cast on the way was freed, and glibc keeps it otherwise


@contextlib.contextmanager
def _sequential() -> Iterator[None]:
    before = os.environ.get(_SEQUENTIAL)
    os.environ[_SEQUENTIAL] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SEQUENTIAL]
        else:
            os.environ[_SEQUENTIAL] = before
