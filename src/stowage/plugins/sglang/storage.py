"""``StowageStorage``: SGLang's storage interface for HiCache, over Stowage's disk and shared stores.

Pages move whole and opaque between SGLang's host pools and the tiers; a page is copied into its pool only when all of
it was read and verified. SGLang calls from threads of its own, which may wait.

A bug here must not end SGLang's engine: what raises is logged with its traceback and counted, and answered as a miss.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from torch import Tensor

from stowage.cache.opening import open_tiers
from stowage.errors import ConfigError
from stowage.log import Trouble
from stowage.plugins.sglang import settings
from stowage.plugins.sglang.blocking import BlockingTiers
from stowage.plugins.sglang.names import KV, Names, page_bytes

CLOSE_TIMEOUT_S = 10.0
_Answer = TypeVar("_Answer")


class StowageStorage(HiCacheStorage):
    """Stowage as a storage backend of SGLang's. Settings: docs/sglang.md.

    Raises ``ConfigError`` (``BudgetError``) or ``StorageError`` at the start of an engine that could not be served as
    its settings say.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, more: dict[str, Any] | None = None) -> None:
        self._config = storage_config
        self._memory = settings.read(storage_config.extra_config)
        self._trouble = Trouble("stowage.sglang")
        self.registered_pools: dict[str, Any] = {}
        self.faults = 0
        self._names: Names | None = None
        self._tiers: BlockingTiers | None = None

    # Opening

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self.registered_pools[KV] = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """See the base. A pool that comes after the others were opened with is not stored."""
        self.registered_pools[str(host_pool_name)] = host_pool

    def on_host_pools_registered(self) -> None:
        """See the base: the tiers are opened."""
        if self._tiers is not None:
            return
        if KV not in self.registered_pools:
            raise ConfigError("SGLang has registered no host pool: start it with --enable-hierarchical-cache.")
        self._names = Names(self._config, self.registered_pools, _sglang_version())
        longest = max(map(page_bytes, self.registered_pools.values()))
        tiers = open_tiers(self._memory, self._names.tier, longest, time.monotonic)
        self._tiers = BlockingTiers(tiers, self._memory.load_timeout_s, self._memory.lookup_timeout_s)

    def _opened(self) -> tuple[BlockingTiers, Names]:
        self.on_host_pools_registered()  # releases that do not tell it begin with a request
        assert self._tiers is not None and self._names is not None
        return self._tiers, self._names

    def _safely(self, work: Callable[[], _Answer], instead: _Answer) -> _Answer:
        try:
            return work()
        except Exception:  # noqa: BLE001 a bug costs hits, not the engine
            self.faults += 1
            self._trouble.fault("a batch of pages could not be handled")
            return instead

    # What is there

    def _present(self, pool: str, keys: list[str]) -> list[bool]:
        tiers, names = self._opened()
        if not names.knows(pool):
            return [False] * len(keys)
        present: list[bool] = tiers.present(names.of(pool, keys)).tolist()
        return present

    def exists(self, key: str) -> bool:
        return self._safely(lambda: self._present(KV, [key])[0], False)

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """See the base: how many from the first on are there without a gap."""
        return self._safely(lambda: _leading(self._present(KV, keys)), 0)

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """See the base. ``restorable_prefix_pages`` are the lengths at which every pool can go on."""
        return self._safely(lambda: self._exists_in_pools(keys, pool_transfers or []), PoolTransferResult.empty())

    def _exists_in_pools(self, keys: list[str], transfers: Sequence[PoolTransfer]) -> PoolTransferResult:
        kv_pages = _leading(self._present(KV, keys))
        hits: dict[str, int] = {PoolName.KV: kv_pages} if kv_pages else {}
        restorable = set(range(1, kv_pages + 1))
        for transfer in transfers if kv_pages else ():
            if transfer.hit_policy is PoolHitPolicy.BLOCK_GROUPS:  # says how far it goes itself, and forbids nothing
                there = _leading(self._present(str(transfer.name), transfer.keys or []))
                groups = there // transfer.group_pages if transfer.group_pages else 0
                boundary = groups * transfer.block_pages
            else:
                present = self._present(str(transfer.name), keys[:kv_pages])
                usable = _usable(present, transfer)
                boundary = max(usable, default=0)
                restorable &= usable
            if boundary:
                hits[transfer.name] = boundary
        return PoolTransferResult(max(restorable, default=0), hits, sorted(restorable))

    # Pages of pools

    def batch_get_v1(
        self, keys: list[str], host_indices: Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        return self._safely(lambda: self._read(KV, keys, host_indices), [False] * len(keys))

    def batch_set_v1(
        self, keys: list[str], host_indices: Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        return self._safely(lambda: self._write(KV, keys, host_indices), [False] * len(keys))

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return {one.name: self._each(one, self._read) for one in transfers}

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return {one.name: self._each(one, self._write) for one in transfers}

    def _each(self, transfer: PoolTransfer, move: Callable[[str, list[str], Tensor], list[bool]]) -> list[bool]:
        keys = transfer.keys or []
        indices = transfer.host_indices
        nothing = [False] * len(keys)
        if indices is None:
            return nothing
        return self._safely(lambda: move(str(transfer.name), keys, indices), nothing)

    def _read(self, pool: str, keys: list[str], host_indices: Tensor) -> list[bool]:
        """Into the pool's pages at these indices."""
        host, firsts = self._pages(pool, keys, host_indices)
        if host is None:
            return [False] * len(keys)
        found = self._load(pool, dict.fromkeys(keys, page_bytes(host)))
        for key, first in zip(keys, firsts, strict=True):
            if key in found:
                page = host.get_dummy_flat_data_page()
                _as_bytes(page).copy_(found[key])
                host.set_from_flat_data_page(first, page)
        return [key in found for key in keys]

    def _write(self, pool: str, keys: list[str], host_indices: Tensor) -> list[bool]:
        """From the pool's pages at these indices."""
        host, firsts = self._pages(pool, keys, host_indices)
        if host is None:
            return [False] * len(keys)
        first_of = dict(zip(reversed(keys), reversed(firsts), strict=True))
        stored = self._store(pool, first_of, lambda key: host.get_data_page(first_of[key], flat=True))
        return [stored[key] for key in keys]

    def _pages(self, pool: str, keys: list[str], host_indices: Tensor) -> tuple[Any, list[int]]:
        """The pool, and the index of the first token of each page; no pool where that does not fit."""
        _, names = self._opened()
        host = self.registered_pools.get(pool)
        size = int(getattr(host, "page_size", 1) or 1)
        if host is None or not keys or host_indices.numel() != len(keys) * size or not names.knows(pool):
            return None, []
        return host, host_indices[::size].tolist()

    def _load(self, pool: str, sizes: Mapping[str, int]) -> dict[str, Tensor]:
        """The bytes of each key that came, of as many as ``sizes`` says."""
        tiers, names = self._opened()
        pages = {key: np.empty(size, dtype=np.uint8) for key, size in sizes.items()}
        came = tiers.load(names.of(pool, list(pages)), list(pages.values()))
        return {key: torch.from_numpy(page) for (key, page), fine in zip(pages.items(), came, strict=True) if fine}

    def _store(self, pool: str, keys: Iterable[str], page_of: Callable[[str], Tensor]) -> dict[str, bool]:
        """Whether each key is there afterwards. A copy is stored, which SGLang may not change meanwhile."""
        tiers, names = self._opened()
        order = list(keys)
        named = dict(zip(order, names.of(pool, order), strict=True))
        new = [key for key, here in zip(order, tiers.present(list(named.values())).tolist(), strict=True) if not here]
        stored = tiers.store([named[key] for key in new], [_copy(page_of(key)) for key in new]) if new else []
        return dict.fromkeys(order, True) | dict(zip(new, stored, strict=True))

    # Single values

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Tensor | None:
        """See the base. Into ``target_location``, or a page like those of SGLang's pool."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Tensor | None]:
        targets = list(target_locations or [None] * len(keys))
        return self._safely(lambda: self._get(keys, targets), [None] * len(keys))

    def _get(self, keys: list[str], targets: list[Any]) -> list[Tensor | None]:
        self._opened()
        host = self.registered_pools[KV]
        targets = [host.get_dummy_flat_data_page() if target is None else target for target in targets]
        sizes = {key: target.nbytes for key, target in zip(keys, targets, strict=True)}
        found = self._load(KV, sizes)
        for key, target in zip(keys, targets, strict=True):
            if key in found:
                _as_bytes(target).copy_(found[key])
        return [target if key in found else None for key, target in zip(keys, targets, strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        return self._safely(lambda: self._set(keys, values), False)

    def _set(self, keys: list[str], values: Sequence[Tensor]) -> bool:
        of_key = dict(zip(keys, values, strict=True))
        return all(self._store(KV, of_key, of_key.__getitem__).values())

    # The rest

    def clear(self) -> bool:
        """Nothing that is stored is found by this engine any more. Its room is used again as the limits need it."""
        if self._names is not None:
            self._names.renew()
        return True

    def stats(self) -> dict[str, int | float | str]:
        """Numbers of the tiers, and ours. (SGLang's own ``get_stats`` counts pages and bandwidth by itself.)"""
        return {**(self._tiers.stats() if self._tiers is not None else {}), "faults": self.faults}

    def close(self) -> None:
        """Write what is still to be written, and let go of the tiers."""
        if self._tiers is not None:
            self._tiers.close(CLOSE_TIMEOUT_S)


def _leading(present: Sequence[bool]) -> int:
    return next((at for at, here in enumerate(present) if not here), len(present))


def _usable(present: Sequence[bool], transfer: PoolTransfer) -> set[int]:
    """The prefix lengths, in pages, at which a pool has what its policy asks for."""
    if transfer.hit_policy is PoolHitPolicy.ALL_PAGES:
        return set(range(1, _leading(present) + 1))
    trailing = max(1, len(transfer.keys or ()))
    lengths = range(1, len(present) + 1)
    return {length for length in lengths if all(present[max(0, length - trailing) : length])}


def _as_bytes(page: Tensor) -> Tensor:
    """A flat view."""
    return page.view(-1).view(torch.uint8)


def _copy(page: Tensor) -> Any:
    return np.array(page.detach().contiguous().view(-1).view(torch.uint8).numpy(), copy=True)


def _sglang_version() -> str:
    try:
        return version("sglang")
    except PackageNotFoundError:
        return "unknown"
