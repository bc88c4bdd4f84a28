"""Which device a model computes on, and what that device has of its own.

    carrier        brings weights to the device
    link           copies KV blocks between the device and the host arena
    recorder       records decode steps
    paged_kernel   attention of single tokens without gathering their keys

and what unpacks matrices in published formats on CUDA devices, which ``weights`` is told of here.

Owns the choice, and the clear refusal of what a device cannot do. This is the only importer of ``cuda``, where
everything is that only CUDA runs. All other code takes its device from the tensors that it is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stowage.core.geometry import SlabClass
from stowage.cuda.compiling import errors as compiling_errors
from stowage.cuda.copies import CudaCarrier, CudaCopies
from stowage.cuda.graphs import CudaRecorder
from stowage.cuda.paged_attention import launch
from stowage.cuda.unpacking.launch import Unpacking
from stowage.errors import ConfigError, first_line
from stowage.executor.decode_attention import PagedKernel
from stowage.executor.replay.graphs.recorder import Recorder
from stowage.transfer.cpu import CpuTransfer
from stowage.transfer.pinning import Pinned, pin
from stowage.transfer.protocol import BlockTransfer
from stowage.transfer.staged import StagedTransfer, SynchronousCopies
from stowage.weights.device_prefetcher import Carrier, PlainCarrier
from stowage.weights.quantized.formats import dequantized_by_torch, first_outputs, unpack_with

unpack_with("cuda", Unpacking(dequantized_by_torch, first_outputs))


def resolve(name: str) -> torch.device:
    """The device called ``name``: ``cpu``, ``cuda``, ``cuda:1``, or another that torch knows.

    Raises ``ConfigError`` for one that this machine, or this torch, does not have.
    """
    try:
        device = torch.device(name)
        if device.type == "cuda" and not torch.cuda.is_available():
            built = torch.version.cuda is not None
            why = "torch finds no CUDA device (see nvidia-smi)" if built else "this torch was built without CUDA"
            raise ConfigError(f"the device {name!r} cannot be used: {why}. Leave --device out to compute on the CPU.")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        why = first_line(error)
        if "backend" in why:  # torch names its own operator and every backend that has it
            why = f"this torch was built without {name.partition(':')[0]}"
        raise ConfigError(
            f"the device {name!r} cannot be used: {why}. Use cpu, or cuda, or cuda:1 for the second one."
        ) from error
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def carrier(device: torch.device) -> Carrier | None:
    """What copies weights to ``device``; ``None`` for a CPU, which computes from host memory."""
    if device.type == "cpu":
        return None
    return CudaCarrier(device) if device.type == "cuda" else PlainCarrier(device)


@dataclass(slots=True)
class DeviceLink:
    """The way between a device and the arena. ``pinned``: the arena, where it is; closed after the transfer."""

    transfer: BlockTransfer
    pinned: Pinned | None = None

    def close(self) -> None:
        """Wait for copies in flight, give the arena back, unpin it."""
        self.transfer.close()
        if self.pinned is not None:
            self.pinned.close()


def link(device: torch.device, arena: NDArray[np.uint8], slabs: Sequence[SlabClass]) -> DeviceLink:
    """What copies between ``device`` and the ``arena``."""
    if device.type == "cpu":
        return DeviceLink(CpuTransfer(arena, slabs))
    if device.type != "cuda":
        return DeviceLink(StagedTransfer(arena, slabs, SynchronousCopies(device)))
    pinned = pin(arena, device)
    return DeviceLink(StagedTransfer(arena, slabs, CudaCopies(device, pinned)), pinned)


def device_of(model: Any, name: str) -> torch.device:
    """Where ``model`` computes: on device ``name``; if empty, where it lies (a model in memory), or on the CPU."""
    if name:
        return resolve(name)
    return torch.device("cpu") if isinstance(model, str) or not hasattr(model, "device") else model.device


def recorder(device: torch.device) -> Recorder | None:
    """What records on ``device``; ``None``: nothing can."""
    return CudaRecorder(device) if device.type == "cuda" else None


def paged_kernel(device: torch.device, dtype: torch.dtype) -> PagedKernel | None:
    """What attends to single tokens on ``device`` in ``dtype``, still untried; ``None``: torch gathers their keys."""
    if not launch.wanted(device, dtype):
        return None
    return PagedKernel(launch.attend, launch.PIECE_KEYS_LEAST, compiling_errors(), launch.of_length)
