"""vLLM's own ``OffloadingConnector`` on its CPU build, whose worker refuses to run without a GPU.

Owns that worker alone: what is stored, evicted, found and loaded, and where in host memory, is decided by vLLM's own
connector and manager. `benchmarks.capacity` counts with it, and tests put it beside Stowage.

    {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
        "cpu_bytes_to_use": 67108864, "spec_name": "CopyingSpec",
        "spec_module_path": "benchmarks.peers.vllm_offloading"}}
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class Copying(OffloadingWorker):
    """Copies pages of the KV cache when it is told, and says so when it is asked next."""

    def __init__(self, caches: Any, blocks_per_chunk: int, chunks: int) -> None:
        self._blocks_per_chunk = blocks_per_chunk
        self._device = [one.tensor for one in caches.tensors]
        shapes = [(chunks * blocks_per_chunk, one.page_size_bytes) for one in caches.tensors]
        self._host = [torch.zeros(shape, dtype=torch.int8) for shape in shapes]
        self._refs = caches.group_data_refs
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Device to host."""
        for ref, blocks, pages in self._pages(src_spec, dst_spec):
            content = self._device[ref.tensor_idx][blocks, : ref.page_size_bytes]
            self._host[ref.tensor_idx][pages, : ref.page_size_bytes] = content
        self._done.append(TransferResult(job_id, True))
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Host to device."""
        for ref, blocks, pages in self._pages(dst_spec, src_spec):
            content = self._host[ref.tensor_idx][pages, : ref.page_size_bytes]
            self._device[ref.tensor_idx][blocks, : ref.page_size_bytes] = content
        self._done.append(TransferResult(job_id, True))
        return True

    def _pages(self, device: Any, host: Any) -> list[tuple[Any, torch.Tensor, torch.Tensor]]:
        """Of each part of a group's block: where it lies, which blocks, and which pages of host memory. A group's first
        block may be in the middle of a chunk.
        """
        found, block, chunk = [], 0, 0
        for refs, count, index in zip(self._refs, device.group_sizes, device.block_indices, strict=True):
            skipped = index % self._blocks_per_chunk
            chunks = -(-(count + skipped) // self._blocks_per_chunk) if count else 0
            first = host.block_ids[chunk : chunk + chunks, np.newaxis].astype(np.int64) * self._blocks_per_chunk
            pages = (first + np.arange(self._blocks_per_chunk)).ravel()[skipped : skipped + count]
            blocks = device.block_ids[block : block + count].astype(np.int64)
            found += [(ref, torch.from_numpy(blocks), torch.from_numpy(pages)) for ref in refs if count]
            block, chunk = block + count, chunk + chunks
        assert (block, chunk) == (len(device.block_ids), len(host.block_ids))
        return found

    def get_finished(self) -> list[TransferResult]:
        """What was copied since the last call."""
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is ever under way."""


class CopyingSpec(CPUOffloadingSpec):
    """vLLM's own, but for the worker."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        """A worker for plain memory."""
        return Copying(kv_caches, self.blocks_per_chunk, self.num_chunks)
