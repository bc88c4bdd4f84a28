"""Builds an engine's parts from a loaded model and its memory budgets.

Owns the order of construction, and the namespace: everything that cached bytes depend on besides tokens.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace

import torch

from stowage.cache.opening import check_tiers, open_store
from stowage.cache.store import TieredStore
from stowage.config.memory import Memory, format_size
from stowage.core.geometry import Geometry, Kind, split_arena
from stowage.core.groups import GroupStrategy, snapshot_spacing, strategy
from stowage.core.key import namespace
from stowage.engine.capacity import Capacity, Counts
from stowage.errors import BudgetError, ConfigError, StowageError, UnsupportedModelError
from stowage.executor import attention
from stowage.executor.block_pool import BlockPool
from stowage.executor.determinism.pieces import (
    Exactness,
    Pieces,
    check_steps,
    exact_candidates,
    exact_name,
    no_offload_reason,
    remedy,
    simplified,
)
from stowage.executor.determinism.row_invariance import mode_of
from stowage.executor.determinism.trial import try_rows_once
from stowage.executor.device import DeviceLink, link, recorder
from stowage.executor.fallback.runner import FallbackRunner
from stowage.executor.int8_activations import INT8_NAME, check_int8
from stowage.executor.probe import probe
from stowage.executor.replay.graphs.backend import Graphs
from stowage.executor.replay.graphs.budget import SHARE, SHARE_LEAST_BYTES, share
from stowage.executor.replay.graphs.recorder import Recorder
from stowage.executor.runner import Runner
from stowage.models.families import ALONE
from stowage.models.layout import ModelLayout, context_tokens
from stowage.models.loading import Loaded
from stowage.models.namespace import block_tokens_of, namespace_fields
from stowage.storage.protocol import Tier
from stowage.transfer.protocol import BlockTransfer

logger = logging.getLogger("stowage.engine")
ENGINE_FORMAT = 2
"""Version of the chunk layout; incremented whenever the same tokens give other bytes."""


@dataclass(slots=True)
class Parts:
    """The parts of an engine."""

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
    """Budget of the pools: without the share of CUDA graphs."""
    inexact_because: str = ""
    """Why answers are not bit-exact whatever is cached, batched or chunked; empty: they are."""

    @property
    def graphs(self) -> Graphs | None:
        """The captured decode steps; ``None``: all run eagerly."""
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
    exactness: Exactness = Exactness.USUAL,
    *,
    cuda_graphs: bool | None = None,
    int8: bool = False,
) -> Parts:
    """Probe the model, divide the budgets, open the tiers; ``tiers`` are the caller's own, below those of ``memory``.
    ``int8``: activations are rounded to 8 bits where the kernels can.

    Raises ``BudgetError`` for a budget that cannot work, ``DirectoryError`` for an unusable cache directory,
    ``ConfigError`` for an unusable key file, tiers that cannot be told apart, a ``max_model_len`` that is too
    long, CUDA graphs or activations in 8 bits that are not possible, or exact answers that are ``REQUIRED`` and are
    not.
    """
    check_tiers(tiers, memory)
    _check_length(loaded, memory)
    if int8:
        check_int8(loaded.model)
    asked = _Asked(loaded, memory, salt, clock, tiers, cuda_graphs, int8)
    if exactness is Exactness.BATCH_DEPENDENT:
        return _cut(asked, None, "it was asked for: --batch-dependent")
    candidates: list[Pieces] = []
    reasons: list[StowageError] = []
    try:
        candidates = exact_candidates(loaded.model)
    except ConfigError as error:
        reasons.append(error)
    for candidate in candidates:
        try:
            return _cut(asked, candidate)
        except LengthError:
            raise  # exact answers are possible; what was asked for is not lowered, and exactness is not given up for it
        except (UnsupportedModelError, BudgetError) as error:
            reasons.append(error)
    if exactness is Exactness.REQUIRED:
        raise _impossible(reasons) from reasons[0]
    parts = _cut(asked, None, str(reasons[0]))
    logger.warning("the last bits of answers may depend on what is computed beside them: %s", reasons[0])
    return parts


def _check_length(loaded: Loaded, memory: Memory) -> None:
    most = context_tokens(loaded.model.config.get_text_config())
    if 0 < most < memory.max_model_len:  # XLNet says -1: it has no limit
        raise ConfigError(
            f"max_model_len is {memory.max_model_len}, and this model takes sequences of up to {most} tokens: give "
            f"max_model_len {most} or less, or leave it out."
        )


class LengthError(BudgetError):
    """Device and host memory do not hold the ``max_model_len`` that was asked for."""


def _check_room(memory: Memory, capacity: Capacity, counts: Counts, why: str, *, recorded: bool) -> None:
    """A length that was asked for, and that device and host memory do not hold, is refused as in vLLM. ``why``: exact
    answers leave host memory out; empty: they do not, or are not wanted.
    """
    asked, longest = memory.max_model_len, capacity.longest(counts)
    if asked <= longest:
        return
    need = capacity.least_device_bytes(asked, recorded=recorded)
    held = format_size(memory.kv_cache_memory_bytes)
    raise LengthError(
        f"max_model_len is {asked}, and a KV cache of {held} holds sequences of up to {longest} tokens: give "
        f"--kv-cache-memory {-(-need // 1024)}KiB, or max_model_len {longest} or less, or leave it out." + remedy(why)
    )


def _impossible(reasons: Sequence[StowageError]) -> StowageError:
    """The error when exact answers are required and impossible."""
    first = reasons[0]
    return type(first)(f"Exact answers are not possible here: {first} Without --deterministic it runs nevertheless.")


@dataclass(frozen=True, slots=True)
class _Asked:
    """What the caller of ``assemble`` asked for; see there."""

    loaded: Loaded
    memory: Memory
    salt: str
    clock: Callable[[], float]
    tiers: Sequence[Tier]
    cuda_graphs: bool | None
    int8: bool


def _cut(asked: _Asked, candidate: Pieces | None, why: str = "") -> Parts:
    """With prompts cut in this ``candidate``; ``None``: in any, and ``why``."""
    loaded, memory = asked.loaded, asked.memory
    layout = _layout(loaded, memory, candidate)
    exact = None if candidate is None else simplified(candidate, layout)
    if candidate is not None and exact is not None and layout.recurrent is not None and exact.grid < candidate.grid:
        layout = _layout(loaded, memory, exact)  # no grid is needed: states may be kept at more positions
    check_steps(exact or Pieces(), memory, layout.context_tokens)
    records = _recorder(loaded, memory, layout, asked.cuda_graphs) if asked.cuda_graphs is not False else None
    with ExitStack() as put_back:  # what is put into the model, if the rest fails
        if not layout.alone:
            attention.install(loaded.model)
            put_back.callback(attention.uninstall, loaded.model)
        parts = _assemble(asked, layout, exact, records, put_back)
        parts.inexact_because = why
        put_back.pop_all()
    return parts


def _layout(loaded: Loaded, memory: Memory, candidate: Pieces | None) -> ModelLayout:
    """What the model caches, in blocks that suit this ``candidate``."""
    grid = candidate.grid if candidate is not None else 1
    tokens, chunk_blocks = block_tokens_of(memory, grid), memory.chunk_blocks
    if candidate is not None and (candidate.alone or loaded.model.config.model_type in ALONE):
        # Every forward of a prompt is one piece of the grid: a block that is shared lies in a whole one.
        chunk_blocks = max(1, chunk_blocks * tokens[Kind.FULL] // math.lcm(tokens[Kind.FULL], grid))
        tokens = {kind: math.lcm(size, grid) for kind, size in tokens.items()}
    layout = replace(probe(loaded.model, tokens, chunk_blocks, loaded.identity), placeholders=loaded.placeholders)
    if memory.max_model_len:
        layout = replace(layout, context_tokens=memory.max_model_len)
    return layout


def _assemble(
    asked: _Asked, layout: ModelLayout, exact: Pieces | None, records: Recorder | None, put_back: ExitStack
) -> Parts:
    """Name the cache, divide the budgets, then make pools, runner and store, in this order: a store must be closed, so
    everything that can fail comes before it. ``put_back``: undoes what was changed in the model.
    """
    loaded, memory = asked.loaded, asked.memory
    pieces, geometry = exact or Pieces(), Geometry(layout.groups)
    name = _namespace(asked, layout, exact)
    grid = layout.recurrent.group.block_tokens if layout.recurrent else block_tokens_of(memory)[Kind.RECURRENT]
    snapshot_tokens = snapshot_spacing(memory.snapshot_tokens, grid)
    slabs = split_arena(geometry, memory.arena_bytes, snapshot_tokens) if memory.host_memory_bytes else ()
    device_only = no_offload_reason(loaded.model) if exact is not None else ""
    if device_only:
        slabs = ()  # torch sums offloaded keys in another order than keys on the device
    capacity = Capacity(layout.blocks, slabs, memory.max_num_batched_tokens, pieces.grid, layout.context_tokens)
    graph_bytes = share(memory.kv_cache_memory_bytes) if records is not None else 0
    pool_bytes = memory.kv_cache_memory_bytes - graph_bytes
    counts = capacity.divide(pool_bytes)
    pools = _pools(layout, counts, loaded.model.device, pool_bytes)
    assert sum(pool.nbytes for pool in pools) <= pool_bytes, "the device budget is hard"
    strategies = [strategy(group) for group in layout.groups]
    runner = _runner(asked, layout, pools, strategies, exact)
    if isinstance(runner, Runner):
        put_back.callback(runner.give_back)
        if records is not None:
            runner.record(records, graph_bytes)
    runner.mapped = loaded.mapped
    if exact is not None:
        trial_name = f"{name.hex()}/{loaded.weights is not None}"
        try_rows_once(trial_name, runner, pools, pieces, layout, memory.max_num_batched_tokens)
    _check_room(memory, capacity, counts, device_only, recorded=records is not None)
    store = open_store(geometry, memory, name, snapshot_tokens, asked.clock, asked.tiers)
    if store is not None:
        map_host_arena(pools, store)
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


def map_host_arena(pools: Sequence[BlockPool], store: TieredStore) -> None:
    """Let full attention read blocks in the store's host memory."""
    arena = torch.from_numpy(store.arena.numpy())
    for pool in pools:
        if pool.group.kind is Kind.FULL:
            pool.map_host_arena(arena)


def _namespace(asked: _Asked, layout: ModelLayout, exact: Pieces | None) -> bytes:
    """The namespace of the engine's chunks: also of how they are computed, where that changes the last bits."""
    loaded = asked.loaded
    computed = [f"fallback/{loaded.model.config._attn_implementation}" if layout.alone else attention.NAME]
    if loaded.model.device.type != "cpu":
        computed.append(loaded.model.device.type)
    if exact is not None:
        computed.append(exact_name(exact, loaded.model.device))
    if asked.int8:
        computed.append(INT8_NAME)
    return namespace(namespace_fields(loaded, layout, asked.salt, f"embedded/{ENGINE_FORMAT}", "/".join(computed)))


def _runner(
    asked: _Asked,
    layout: ModelLayout,
    pools: Sequence[BlockPool],
    strategies: Sequence[GroupStrategy],
    exact: Pieces | None,
) -> Runner | FallbackRunner:
    model = asked.loaded.model
    if layout.alone:
        rows = mode_of(model, exact=exact is not None, int8=asked.int8) or nullcontext()
        grid = (exact or Pieces()).grid
        return FallbackRunner(model, layout, pools, grid=grid, exact=exact is not None, mode=rows)
    return Runner(
        *(model, layout, pools, strategies),
        exact=exact,
        weights=asked.loaded.weights,
        max_num_seqs=asked.memory.max_num_seqs,
        int8=asked.int8,
    )


def _pools(layout: ModelLayout, counts: Mapping[int, int], device: torch.device, nbytes: int) -> list[BlockPool]:
    """Raises ``BudgetError`` where the device has not so much memory."""
    try:
        return [BlockPool(b, counts[b.group.index], device) for b in layout.blocks]
    except (RuntimeError, MemoryError, OSError) as error:
        raise BudgetError(
            f"a KV pool of {format_size(nbytes)} cannot be had: {device.type} has not so much free memory. Give a "
            "smaller --kv-cache-memory, such as 1GiB."
        ) from error


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
