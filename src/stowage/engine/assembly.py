"""Puts an engine's parts together from a loaded model and its budgets.

Owns the order of construction and the namespace: everything that cached bytes depend on besides tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch

from stowage.cache.opening import check_tiers, open_store
from stowage.cache.store import TieredStore
from stowage.config.memory import Memory, format_size
from stowage.core.geometry import Geometry, Kind, split_arena
from stowage.core.groups import GroupStrategy, snapshot_spacing, strategy
from stowage.core.key import namespace
from stowage.engine.capacity import Capacity
from stowage.errors import ConfigError, UnsupportedModelError
from stowage.executor import attention
from stowage.executor.block_pool import BlockPool
from stowage.executor.determinism.cuts import Pieces, check_steps, exact_grids, exact_name
from stowage.executor.determinism.row_invariance import mode_of
from stowage.executor.determinism.trial import try_rows
from stowage.executor.device import DeviceLink, link, recorder
from stowage.executor.fallback.runner import FallbackRunner
from stowage.executor.probe import probe
from stowage.executor.replay.graph_backend import SHARE, SHARE_LEAST_BYTES, Graphs, share
from stowage.executor.replay.recorder import Recorder
from stowage.executor.runner import Runner
from stowage.models.families import ALONE
from stowage.models.layout import ModelLayout
from stowage.models.loading import Loaded
from stowage.models.namespace import block_tokens_of, namespace_fields
from stowage.storage.protocol import Tier
from stowage.transfer.protocol import BlockTransfer

ENGINE_FORMAT = 1
"""How this engine lays chunks out; raised whenever the same tokens come to other bytes."""


@dataclass(slots=True)
class Parts:
    """What an engine is made of."""

    layout: ModelLayout
    geometry: Geometry
    namespace: bytes
    pools: list[BlockPool]
    strategies: list[GroupStrategy]
    runner: Runner | FallbackRunner
    store: TieredStore | None
    link: DeviceLink | None
    snapshot_tokens: int
    pieces: Pieces
    capacity: Capacity
    kv_cache_memory_bytes: int
    """What the pools may take: the budget, less what recorded steps may."""

    @property
    def graphs(self) -> Graphs | None:
        """The recorded decode steps; ``None``: all are computed plainly."""
        return self.runner.graphs if isinstance(self.runner, Runner) else None

    @property
    def transfer(self) -> BlockTransfer | None:
        """What copies between device and host."""
        return self.link.transfer if self.link is not None else None


def assemble(
    loaded: Loaded,
    memory: Memory,
    salt: str,
    clock: Callable[[], float],
    tiers: Sequence[Tier] = (),
    *,
    deterministic: bool = False,
    cuda_graphs: bool | None = None,
) -> Parts:
    """Probe the model, divide the budgets, open the tiers; ``tiers`` are the caller's own, below those of ``memory``.

    Raises ``BudgetError`` for a budget that cannot work, ``DirectoryError`` for an unusable cache directory,
    ``ConfigError`` for an unusable key file, tiers that cannot be told apart, or CUDA graphs that are not possible.
    """
    check_tiers(tiers, memory)
    best, *others = exact_grids(loaded.model) if deterministic else [1]
    asked = loaded, memory, salt, clock, tiers
    on_grid = partial(_on_grid, *asked, deterministic=deterministic, cuda_graphs=cuda_graphs)
    try:
        return on_grid(best)
    except UnsupportedModelError:  # it scans where nobody looked
        if not others:
            raise
    return on_grid(others[0])


def _on_grid(
    loaded: Loaded,
    memory: Memory,
    salt: str,
    clock: Callable[[], float],
    tiers: Sequence[Tier],
    grid: int,
    *,
    deterministic: bool,
    cuda_graphs: bool | None,
) -> Parts:
    tokens, chunk_blocks = block_tokens_of(memory, grid), memory.chunk_blocks
    if loaded.model.config.model_type in ALONE:  # every forward of a prompt is one piece of the grid
        chunk_blocks = max(1, chunk_blocks * tokens[Kind.FULL] // math.lcm(tokens[Kind.FULL], grid))
        tokens = {kind: math.lcm(size, grid) for kind, size in tokens.items()}
    layout = replace(probe(loaded.model, tokens, chunk_blocks), placeholders=loaded.placeholders)
    if memory.max_model_len:
        layout = replace(layout, context_tokens=min(layout.context_tokens, memory.max_model_len))
    pieces = Pieces(grid if layout.alone or (layout.recurrent is not None and layout.continues) else 1)
    check_steps(pieces, memory, layout.context_tokens)
    records = _recorder(loaded, memory, layout, cuda_graphs) if cuda_graphs is not False else None
    with ExitStack() as put_back:  # what is put into the model, if the rest fails
        if not layout.alone:
            attention.install(loaded.model)
            put_back.callback(attention.uninstall, loaded.model)
        parts = _assemble(loaded, memory, layout, salt, clock, tiers, pieces, deterministic, records, put_back)
        put_back.pop_all()
    return parts


def _assemble(
    loaded: Loaded,
    memory: Memory,
    layout: ModelLayout,
    salt: str,
    clock: Callable[[], float],
    tiers: Sequence[Tier],
    pieces: Pieces,
    deterministic: bool,
    records: Recorder | None,
    put_back: ExitStack,
) -> Parts:
    geometry = Geometry(layout.groups)
    computed = f"fallback/{loaded.model.config._attn_implementation}" if layout.alone else attention.NAME
    if loaded.model.device.type != "cpu":  # what another device computes differs in its last bits
        computed = f"{computed}/{loaded.model.device.type}"
    if deterministic:
        computed = f"{computed}/{exact_name(pieces)}"
    name = namespace(namespace_fields(loaded, layout, salt, f"embedded/{ENGINE_FORMAT}", computed))
    grid = layout.recurrent.group.block_tokens if layout.recurrent else block_tokens_of(memory)[Kind.RECURRENT]
    snapshot_tokens = snapshot_spacing(memory.snapshot_tokens, grid)
    slabs = split_arena(geometry, memory.host_memory_bytes, snapshot_tokens) if memory.host_memory_bytes else ()
    capacity = Capacity(layout.blocks, slabs, memory.max_num_batched_tokens, pieces.grid, layout.context_tokens)
    graph_bytes = share(memory.kv_cache_memory_bytes) if records is not None else 0
    pool_bytes = memory.kv_cache_memory_bytes - graph_bytes
    counts = capacity.divide(pool_bytes)
    pools = [BlockPool(b, counts[b.group.index], loaded.model.device) for b in layout.blocks]
    assert sum(pool.nbytes for pool in pools) <= pool_bytes, "the device budget is hard"
    strategies = [strategy(group) for group in layout.groups]
    runner: Runner | FallbackRunner
    placed = loaded.weights is not None
    if layout.alone:
        rows = mode_of(loaded.model, exact=deterministic, placed=placed)
        runner = FallbackRunner(
            *(loaded.model, layout, pools), grid=pieces.grid, exact=deterministic, mode=rows or nullcontext()
        )
    else:
        runner = Runner(loaded.model, layout, pools, strategies, exact=deterministic, placed=placed)
        put_back.callback(runner.give_back)
        if records is not None:
            runner.record(records, graph_bytes, memory.max_num_seqs)
    if deterministic:
        try_rows(
            runner, pools, pieces, layout, memory.max_num_batched_tokens
        )  # before there is a store that must be closed
    store = open_store(geometry, memory, name, snapshot_tokens, clock, tiers)
    if store is not None:
        arena = torch.from_numpy(store.arena.numpy())
        for pool in pools:
            if pool.group.kind is Kind.FULL:
                pool.look_away(arena)
    return Parts(
        layout=layout,
        geometry=geometry,
        namespace=name,
        pools=pools,
        strategies=strategies,
        runner=runner,
        store=store,
        link=link(loaded.model.device, store.arena.numpy(), store.slabs) if store is not None else None,
        snapshot_tokens=snapshot_tokens,
        pieces=pieces,
        capacity=capacity,
        kv_cache_memory_bytes=pool_bytes,
    )


def _recorder(loaded: Loaded, memory: Memory, layout: ModelLayout, wanted: bool | None) -> Recorder | None:
    """What records decode steps, where that is possible. Raises ``ConfigError`` where it is ``wanted`` and is not."""
    found, why = recorder(loaded.model.device), ""
    if found is None:
        why = f"it needs a CUDA device, and the model computes on {loaded.model.device}"
    elif layout.alone:
        why = f"{loaded.model.config.model_type} models are run with Transformers' own attention"
    elif loaded.weights is not None:
        why = "weights that are placed under a budget are not where a recorded step would look for them"
    elif not share(memory.kv_cache_memory_bytes):
        least = format_size(SHARE * SHARE_LEAST_BYTES)
        why = f"kv_cache_memory is too small to take a part from: give it {least} or more"
    if why and wanted:
        raise ConfigError(f"--cuda-graphs is not possible here: {why}. Leave it out.")
    return None if why else found
