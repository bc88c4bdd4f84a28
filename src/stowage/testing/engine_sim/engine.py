"""An engine over played parts: all that decides is the real code, from `Engine.submit` to the protocol of tiers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Final

import torch

from stowage.cache.cost_model import CostModel
from stowage.cache.policy import POLICIES
from stowage.cache.store import TieredStore
from stowage.config.memory import Memory
from stowage.core.geometry import Geometry, Kind, split_arena
from stowage.core.groups import snapshot_spacing, strategy
from stowage.engine.assembly import Parts, map_host_arena
from stowage.engine.capacity import Capacity
from stowage.engine.engine import Engine
from stowage.executor.block_pool import BlockPool, bytes_needed
from stowage.executor.determinism.pieces import Pieces
from stowage.executor.device import DeviceLink
from stowage.models.layout import Layer, LayerTensor, ModelLayout, lay_out_groups
from stowage.models.namespace import block_tokens_of
from stowage.testing.engine_sim.model import EOS, ROW, VOCAB, PlayedModel, PlayedTokenizer
from stowage.testing.engine_sim.played import PlayedLock, PlayedThreads
from stowage.testing.engine_sim.profile import EngineFaults
from stowage.testing.engine_sim.tier import PlayedCopies, PlayedTier, SharedTier, Shelf
from stowage.testing.sim.loop import Process, SimSignal

KINDS: Final = (
    (Kind.FULL,),
    (Kind.FULL,),
    (Kind.FULL, Kind.SLIDING),
    (Kind.SLIDING,),
    (Kind.FULL, Kind.CHUNKED),
    (Kind.FULL, Kind.RECURRENT),
    (Kind.RECURRENT,),
    (Kind.FULL, Kind.SLIDING, Kind.RECURRENT),
)


class Machine:
    """What a world's engines are opened with: the model's groups, the budgets, and what its tiers keep."""

    def __init__(self, chance: random.Random) -> None:
        kinds = chance.choice(KINDS)
        block, chunk_blocks = chance.choice((1, 2, 4, 8)), chance.choice((1, 2, 4))
        windows = {Kind.SLIDING: chance.choice((3, 8, 16, 40)), Kind.CHUNKED: chance.choice((8, 16, 32))}
        grid = chance.choice((8, 16, 32))
        self.pieces = Pieces(grid) if Kind.RECURRENT in kinds and chance.random() < 0.4 else Pieces()
        sequences = chance.choice((1, 2, 4, 8, 8))
        self.memory = Memory(
            kv_cache_memory=1 << 20,
            host_memory=chance.choice((0, 1 << 16, 1 << 17, 1 << 18, 1 << 20)),
            block_size=block,
            chunk_blocks=chunk_blocks,
            snapshot_tokens=chance.choice((16, 32, 64)),
            group_block_size={"recurrent": grid} if chance.random() < 0.8 else {},
            max_num_batched_tokens=max(chance.choice((4, 16, 48, 128)), self.pieces.grid + sequences),
            max_num_seqs=sequences,
            load_timeout_s=chance.choice((0.05, 1.0, 10.0)),
            lookup_timeout_s=chance.choice((0.01, 0.5)),
            eviction_policy=chance.choice(list(POLICIES)),
        )
        layers = [
            Layer(at, kind, windows.get(kind, 0), (LayerTensor((1,), ROW, "s/0" if kind is Kind.RECURRENT else ""),))
            for at, kind in enumerate(kinds)
        ]
        tokens = block_tokens_of(self.memory, self.pieces.grid)
        self.layout = ModelLayout(
            blocks=lay_out_groups(layers, lambda layer: layer.kind, tokens, chunk_blocks),
            ragged=True,
            context_tokens=chance.choice((60, 120, 240)),
            vocab=VOCAB,
            layers=len(layers),
        )
        self.geometry = Geometry(self.layout.groups)
        self.snapshot_tokens = snapshot_spacing(self.memory.snapshot_tokens, tokens[Kind.RECURRENT])
        longest = bytes_needed(
            self.layout.blocks,
            chance.choice((24, 60, self.layout.context_tokens, self.layout.context_tokens)),
            self.memory.max_num_batched_tokens,
        )
        self.memory = replace(self.memory, kv_cache_memory=longest * chance.choice((1, 1, 2, 3)))
        self.late_copies = chance.random() < 0.4
        self.shelves = [Shelf(chance.choice((4, 30, 1000))) for _ in range(chance.choice((0, 1, 1, 2)))]
        self.shared = chance.random() < 0.3


class PlayedEngine(Engine):
    """Opened on `machine`. Raises BudgetError where the machine has too little for one block."""

    def __init__(self, machine: Machine, process: Process, faults: EngineFaults) -> None:
        loop = process.loop
        self.memory = machine.memory
        self._clock = loop.clock
        self.weights, self._owns_weights, self._adapters = None, False, None
        self.adapter_names, self._adapter = (), ""
        config = SimpleNamespace(model_type="played")
        self.model: Any = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32, config=config)
        self.tokenizer, self.name = PlayedTokenizer(), "played"
        parts, self.computes = _parts(machine, process, faults)
        cost_model = CostModel(machine.memory.load_timeout_s, machine.memory.max_num_batched_tokens)
        self._begin(parts, cost_model, frozenset([EOS]), PlayedThreads(process))

    @property
    def rests(self) -> bool:
        """Whether nobody holds the engine's lock, so that its parts can be looked at."""
        lock: Any = self._loop.lock
        assert isinstance(lock, PlayedLock)
        return lock.is_free

    @property
    def counters(self) -> dict[str, int]:
        """What happened in it, by name."""
        counters = self._kv_manager.counters
        return {name: int(getattr(counters, name)) for name in counters.__slots__}

    @property
    def busy(self) -> bool:
        """Whether it is at work, has requests, or copies under way."""
        return not self.rests or bool(self._loop.open or self._scheduler.busy or len(self._kv_manager.async_copies))

    @property
    def why(self) -> str:
        """What stopped it."""
        return repr(self._loop._broken)

    def held(self) -> str:
        """What is still held although there is no request."""
        used = sum(pool.blocks - pool.available for pool in self.parts.pools)
        if used:
            return f"{used} blocks of the device are in use by nobody"
        if self.store is not None and (fetches := self.store._flow._fetches.pinned()):
            return f"{len(fetches)} fetches were not given back"
        return ""


def _parts(machine: Machine, process: Process, faults: EngineFaults) -> tuple[Parts, PlayedModel]:
    memory, layout, pieces = machine.memory, machine.layout, machine.pieces
    slabs = (
        split_arena(machine.geometry, memory.host_memory_bytes, machine.snapshot_tokens) if memory.host_memory else ()
    )
    capacity = Capacity(layout.blocks, slabs, memory.max_num_batched_tokens, pieces.grid, layout.context_tokens)
    counts = capacity.divide(memory.kv_cache_memory_bytes)
    pools = [BlockPool(b, counts[b.group.index], torch.device("cpu")) for b in layout.blocks]
    strategies = [strategy(group) for group in layout.groups]
    store, link, arena = None, None, None
    if slabs:
        store = TieredStore(
            machine.geometry,
            memory.host_memory_bytes,
            _tiers(machine, process, faults),
            snapshot_tokens=machine.snapshot_tokens,
            clock=process.loop.clock,
            wake=SimSignal(process),
            policy=memory.eviction_policy,
        )
        arena = store.arena.numpy()
        map_host_arena(pools, store)
        link = DeviceLink(PlayedCopies(process, faults, arena, store.slabs, machine.late_copies))
    model = PlayedModel(process.loop, faults, pools, arena)
    runner: Any = model
    parts = Parts(
        layout=layout,
        geometry=machine.geometry,
        namespace=bytes(32),
        pools=pools,
        strategies=strategies,
        runner=runner,
        store=store,
        link=link,
        snapshot_tokens=machine.snapshot_tokens,
        pieces=pieces,
        capacity=capacity,
        kv_cache_memory_bytes=memory.kv_cache_memory_bytes,
    )
    return parts, model


def _tiers(machine: Machine, process: Process, faults: EngineFaults) -> Sequence[PlayedTier]:
    kinds = [SharedTier if machine.shared and not at else PlayedTier for at in range(len(machine.shelves))]
    return [
        kind(process, faults, shelf, f"tier_{'ab'[at]}")
        for at, (kind, shelf) in enumerate(zip(kinds, machine.shelves, strict=True))
    ]
