"""vLLM's file tier as a peer of `benchmarks.tiers`, used as its scheduler uses it: one task per client."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from tier_peer import WAIT_S, Peer, check


class VllmFiles(Peer):
    """vLLM's file tier below its host memory, a view of rows of one chunk."""

    def __init__(self, chunk_bytes: int, count: int) -> None:
        self.count = count
        self.memory = mmap.mmap(-1, 2 * chunk_bytes * count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.rows = np.frombuffer(self.memory, np.uint8).reshape(2 * count, chunk_bytes)
        self.rows[:] = np.random.default_rng(0).integers(0, 255, chunk_bytes, np.uint8)
        self.rows[:count, :8] = np.arange(count).reshape(-1, 1).view(np.uint8)
        self.jobs = 0

    def open(self, directory: Path) -> None:
        from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

        parallel = SimpleNamespace(tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, rank=0, is_parallelism_agnostic=True)
        config = SimpleNamespace(
            groups=[],
            parallel=parallel,
            canonical_layout=False,
            replicated_layout=False,
            model=SimpleNamespace(name="model", dtype="bfloat16"),
            cache=SimpleNamespace(tokens_per_hash=16),
        )
        spec = SimpleNamespace(config=config, blocks_per_chunk=1, kv_events_config=None)
        view = memoryview(self.rows)
        self.tier: Any = FileSystemTierManager(spec, view, "fs", str(directory))  # type: ignore[arg-type]

    def _run(self, parts: list[list[int]], rows: list[np.ndarray], submit: Callable[[Any], None]) -> float:
        from vllm.v1.kv_offload.base import ReqContext, make_offload_key
        from vllm.v1.kv_offload.tiering.base import TransferJob

        keys = [[make_offload_key((n * 2654435761 % 2**32).to_bytes(32, "little"), 0) for n in part] for part in parts]
        began_s = time.perf_counter()
        for some, places in zip(keys, rows, strict=True):
            self.jobs += 1
            submit(TransferJob(self.jobs, some, places, True, ReqContext(str(self.jobs))))
        results: list[Any] = []
        while len(results) < len(parts):
            results += self.tier.get_finished_jobs()
            if time.perf_counter() - began_s > WAIT_S:
                raise TimeoutError("a job did not end")
            time.sleep(0.0002)  # its scheduler asks once per step, which is later
        elapsed_s = time.perf_counter() - began_s
        assert all(result.success for result in results), "a job failed"
        return elapsed_s

    def store(self, parts: list[list[int]]) -> float:
        return self._run(parts, [np.array(part) for part in parts], lambda job: self.tier.submit_store(job))

    def load(self, parts: list[list[int]]) -> float:
        rows = [np.array(part) + self.count for part in parts]
        self.rows[self.count :, :8] = 255
        elapsed_s = self._run(parts, rows, lambda job: self.tier.submit_load(job))
        for part, places in zip(parts, rows, strict=True):
            check(part, self.rows[places, :8].copy().view(np.int64)[:, 0].tolist())
        return elapsed_s

    def close(self) -> None:
        self.tier.shutdown()
        del self.tier
