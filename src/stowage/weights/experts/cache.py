"""A cache in host memory for the experts of all layers: read when a router chooses them, evicted for others.

Owns the frames that hold experts. A layer's stacked parameters are tensors of full size over reserved addresses; a
cached expert's frame is mapped at the expert's address, and an offloaded expert reads as NaN. So a module computes as
if all experts were in memory, with the same kernels at the same addresses modulo 64, and using an expert that was not
chosen would show. Memory is never more than the frames, and the pages that two neighbours share, which stay resident.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stowage.core.geometry import PAGE_BYTES, round_up
from stowage.errors import UnsupportedModelError
from stowage.weights.experts.memory_pages import Frames, Span
from stowage.weights.experts.table import ExpertTable
from stowage.weights.parameter_location import ParameterLocation
from stowage.weights.reader import Read, Readers


def chosen(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """The router's choices among a forward's arguments: (tokens, experts), integers. Raises UnsupportedModelError."""
    tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)]
    found = [t for t in tensors if t.dim() == 2 and t.dtype in (torch.int64, torch.int32)]
    if len(found) != 1:
        raise UnsupportedModelError(
            "a layer of experts does not say which of them it computes with, so they cannot be read one by one: stream "
            "whole layers, --weights 'model.layers.*=stream'."
        )
    return found[0]


class _Stack:
    """One parameter, (experts, ...), over reserved addresses. Its whole pages are mapped and unmapped expert by expert.
    Experts that are no multiple of a page begin at a page each, with a gap before the next (``grouping`` checks that
    their module supports this).
    """

    def __init__(self, parameter: nn.Parameter, location: ParameterLocation, experts: int) -> None:
        self._location, self._experts = location, experts
        self._expert_bytes = location.nbytes // experts
        gapped = self._expert_bytes % PAGE_BYTES > 0
        self._stride = round_up(self._expert_bytes)
        self._begin = 0 if gapped else location.in_page
        self.shared = self._begin % PAGE_BYTES > 0
        self._first = -self._begin % PAGE_BYTES  # of an expert's bytes: the first of a page of its own
        self.whole_bytes = self._stride - PAGE_BYTES * self.shared
        assert self.whole_bytes > 0
        self.span = Span(round_up(self._begin + experts * self._stride))
        count = experts * self._stride // location.dtype.itemsize
        values = torch.frombuffer(self.span.memory, dtype=location.dtype, count=count, offset=self._begin)
        own = self._expert_bytes // location.dtype.itemsize
        parameter.data = values.view(experts, -1)[:, :own].view(experts, *location.shape[1:])

    @property
    def edge_bytes(self) -> int:
        """Bytes of the pages that two experts share, which stay resident."""
        return PAGE_BYTES * (self._experts + 1) * self.shared

    def address(self, expert: int) -> int:
        """The offset in the span at which the expert's whole pages begin."""
        return self._begin + expert * self._stride + self._first

    def reads(self, expert: int) -> list[Read]:
        """The reads that fill an expert's whole pages."""
        address = self.address(expert)
        into = memoryview(self.span.memory)[address : address + min(self.whole_bytes, self._expert_bytes)]
        return self._location.reads(expert * self._expert_bytes + self._first, into)

    def edges(self) -> list[Read]:
        """The reads that fill the shared pages."""
        found = []
        for expert in range((self._experts + 1) * self.shared):
            page = expert * self._expert_bytes
            first, last = max(page, self._begin), min(page + PAGE_BYTES, self._begin + self._location.nbytes)
            found += self._location.reads(first - self._begin, memoryview(self.span.memory)[first:last])
        return found


@dataclass(slots=True)
class Stacks:
    """The ``experts`` of one layer: stacked parameters, and the location of each while it is offloaded."""

    experts: int
    parameters: Sequence[nn.Parameter]
    locations: Sequence[ParameterLocation]


class ExpertCache(ExpertTable):
    """For ``layers``, in the order in which they are computed. ``cache_bytes`` must hold all experts of one layer.
    ``timeout_s``: the longest wait for a read.
    """

    def __init__(self, layers: Sequence[Stacks], cache_bytes: int, readers: Readers, timeout_s: float) -> None:
        self._layers = [
            [_Stack(p, h, layer.experts) for p, h in zip(layer.parameters, layer.locations, strict=True)]
            for layer in layers
        ]
        experts = [layer.experts for layer in layers]
        frame_bytes = max(sum(stack.whole_bytes for stack in stacks) for stacks in self._layers)
        self._edge_bytes = sum(stack.edge_bytes for stacks in self._layers for stack in stacks)
        count = min((cache_bytes - self._edge_bytes) // frame_bytes - 1, sum(experts))
        super().__init__(experts, count, readers, timeout_s)
        self._memory = Frames(count, frame_bytes)
        for layer, stacks in enumerate(self._layers):
            for expert in range(experts[layer]):
                self._hide(layer, expert)
            self._finish(self._start([read for stack in stacks for read in stack.edges()]))

    @property
    def nbytes(self) -> int:
        return (self.frames + 1) * self._memory.frame_bytes + self._edge_bytes

    def forked(self) -> None:
        """See ``ExpertTable.forked``: the frames are new."""
        self._memory = Frames(self.frames, self._memory.frame_bytes)
        self._changing = True
        self.reset()

    def close(self, ended: bool) -> None:
        if ended:
            for frame in np.flatnonzero(self._layer_in >= 0).tolist():
                self._evict(frame)
        self._memory.close()

    def check(self) -> None:
        self._check_tables()
        assert self._memory.used_bytes <= self.frames * self._memory.frame_bytes

    def _fill(self, layer: int, missing: Sequence[int], frames: Sequence[int]) -> None:
        for expert, frame in zip(missing, frames, strict=True):
            self._fill_one(layer, expert, frame)
            self._pinned[frame] = True

    def _fill_one(self, layer: int, expert: int, frame: int) -> None:
        """Begin to read ``expert`` into ``frame``, which is free."""
        within = 0
        try:
            for stack in self._layers[layer]:
                self._memory.show(stack.span, stack.address(expert), stack.whole_bytes, frame, within)
                within += stack.whole_bytes
            ticket = self._start([read for stack in self._layers[layer] for read in stack.reads(expert)])
        except BaseException:
            self._hide(layer, expert)
            raise
        self._seat(layer, expert, frame)
        self._filling[frame] = ticket

    def _hide(self, layer: int, expert: int) -> None:
        for stack in self._layers[layer]:
            self._memory.hide(stack.span, stack.address(expert), stack.whole_bytes)
