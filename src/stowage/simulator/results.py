"""The figures of a simulation: hit rates, bytes, waits and costs of a trace on hardware that need not exist.

    Trace + Scenario ── replay (the real `cache.flow`, simulated tiers) ──> Report of each node ──> Figures

Owns the computation of the figures from the reports. Sums are over all nodes unless a name says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from stowage.simulator import workers
from stowage.simulator.pricing import DAY_S, Endurance, Prices
from stowage.simulator.replay import Report, parts_of
from stowage.simulator.scenario import Scenario
from stowage.simulator.trace import Trace


@dataclass(frozen=True, slots=True)
class Ttft:
    """Seconds from a prompt's arrival to its first token."""

    p50: float
    p95: float
    p99: float
    mean: float
    max: float


@dataclass(frozen=True, slots=True)
class Figures:
    """The results of one scenario.

    `hit_rate`: reused tokens over input tokens, by tier and `all`. `busy`: the share of time that the nodes computed,
    `busy_max` that of the busiest; near 1 a node is overloaded, and TTFT is the length of its queue.
    `disk_written_bytes_per_day`: of the node that writes most. `cost_busy_per_million_tokens`: as if nodes were paid
    only while they compute. None: not requested, or not defined.
    """

    requests: int
    nodes: int
    duration_s: float
    input_tokens: int
    output_tokens: int
    computed_tokens: int
    reused_tokens: dict[str, int]
    hit_rate: dict[str, float]
    ttft_s: Ttft
    busy: float
    busy_max: float
    copied_bytes: int
    read_bytes: dict[str, int]
    written_bytes: dict[str, int]
    held_bytes: dict[str, int]
    evictions: int
    loads_refused: int
    spills_dropped: int
    disk_written_bytes_per_day: float | None
    disk_years: float | None
    cost_per_million_tokens: float | None
    cost_busy_per_million_tokens: float | None


def simulate(
    trace: Trace,
    scenarios: Sequence[Scenario],
    *,
    prices: Prices | None = None,
    endurance: Endurance | None = None,
    jobs: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Figures]:
    """The figures of every scenario, in their order, found by up to `jobs` processes.

    `progress` is told prompts that have arrived, and in all. Raises StowageError when a process dies.
    """
    tasks = [(scenario, part) for scenario in scenarios for part in parts_of(trace, scenario)]
    reports = iter(workers.run(trace, tasks, jobs, progress))
    found = []
    for scenario in scenarios:
        parts = scenario.nodes if scenario.are_nodes_apart else 1
        mine = [report for _ in range(parts) for report in next(reports)]
        found.append(figures_of(trace, scenario, mine, prices or Prices(), endurance))
    return found


def figures_of(
    trace: Trace, scenario: Scenario, reports: Sequence[Report], prices: Prices, endurance: Endurance | None
) -> Figures:
    """Sums, shares and percentiles of the reports of all nodes."""
    input_tokens, output_tokens = int(trace.tokens.sum()), int(trace.output_tokens.sum())
    reused = {
        name: sum(int(report.reused[tier].sum()) for report in reports) for tier, name in enumerate(scenario.tier_names)
    }
    hits = reused | {"all": sum(reused.values())}
    duration_s = max(report.ended_s for report in reports)
    busy_s = [report.busy_s for report in reports]
    below = scenario.tier_names[1:]
    read = {name: sum(report.read_bytes[tier] for report in reports) for tier, name in enumerate(below)}
    written = {name: sum(report.written_bytes[tier] for report in reports) for tier, name in enumerate(below)}
    held = {name: _held(scenario, reports, name, tier) for tier, name in enumerate(below)}
    per_day = years = None
    if scenario.disk_bytes and duration_s:
        per_day = max(report.written_bytes[0] for report in reports) * DAY_S / duration_s
        years = endurance.years(per_day, scenario.disk_bytes) if endurance is not None else None

    def cost(node_s: float) -> float | None:
        if not prices.any:
            return None
        moved = read.get("object", 0) + written.get("object", 0)
        disks = scenario.disk_bytes * scenario.nodes
        total = prices.cost(node_s, disks, held.get("object", 0), duration_s, moved)
        return total / (input_tokens + output_tokens) * 1e6

    return Figures(
        requests=len(trace),
        nodes=scenario.nodes,
        duration_s=duration_s,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        computed_tokens=input_tokens - hits["all"],
        reused_tokens=reused,
        hit_rate={name: count / input_tokens for name, count in hits.items()},
        ttft_s=_ttft(reports),
        busy=sum(busy_s) / (duration_s * scenario.nodes) if duration_s else 0.0,
        busy_max=max(busy_s) / duration_s if duration_s else 0.0,
        copied_bytes=sum(report.copied_bytes for report in reports),
        read_bytes=read,
        written_bytes=written,
        held_bytes=held,
        evictions=sum(report.evictions for report in reports),
        loads_refused=sum(report.loads_refused for report in reports),
        spills_dropped=sum(report.spills_dropped for report in reports),
        disk_written_bytes_per_day=per_day,
        disk_years=years,
        cost_per_million_tokens=cost(duration_s * scenario.nodes),
        cost_busy_per_million_tokens=cost(math.fsum(busy_s)),
    )


def _held(scenario: Scenario, reports: Sequence[Report], name: str, tier: int) -> int:
    if name == "object" and scenario.shared_objects:
        return reports[0].held_bytes[tier]
    return sum(report.held_bytes[tier] for report in reports)


def _ttft(reports: Sequence[Report]) -> Ttft:
    seconds = np.concatenate([report.ttft_s for report in reports])
    p50, p95, p99 = np.percentile(seconds, (50, 95, 99)).tolist()
    return Ttft(p50, p95, p99, float(seconds.mean()), float(seconds.max()))
