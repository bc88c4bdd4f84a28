"""CUDA graphs: a function's work on a device is recorded once and replayed, with what its tensors hold by then.

Owns the capture. The replay cache decides what is recorded and replayed. Recordings share one pool of device memory,
because at most one of them runs at a time, and its result is read before the next one runs (as PyTorch's notes on CUDA
graphs have it: "Sharing memory across captures").

A capture belongs to one thread (``thread_local``): other threads may use the device meanwhile without spoiling it.
What waits for the whole device does spoil it, and a capture begins, and its memory is given back, with that; so
recorders of all threads take turns.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_turn = threading.Lock()
_WARM_UPS = 2
"""Kernels are chosen and workspaces made in the first runs; neither may happen in a recording."""


@dataclass(frozen=True, slots=True)
class CudaRecording:
    """A captured function. ``replay`` starts its kernels; ``result`` is the tensor that they write to."""

    replay: Callable[[], None]
    result: Tensor


class CudaRecorder:
    """Captures functions as ``torch.cuda.CUDAGraph``; see ``executor.replay.recorder``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        """By how much the memory that torch has reserved grew during the captures, which is all of their pool."""
        return self._nbytes

    def capture(self, function: Callable[[], Tensor]) -> CudaRecording:
        """Run ``function`` to warm up, then capture it. Raises what it, or the device, raises."""
        graph = torch.cuda.CUDAGraph()
        pool = self._graphs[0].pool() if self._graphs else None
        with _turn, torch.cuda.device(self._device):
            self._warm_up(function)
            with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
                before = self._reserved()  # now: what was cached is given back as a capture begins
                result = function()
                grown = self._reserved() - before
        self._graphs.append(graph)
        self._nbytes += grown
        return CudaRecording(graph.replay, result)

    def _warm_up(self, function: Callable[[], Tensor]) -> None:
        computing = torch.cuda.current_stream()
        self._stream.wait_stream(computing)
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):
                function()
        computing.wait_stream(self._stream)

    def _reserved(self) -> int:
        return int(torch.cuda.memory_stats(self._device).get("reserved_bytes.all.current", 0))

    def forget(self) -> None:
        """Give the memory of all graphs back."""
        with _turn:
            for graph in self._graphs:
                graph.reset()
            self._graphs.clear()
            self._nbytes = 0
            torch.cuda.empty_cache()
