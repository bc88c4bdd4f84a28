"""Recorders: a function's work on a device is recorded once and replayed, with what its tensors hold by then.

Owns what CUDA calls a graph, and nothing about what is recorded: ``graphs`` decides that. Recordings share one pool of
device memory, because at any time at most one of them runs, and its result is read before the next (as PyTorch's notes
on CUDA graphs have it: "Sharing memory across captures").

A recording is of one thread: others may use the device meanwhile, so only what this thread does can spoil it
(``thread_local``).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from stowage.executor.replay.recorder import CaptureError, Recording
from stowage.models.probing import RAISED_BY_MODELS

__all__ = ["CudaRecorder"]

_WARM_UPS = 2
"""Kernels are chosen and workspaces made in the first runs; neither may happen in a recording."""


class CudaRecorder:
    """CUDA graphs (``torch.cuda.CUDAGraph``)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        """By how much the memory that torch has reserved grew during the captures, which is all of their pool."""
        return self._nbytes

    def capture(self, function: Callable[[], Tensor]) -> Recording:
        graph = torch.cuda.CUDAGraph()
        pool = self._graphs[0].pool() if self._graphs else None
        try:
            with torch.cuda.device(self._device):
                self._warm_up(function)
                with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
                    before = self._reserved()  # now: what was cached is given back as a capture begins
                    result = function()
                    grown = self._reserved() - before
        except torch.OutOfMemoryError:
            raise
        except RAISED_BY_MODELS as error:
            raise CaptureError(_first_line(error)) from error
        self._graphs.append(graph)
        self._nbytes += grown
        return Recording(graph.replay, result)

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
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()
        self._nbytes = 0
        torch.cuda.empty_cache()


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
