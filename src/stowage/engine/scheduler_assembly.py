"""Builds the scheduler of an engine from its parts, with KV manager, admission and swap."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable

from stowage.cache.cost_model import CostModel
from stowage.cache.prefix_planner import PrefixPlanner
from stowage.cache.remote_lookup import RemoteLookup
from stowage.config.memory import Memory
from stowage.engine.admission import Admissions
from stowage.engine.assembly import Parts
from stowage.engine.kv_manager import KVManager
from stowage.engine.overlapped_loads import OverlappedLoads
from stowage.engine.scheduler import Scheduler
from stowage.engine.swap.long_context import LongContextSwap
from stowage.engine.swap.preemption import PreemptionSwap
from stowage.engine.swap.swap_space import SwapSpace


def assemble_scheduler(
    parts: Parts, memory: Memory, cost_model: CostModel, clock: Callable[[], float]
) -> tuple[KVManager, Scheduler]:
    """The KV manager and the scheduler over ``parts``, under the budgets of ``memory``."""
    kv_manager = KVManager(
        parts.layout, parts.pools, parts.strategies, parts.store, parts.transfer, parts.snapshot_tokens
    )
    remote_lookup = RemoteLookup(parts.store, cost_model, memory.lookup_timeout_s)
    swap_space = SwapSpace(kv_manager, parts.namespace, secrets.token_bytes(16), clock)
    long_context = LongContextSwap(kv_manager, swap_space, parts.capacity)
    step = math.lcm(parts.geometry.boundary_tokens, parts.pieces.grid)
    planner = PrefixPlanner(parts.store, parts.strategies, cost_model)
    overlapped_loads = OverlappedLoads(kv_manager, planner, cost_model, step, clock)
    admissions = Admissions(
        kv_manager,
        long_context,
        overlapped_loads,
        planner,
        memory.max_num_batched_tokens,
        cost_model,
        remote_lookup,
        clock,
    )
    scheduler = Scheduler(
        kv_manager,
        admissions,
        overlapped_loads,
        PreemptionSwap(kv_manager, swap_space, long_context),
        long_context,
        memory.max_num_batched_tokens,
        memory.max_num_seqs,
        parts.pieces,
    )
    return kv_manager, scheduler
