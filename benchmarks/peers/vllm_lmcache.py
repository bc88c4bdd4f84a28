"""LMCache's connector on vLLM's CPU build: it starts there, but has no code for copies in plain memory, and then stores
and loads nothing.

Owns those copies alone: what is stored, found and loaded, and where in host memory, is decided by LMCache's own
connector and engine. Tests put it beside Stowage.

    {"kv_connector": "LMCacheInPlainMemory", "kv_connector_module_path": "benchmarks.peers.vllm_lmcache",
     "kv_role": "kv_both", "kv_connector_extra_config": {"lmcache.chunk_size": 128, "lmcache.max_local_cpu_size": 0.1}}
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import LMCacheConnectorV1


class PlainMemory:
    """Whole blocks, as they lie: a chunk of LMCache's has as many bytes as its blocks of all layers."""

    def from_gpu(self, memory_obj: Any, start: int, end: int, **more: Any) -> None:
        """Store a chunk."""
        for mine, block in self._blocks(memory_obj, start, end, **more):
            mine.copy_(block)

    def to_gpu(self, memory_obj: Any, start: int, end: int, **more: Any) -> None:
        """Load a chunk."""
        for mine, block in self._blocks(memory_obj, start, end, **more):
            block.copy_(mine)

    def batched_from_gpu(self, memory_objs: Any, starts: Sequence[int], ends: Sequence[int], **more: Any) -> None:
        """Store chunks."""
        for one, start, end in zip(memory_objs, starts, ends, strict=True):
            self.from_gpu(one, start, end, **more)

    def batched_to_gpu(self, memory_objs: Any = None, starts: Any = None, ends: Any = None, **more: Any) -> None:
        """Load chunks."""
        for one, start, end in zip(memory_objs, starts, ends, strict=True):
            self.to_gpu(one, start, end, **more)

    def _blocks(
        self, memory_obj: Any, start: int, end: int, *, kvcaches: Any, slot_mapping: torch.Tensor, **_: Any
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Where each block of each layer lies in a chunk, and on the device."""
        size = kvcaches[0].shape[2]
        slots = slot_mapping[start:end:size].tolist()
        assert len(slots) * size == end - start and not any(slot % size for slot in slots), "no whole blocks"
        places = memory_obj.tensor.view(len(slots), len(kvcaches), *kvcaches[0].shape[1:])
        return [
            (places[at, layer], cache[slot // size])
            for at, slot in enumerate(slots)
            for layer, cache in enumerate(kvcaches)
        ]


class LMCacheInPlainMemory(LMCacheConnectorV1):
    """LMCache's own, but for the copies."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        os.environ |= {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "ERROR", "LMCACHE_DISABLE_BANNER": "1"}
        import lmcache.v1.gpu_connector  # not before vLLM's worker has begun, which looks through what is imported

        lmcache.v1.gpu_connector.CreateGPUConnector = lambda *_, **__: PlainMemory()
        super().__init__(*arguments, **more)
