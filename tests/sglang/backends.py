"""Storage backends of HiCache, made and attached as SGLang does it: Stowage's, and SGLang's own of files."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig, PoolName
from sglang.srt.mem_cache.storage import StorageBackendFactory

from stowage.plugins.sglang import StowageStorage
from tests.sglang.pools import PAGE, Pool

LIMIT = "64MiB"
Make = Callable[..., Any]


def config(extra: dict[str, Any], **more: Any) -> HiCacheStorageConfig:
    told: dict[str, Any] = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": False,
        "model_name": "org/model",
    }
    return HiCacheStorageConfig(**(told | more), extra_config=extra)


def attach(storage: Any, pool: Pool, **others: Pool) -> Any:
    """As SGLang's controllers do it."""
    storage.register_mem_pool_host(pool)
    for name, other in others.items():
        storage.register_mem_host_pool_v2(other, PoolName(name))
    storage.on_host_pools_registered()
    return storage


def hashes(count: int, seed: int = 0) -> list[str]:
    chance = random.Random(seed)
    return [chance.randbytes(32).hex() for _ in range(count)]


def indices(pages: int, first: int = 0) -> torch.Tensor:
    return torch.arange(first * PAGE, (first + pages) * PAGE)


def backends(tmp_path: Path) -> Iterator[Make]:
    """Makes them on one directory. ``kind``: ``stowage`` or ``file``."""
    made: list[Any] = []

    def begin(kind: str = "stowage", *, pool: Pool | None = None, pools: Any = None, **more: Any) -> Any:
        if kind == "file":
            storage = HiCacheFile(config({"file_storage_path": str(tmp_path / "files")}, **more))
        else:
            extra = more.pop("extra", {"disk": f"{tmp_path / 'disk'}:{LIMIT}"})
            dynamic = {"backend_name": "s", "module_path": "stowage.plugins.sglang", "class_name": "StowageStorage"}
            told = config({**dynamic, "interface_v1": 1, **extra}, **more)
            storage = StorageBackendFactory.create_backend("dynamic", told, pool)
            assert isinstance(storage, StowageStorage)
            made.append(storage)
        return attach(storage, pool or Pool(), **(pools or {}))

    yield begin
    for one in made:
        one.close()
        assert one.faults == 0, "a bug was answered as a miss"
