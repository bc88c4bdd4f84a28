"""Opens the store that a `Memory` asks for: the host arena and the tiers below it, nearest first.

Owns the order of the tiers, and what is refused before anything is opened.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Iterator, Sequence

from stowage.cache.store import TieredStore
from stowage.config import addresses
from stowage.config.memory import Memory
from stowage.core import lossless
from stowage.core.geometry import Geometry
from stowage.errors import ConfigError
from stowage.storage import key_file
from stowage.storage.disk import DiskTier
from stowage.storage.lease import Lease
from stowage.storage.neighbours import NeighbourTier
from stowage.storage.packed_memory import PackedMemoryTier
from stowage.storage.protocol import Tier

_IS_ORDERED = platform.machine() in ("x86_64", "AMD64")
"""Whether others see stores in the order in which they were made, as `host_table` needs."""
_METHODS = ("lookup", "load", "store", "poll", "discard", "close")


def check_tiers(tiers: Sequence[Tier], memory: Memory) -> None:
    """Tiers have all methods; they need host memory, through which chunks pass, and names of their own, for stats."""
    if tiers and not memory.host_memory_bytes:
        raise ConfigError(
            "tiers are given but host_memory is 0. Chunks reach them through host memory: give it a size."
        )
    taken = {"device", "host", "neighbours", "packed", "hits"}
    taken |= {name for name in ("disk", "valkey", "object") if getattr(memory, name)}
    for tier in tiers:
        lacking = [name for name in _METHODS if not callable(getattr(tier, name, None))]
        if lacking or not isinstance(getattr(tier, "name", None), str):
            what = ", ".join(lacking) or "a name that is text"
            raise ConfigError(
                f"tiers has a {type(tier).__name__}, which is no tier: it lacks {what}. A tier has a name and the "
                "methods of stowage.storage.protocol.Tier."
            )
        if not re.fullmatch(r"(?!slab\d)[a-z][a-z0-9_]*", tier.name) or tier.name in taken:
            raise ConfigError(
                f"A tier's name is {tier.name!r}: it must be lower-case letters, digits and _, and none of "
                f"{', '.join(sorted(taken))}, slab0, ..."
            )
        taken.add(tier.name)


def open_store(
    geometry: Geometry,
    memory: Memory,
    name: bytes,
    snapshot_tokens: int,
    clock: Callable[[], float],
    others: Sequence[Tier] = (),
    *,
    shared: bool = False,
    lease: Lease | None = None,
    common_slots: bool = False,
) -> TieredStore | None:
    """Host arena and the tiers of `memory`, with `others` below them; None without host memory. `name`: the namespace.
    `lease`: the arena's part of a budget, whose other engines read it and are read. `shared`, `common_slots`: see
    `TieredStore`.
    """
    if not memory.host_memory_bytes:
        return None
    tiers = open_tiers(memory, name, max(group.bytes_per_chunk for group in geometry.groups), clock)
    lease = lease if _IS_ORDERED else None
    if lease is not None:
        tiers.insert(0, NeighbourTier(lease, clock=clock))
    try:
        store = TieredStore(
            geometry,
            memory.arena_bytes,
            [*tiers, *others],
            snapshot_tokens=snapshot_tokens,
            common_slots=common_slots,
            clock=clock,
            shared=shared,
            published=lease is not None,
            policy=memory.eviction_policy,
        )
    except BaseException:
        for tier in tiers:
            tier.close(clock())
        raise
    if lease is not None and store.table is not None:
        lease.publish(store.table.path, store.arena.path, store.table.name)
    return store


def open_tiers(memory: Memory, name: bytes, chunk_bytes_max: int, clock: Callable[[], float]) -> list[Tier]:
    """Those that `memory` asks for, nearest first; none is left open when one cannot be opened. `name`: the namespace;
    `chunk_bytes_max`: of the longest chunk.
    """
    tiers: list[Tier] = []
    try:
        for tier in _tiers(memory, name, chunk_bytes_max, clock):
            tiers.append(tier)  # one by one, so that it is known which are open
    except BaseException:
        for tier in tiers:
            tier.close(clock())
        raise
    return tiers


def _tiers(memory: Memory, name: bytes, chunk_bytes_max: int, clock: Callable[[], float]) -> Iterator[Tier]:
    if memory.host_packed_bytes:
        if not lossless.is_quick():
            raise ConfigError(
                "host_packed is set, and the compiled part of Stowage is not there: packing in Python is slower than "
                "computing. Install a C compiler and Stowage again, or leave host_packed out."
            )
        yield PackedMemoryTier(memory.host_packed_bytes, clock=clock)
    sealed = key_file.protection(memory.disk_protection, memory.disk_key_path)
    if memory.disk_directory is not None:
        yield DiskTier(
            memory.disk_directory,
            memory.disk_bytes,
            name,
            chunk_bytes_max=chunk_bytes_max,
            protection=sealed,
            compression=memory.compression,
        )
    if memory.valkey:
        from stowage.storage.valkey import ValkeyTier

        password = addresses.valkey_password(memory.valkey, memory.valkey_password_path)
        yield ValkeyTier(
            memory.valkey,
            name,
            password=password,
            ttl_s=memory.valkey_ttl_s,
            protection=sealed,
            compression=memory.compression,
        )
    if memory.object:
        from stowage.storage.objects import ObjectTier

        yield ObjectTier(
            memory.object,
            name,
            limit_bytes=memory.object_limit_bytes,
            chunk_bytes_max=chunk_bytes_max,
            protection=sealed,
            compression=memory.compression,
        )
