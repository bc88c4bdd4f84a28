"""A forward with prefetched weights that is recorded once and done again, as a CUDA graph does: the same copies, waits
and computations between the same addresses, in any order that the waits allow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import stowage
from stowage.weights.device_prefetcher import PlainCarrier
from stowage.weights.host_buffers import HostBuffers
from stowage.weights.source import WeightSource
from tests.weights.conftest import logits, prompt


class Tape(TorchDispatchMode):
    """What is computed while it is entered, and the copies beside it. ``copies``: after how many steps of the computing
    each may begin, and what is copied. A step of the computing waits for a copy, or is an operation of torch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Any] = []
        self.copies: list[tuple[int, list[tuple[Tensor, Tensor]]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        kept = pytree.tree_map_only(Tensor, lambda tensor: tensor.detach(), (args, kwargs or {}, out))
        self.steps.append((func, *kept))
        return out

    def again(self, eager: bool) -> None:
        """Do it all again: copies as early as they may (``eager``), or as late."""
        done = 0
        for position, step in enumerate(self.steps):
            while eager and done < len(self.copies) and self.copies[done][0] <= position:
                done = self._copy(done)
            if isinstance(step, int):
                while done <= step:
                    assert self.copies[done][0] <= position, "each would wait for the other"
                    done = self._copy(done)
            else:
                _compute(*step)

    def _copy(self, number: int) -> int:
        for there, here in self.copies[number][1]:
            there.copy_(here)
        return number + 1


def _compute(func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """Do an operation again, into the memory of its first results; what only looks at memory needs not be done."""
    given = {t.untyped_storage().data_ptr() for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
    results = [t for t in pytree.tree_leaves(out) if isinstance(t, Tensor)]
    if not func._schema.is_mutable and any(t.untyped_storage().data_ptr() in given for t in results):
        return
    fresh = [t for t in pytree.tree_leaves(func(*args, **kwargs)) if isinstance(t, Tensor)]
    if not func._schema.is_mutable:
        for result, value in zip(results, fresh, strict=True):
            result.copy_(value)


class Recording(PlainCarrier):
    """Events belong to the tape that was recording, or to none: none may be waited for from outside of it."""

    def __init__(self, whole: bool = True) -> None:
        super().__init__(torch.device("cpu"))
        self.tape: Tape | None = None
        self.violations: list[str] = []
        self.buffers: dict[int, Tensor] = {}
        self._whole = whole
        self._computed: dict[int, tuple[Tape | None, int]] = {}
        self._copied: dict[int, tuple[Tape | None, int]] = {}
        self._open: set[int] = set()

    def pin(self, memory: np.ndarray) -> Any:
        return SimpleNamespace(whole=self._whole, close=lambda: None)

    def copy(self, buffers: Sequence[int], pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        super().copy(buffers, pairs)
        now = (self.tape, len(self.tape.steps) if self.tape else 0)
        found = [self._computed.pop(buffer, now) for buffer in buffers]
        for made, _ in found:
            self._same(made, "a copy waits for what was computed")
        if self.tape is not None:
            self.tape.copies.append((max(position for _, position in found), list(pairs)))
        self._open |= set(buffers)
        self._copied.update(dict.fromkeys(buffers, (self.tape, len(self.tape.copies) - 1 if self.tape else 0)))

    def use(self, buffers: Sequence[int]) -> None:
        for buffer in self._copied.keys() & set(buffers):
            self._open.discard(buffer)
            made, number = self._copied[buffer]
            self._same(made, "what is computed waits for a copy that was begun")
            if self.tape is not None:
                self.tape.steps.append(number)

    def computed(self, buffers: Sequence[int]) -> None:
        self._computed.update(dict.fromkeys(buffers, (self.tape, len(self.tape.steps) if self.tape else 0)))

    def forget(self) -> None:
        if self._open:
            self.violations.append(f"copies into {self._open} go on, and nobody waits for them")
        self._computed.clear()
        self._copied.clear()

    def _same(self, made: Tape | None, what: str) -> None:
        if made is not self.tape:
            self.violations.append(f"{what} on the other side of the recording")


@pytest.fixture
def opened(checkpoints: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A model whose weights a carrier brings."""

    def open_model(family: str, carrier: Any, rules: str, host: str = "64MiB") -> Any:
        monkeypatch.setattr("stowage.executor.device.carrier", lambda device: carrier)
        return stowage.offload(checkpoints(family), weights=rules, host_memory=host)

    return open_model


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("rules", ["*=prefetch", "last 1 of 2=mapped,model.layers.*=prefetch,lm_head=prefetch"])
def test_a_pass_is_recorded_once_and_done_again(
    family: str, rules: str, opened: Callable[..., Any], plain: Callable[..., Any]
) -> None:
    """With other inputs, between forwards that are not recorded, from buffers that hold something else."""
    carrier, rules = Recording(), rules + ",*=resident"
    model = opened(family, carrier, rules)
    source: WeightSource = model.stowage
    ids, tape = prompt(12), Tape()
    assert source.capturable
    logits(model, ids)  # leaves copies begun for the next forward
    with source.apart():
        carrier.tape = tape
        with torch.no_grad(), tape:
            out = model(input_ids=ids, use_cache=False).logits
        carrier.tape = None
    waited = {step for step in tape.steps if isinstance(step, int)}
    units = len(source._streams)
    assert len(tape.copies) == units and waited == set(range(units)), "each once, and none is left under way"
    assert source._device_prefetcher is not None
    for turn in range(4):
        ids.copy_(prompt(12, turn))
        expected = logits(model, ids) if turn % 2 else None
        if turn == 3:
            source._device_prefetcher.follow(source._device_prefetcher._order)  # gives up what was begun
        source.join()
        for buffer in source._device_prefetcher._buffers:
            buffer.fill_(0xFF)
        out.fill_(float("nan"))
        tape.again(eager=turn < 2)
        assert torch.allclose(out, logits(plain(family), ids), atol=1e-3)
        assert expected is None or torch.equal(out, expected)
        source.check()
    assert torch.equal(logits(model, ids), out) and not carrier.violations


def test_a_pass_that_fails_leaves_no_copy_behind(opened: Callable[..., Any]) -> None:
    carrier = Recording()
    model = opened("llama", carrier, "*=prefetch")
    expected = logits(model, prompt())
    with model.stowage.apart():
        handle = model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            logits(model, prompt())
        handle.remove()
        model.stowage.check()
        assert not model.stowage._device_prefetcher._begun
    assert torch.equal(logits(model, prompt()), expected)
    model.stowage.check()


@pytest.mark.parametrize(
    ("rules", "whole", "capturable"),
    [("*=prefetch", True, True), ("*=prefetch", False, False), ("*=stream", True, False), ("*=resident", True, True)],
)
def test_what_can_be_captured(rules: str, whole: bool, capturable: bool, opened: Callable[..., Any]) -> None:
    """Not what is read anew for each pass, nor copies that somebody waits for."""
    model = opened("llama", Recording(whole), rules)
    assert model.stowage.capturable is capturable
    if capturable:
        with model.stowage.apart():
            return
    with pytest.raises(stowage.ModelError, match="cannot be part of a captured step"), model.stowage.apart():
        pass


def test_experts_cannot_be_captured(opened: Callable[..., Any]) -> None:
    assert not opened("mixtral", Recording(), "*=experts").stowage.capturable


def test_host_buffers_are_pinned_piece_by_piece_and_no_more_than_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stowage.weights.host_buffers.PIECE_BYTES", 1 << 16)
    host_buffers, pinned, closed = HostBuffers(), [], []

    def pin(memory: np.ndarray) -> Any:
        pinned.append((memory.ctypes.data, memory.nbytes))
        return SimpleNamespace(whole=len(pinned) != 3, close=lambda: closed.append(1))

    values = [
        torch.randn(count).to(dtype) for count in (10, 9000, 8000, 70_000) for dtype in (torch.float32, torch.bfloat16)
    ]
    kept = [host_buffers.keep(value) for value in values]
    assert all(
        torch.equal(a, b) and a.dtype == b.dtype and a.data_ptr() % 4096 == 0 for a, b in zip(kept, values, strict=True)
    )
    host_buffers.pin(pin)
    pages = sum(-(-value.numel() * value.element_size() // 4096) * 4096 for value in values)
    assert sum(nbytes for _, nbytes in pinned) == host_buffers.nbytes == pages and not host_buffers.whole
    spans = sorted(pinned)
    assert all(begin + nbytes <= following for (begin, nbytes), (following, _) in pairwise(spans))
    host_buffers.close()
    host_buffers.close()
    assert len(closed) == len(pinned) and all(torch.equal(a, b) for a, b in zip(kept, values, strict=True))
