"""A recorder for any device: it keeps a tape of the operations that torch dispatched, and replays exactly these, on the
same storages.

What a CUDA graph freezes is frozen here: shapes, numbers that the host computed, which tensors are read. What a capture
refuses is refused: waiting for the device or reading from it (``.item()``, ``.tolist()``, ``bool(tensor)``), copies
between devices, tensors made from the host's numbers, shapes that depend on data, code that torch cannot see.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves

from stowage.executor.replay.backend import CaptureError

_READS = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__array__")
_SHAPED_BY_DATA = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class _FromPython(TorchFunctionMode):
    """Refuses what never reaches the dispatcher: on a CPU a tensor is read, or made, without it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _READS and args and isinstance(args[0], Tensor):
            raise CaptureError(f"reads from the device: {name}")
        if func is torch.tensor and kwargs.get("device") is not None:
            raise CaptureError(f"copies from the host: {name}")
        return func(*args, **kwargs)


@dataclass
class _Operation:
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    fresh: list[Tensor | None]
    """Of each output, the tensor that its numbers go to; ``None``: it is a view, or was changed in place."""
    writes: bool

    def replay(self) -> None:
        if not self.writes and (not any(t is not None for t in self.fresh) or "empty" in self.func.__name__):
            return
        for kept, out in zip(self.fresh, _tensors(self.func(*self.args, **self.kwargs)), strict=True):
            if kept is not None:
                assert kept.shape == out.shape, "an operation came to another shape"
                kept.copy_(out)


class _Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[_Operation] = []
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:  # what is made of other operations is seen as these
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        self._refuse(func, args, kwargs)
        out = func(*args, **kwargs)
        given = {_memory(t) for t in _tensors((args, kwargs))}
        fresh = [None if _memory(t) in given else t for t in _tensors(out)]
        _refuse_devices(func, _tensors((args, kwargs)) + _tensors(out))
        self.nbytes += sum(t.nbytes for t in fresh if t is not None)
        self.operations.append(_Operation(func, args, kwargs, fresh, func._schema.is_mutable))
        return out

    def _refuse(self, func: Any, args: Any, kwargs: Any) -> None:
        if func.namespace not in ("aten", "prims"):
            raise CaptureError(f"code that torch does not see: {func}")
        name = func._schema.name
        masks = name.startswith("aten::index") and any(
            t.dtype in (torch.bool, torch.uint8) for t in tree_leaves((args[1:2],)) if isinstance(t, Tensor)
        )
        if name == "aten::index" and not masks:
            return
        if masks or _SHAPED_BY_DATA & set(func.tags):
            raise CaptureError(f"depends on data: {func}")


def _refuse_devices(func: Any, tensors: list[Tensor]) -> None:
    """A number on the host may be an argument; nothing else there may be."""
    devices = {t.device for t in tensors if t.dim() or t.device.type != "cpu"}
    if len(devices) > 1:
        raise CaptureError(f"copies between devices: {func}")


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@dataclass(frozen=True)
class Recording:
    """See ``recorder.Recording``."""

    replay: Callable[[], None]
    result: Tensor


class TapeRecorder:
    """A ``Recorder``. ``spoil`` may change a tape before it is used: tests plant bugs with it."""

    def __init__(self, spoil: Callable[[list[_Operation]], None] | None = None) -> None:
        self.tapes: list[_Tape] = []
        self.forgotten = 0
        self._spoil = spoil

    @property
    def nbytes(self) -> int:
        return sum(tape.nbytes for tape in self.tapes)

    def capture(self, function: Callable[[], Tensor]) -> Recording:
        function()
        tape = _Tape()
        with _FromPython(), tape:
            result = function()
        if self._spoil is not None:
            self._spoil(tape.operations)
        self.tapes.append(tape)

        def replay() -> None:
            assert tape in self.tapes, "replayed after it was forgotten"
            for operation in tape.operations:
                operation.replay()

        return Recording(replay, result)

    def forget(self) -> None:
        self.forgotten += len(self.tapes)
        self.tapes.clear()
