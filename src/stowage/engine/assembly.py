"""Puts an engine's parts together from a loaded model and its budgets.

Owns the order of construction and the namespace: everything that cached bytes depend on besides tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from stowage.config import Memory
from stowage.core.geometry import Geometry, Kind
from stowage.core.groups import GroupStrategy, strategy
from stowage.core.key import Field, namespace
from stowage.engine import attention
from stowage.engine.layers import ModelLayout, probe
from stowage.engine.loading import Loaded
from stowage.engine.pool import BlockPool, split_pool
from stowage.engine.runner import Runner
from stowage.store import TieredStore
from stowage.tiers.disk import DiskTier
from stowage.tiers.protocol import Tier
from stowage.transfer.cpu import CpuTransfer
from stowage.transfer.protocol import Transfer

ENGINE_FORMAT = 1
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


def assemble(loaded: Loaded, memory: Memory, salt: str, clock: Callable[[], float]) -> Parts:
    """Probe the model, divide the budgets, open the tiers.

    Raises ``BudgetError`` for a budget that cannot work, ``DirectoryError`` for an unusable cache directory.
    """
    attention.install(loaded.model)
    try:
        return _assemble(loaded, memory, salt, clock)
    except BaseException:
        attention.uninstall(loaded.model)
        raise


def _assemble(loaded: Loaded, memory: Memory, salt: str, clock: Callable[[], float]) -> Parts:
    block_tokens = _block_tokens(memory)
    with attention.probing():
        layout = probe(loaded.model, block_tokens, memory.chunk_blocks)
    geometry = Geometry(layout.groups)
    name = namespace(_namespace_fields(loaded, layout, salt))
    counts = split_pool(layout.blocks, memory.device_kv_bytes, layout.context_tokens, memory.step_tokens_max)
    pools = [BlockPool(b, counts[b.group.index], loaded.model.device) for b in layout.blocks]
    assert sum(pool.nbytes for pool in pools) <= memory.device_kv_bytes, "the device budget is hard"
    strategies = [strategy(group) for group in layout.groups]
    grid = block_tokens[Kind.RECURRENT]
    snapshot_tokens = -(-memory.snapshot_tokens // grid) * grid
    store = _open_store(geometry, memory, name, snapshot_tokens, clock)
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


def _block_tokens(memory: Memory) -> Mapping[Kind, int]:
    """Tokens per block of each kind; the snapshot grid is a multiple of the others, because a boundary must suit all
    groups.
    """
    tokens = {kind: memory.group_block_tokens.get(kind.value, memory.block_tokens) for kind in Kind}
    paged = math.lcm(*(tokens[kind] for kind in Kind if kind is not Kind.RECURRENT))
    if Kind.RECURRENT.value not in memory.group_block_tokens:
        tokens[Kind.RECURRENT] = paged * -(-SNAPSHOT_GRID_TOKENS_LEAST // paged)
    return tokens


def _open_store(
    geometry: Geometry, memory: Memory, name: bytes, snapshot_tokens: int, clock: Callable[[], float]
) -> TieredStore | None:
    if not memory.host_bytes:
        return None
    tiers: list[Tier] = []
    if memory.disk_directory is not None:
        largest = max(group.bytes_per_chunk for group in geometry.groups)
        tiers.append(DiskTier(memory.disk_directory, memory.disk_bytes, name, chunk_bytes_max=largest))
    try:
        return TieredStore(geometry, memory.host_bytes, tiers, snapshot_tokens=snapshot_tokens, clock=clock)
    except BaseException:
        for tier in tiers:
            tier.close(clock())
        raise


def _namespace_fields(loaded: Loaded, layout: ModelLayout, salt: str) -> Mapping[str, Field]:
    """All that a chunk's bytes depend on besides its tokens (case F3); ``docs/keys.md`` explains each."""
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
                    "tensors": [[str(t.dtype), list(t.shape)] for t in layer.tensors],
                    "offsets": list(b.offsets[layer.index]),
                }
                for layer in b.layers
            ],
        }
        for b in layout.blocks
    ]
    return {
        "engine": f"embedded/{ENGINE_FORMAT}",
        "attention": attention.NAME,
        "weights": loaded.identity,
        "family": config.model_type,
        "compute_dtype": str(loaded.model.dtype),
        "rope": _plain(getattr(config, "rope_parameters", None)),
        "groups": groups,
        "parallel": "1",
        "adapter": "",
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
