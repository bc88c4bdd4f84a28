"""Puts an engine's parts together from a loaded model and its budgets.

Owns the order of construction and the namespace: everything that cached bytes depend on besides tokens.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import transformers

from stowage import addresses, keys
from stowage.config import Memory
from stowage.core.geometry import Geometry, Kind
from stowage.core.groups import GroupStrategy, strategy
from stowage.core.key import Field, namespace
from stowage.engine import attention
from stowage.engine.layers import ModelLayout, probe
from stowage.engine.loading import Loaded
from stowage.engine.pool import BlockPool, split_pool
from stowage.engine.runner import Runner
from stowage.errors import ConfigError
from stowage.format import envelope, segment
from stowage.store import TieredStore
from stowage.tiers.disk import DiskTier
from stowage.tiers.protocol import Tier
from stowage.transfer.cpu import CpuTransfer
from stowage.transfer.protocol import Transfer

ENGINE_FORMAT = 1
"""How this engine lays chunks out; raised whenever the same tokens come to other bytes."""
PARALLEL = "1"
"""How a model is divided over devices: not at all."""
ADAPTER = ""
"""What is put on top of the weights: nothing, ``loading`` refuses adapters that are not merged."""
SNAPSHOT_GRID_TOKENS_LEAST = 64


@dataclass(slots=True)
class Parts:
    """What an engine is made of."""

    layout: ModelLayout
    geometry: Geometry
    namespace: bytes
    pools: list[BlockPool]
    strategies: list[GroupStrategy]
    runner: Runner
    store: TieredStore | None
    transfer: Transfer | None
    snapshot_tokens: int


def assemble(
    loaded: Loaded, memory: Memory, salt: str, clock: Callable[[], float], tiers: Sequence[Tier] = ()
) -> Parts:
    """Probe the model, divide the budgets, open the tiers; ``tiers`` are the caller's own, below those of ``memory``.

    Raises ``BudgetError`` for a budget that cannot work, ``DirectoryError`` for an unusable cache directory,
    ``ConfigError`` for an unusable key file or tiers that cannot be told apart.
    """
    check_tiers(tiers, memory)
    attention.install(loaded.model)
    try:
        return _assemble(loaded, memory, salt, clock, tiers)
    except BaseException:
        attention.uninstall(loaded.model)
        raise


def _assemble(loaded: Loaded, memory: Memory, salt: str, clock: Callable[[], float], tiers: Sequence[Tier]) -> Parts:
    block_tokens = block_tokens_of(memory)
    with attention.probing():
        layout = probe(loaded.model, block_tokens, memory.chunk_blocks)
    geometry = Geometry(layout.groups)
    name = namespace(namespace_fields(loaded, layout, salt, f"embedded/{ENGINE_FORMAT}", attention.NAME))
    counts = split_pool(layout.blocks, memory.device_kv_bytes, layout.context_tokens, memory.step_tokens_max)
    pools = [BlockPool(b, counts[b.group.index], loaded.model.device) for b in layout.blocks]
    assert sum(pool.nbytes for pool in pools) <= memory.device_kv_bytes, "the device budget is hard"
    strategies = [strategy(group) for group in layout.groups]
    grid = block_tokens[Kind.RECURRENT]
    snapshot_tokens = -(-memory.snapshot_tokens // grid) * grid
    store = open_store(geometry, memory, name, snapshot_tokens, clock, tiers)
    return Parts(
        layout=layout,
        geometry=geometry,
        namespace=name,
        pools=pools,
        strategies=strategies,
        runner=Runner(loaded.model, layout, pools, strategies),
        store=store,
        transfer=CpuTransfer(store.arena.numpy(), store.slabs) if store is not None else None,
        snapshot_tokens=snapshot_tokens,
    )


def check_tiers(tiers: Sequence[Tier], memory: Memory) -> None:
    """Tiers need host memory, since chunks pass through it, and names of their own, since statistics go by name."""
    if tiers and not memory.host_bytes:
        raise ConfigError("tiers are given but host is 0. Chunks reach them through host memory: add a host size.")
    taken = {"device", "host", "hits"} | {name for name in ("disk", "valkey", "object") if getattr(memory, name)}
    for tier in tiers:
        if not re.fullmatch(r"(?!slab\d)[a-z][a-z0-9_]*", tier.name) or tier.name in taken:
            raise ConfigError(
                f"A tier's name is {tier.name!r}: it must be lower-case letters, digits and _, and none of "
                f"{', '.join(sorted(taken))}, slab0, ..."
            )
        taken.add(tier.name)


def block_tokens_of(memory: Memory) -> Mapping[Kind, int]:
    """Tokens per block of each kind; the snapshot grid is a multiple of the others' chunks, because a boundary must
    suit all groups: a snapshot inside of a chunk that is not complete is of no use below the device.
    """
    tokens = {kind: memory.group_block_tokens.get(kind.value, memory.block_tokens) for kind in Kind}
    paged = math.lcm(*(tokens[kind] for kind in Kind if kind is not Kind.RECURRENT)) * memory.chunk_blocks
    if Kind.RECURRENT.value not in memory.group_block_tokens:
        tokens[Kind.RECURRENT] = paged * -(-SNAPSHOT_GRID_TOKENS_LEAST // paged)
    return tokens


def open_store(
    geometry: Geometry,
    memory: Memory,
    name: bytes,
    snapshot_tokens: int,
    clock: Callable[[], float],
    others: Sequence[Tier] = (),
) -> TieredStore | None:
    """Host arena and the tiers of ``memory``, with ``others`` below them; ``None`` without host memory. ``name``: the
    namespace.
    """
    if not memory.host_bytes:
        return None
    tiers: list[Tier] = []
    try:
        for tier in _open_tiers(memory, name, max(group.bytes_per_chunk for group in geometry.groups)):
            tiers.append(tier)  # one by one, so that those that are open are closed when the next cannot be
        below = [*tiers, *others]
        return TieredStore(geometry, memory.host_bytes, below, snapshot_tokens=snapshot_tokens, clock=clock)
    except BaseException:
        for tier in tiers:
            tier.close(clock())
        raise


def _open_tiers(memory: Memory, name: bytes, chunk_bytes_max: int) -> Iterator[Tier]:
    """Those that ``memory`` asks for, nearest first."""
    sealed = keys.protection(memory.disk_protection, memory.disk_key_path)
    if memory.disk_directory is not None:
        yield DiskTier(
            memory.disk_directory, memory.disk_bytes, name, chunk_bytes_max=chunk_bytes_max, protection=sealed
        )
    if memory.valkey:
        from stowage.tiers.valkey import ValkeyTier

        password = addresses.valkey_password(memory.valkey, memory.valkey_password_path)
        yield ValkeyTier(memory.valkey, name, password=password, ttl_s=memory.valkey_ttl_s, protection=sealed)
    if memory.object:
        from stowage.tiers.objects import ObjectTier

        yield ObjectTier(
            memory.object,
            name,
            limit_bytes=memory.object_limit_bytes,
            chunk_bytes_max=chunk_bytes_max,
            protection=sealed,
        )


def namespace_fields(
    loaded: Loaded, layout: ModelLayout, salt: str, writer: str, attention_name: str
) -> Mapping[str, Field]:
    """All that a chunk's bytes depend on besides its tokens (case F3); ``docs/keys.md`` explains each. ``writer``: who
    lays chunks out, and its format.
    """
    config = loaded.model.config
    groups: list[Field] = [
        {
            "kind": b.group.kind.value,
            "block_tokens": b.group.block_tokens,
            "blocks_per_chunk": b.group.blocks_per_chunk,
            "bytes_per_block": b.group.bytes_per_block,
            "window": b.group.window,
            "layers": [
                {
                    "index": layer.index,
                    "latent": layer.latent,
                    "tensors": [[str(t.dtype), list(t.shape)] for t in layer.tensors],
                    "offsets": list(b.offsets[layer.index]),
                }
                for layer in b.layers
            ],
        }
        for b in layout.blocks
    ]
    return {
        "format": [envelope.VERSION, segment.VERSION],
        "engine": writer,
        "code": f"transformers/{transformers.__version__}",
        "attention": attention_name,
        "weights": loaded.identity,
        "family": config.model_type,
        "compute_dtype": str(loaded.model.dtype),
        "rope": _plain(getattr(config, "rope_parameters", None)),
        "groups": groups,
        "parallel": PARALLEL,
        "adapter": ADAPTER,
        "salt": salt,
    }


def _plain(value: Any) -> Field:
    """A config value in the types that a namespace takes."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    return str(value)
