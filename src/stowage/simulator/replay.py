"""Replays a trace through simulated nodes, event by event, and collects the results of every prompt.

    trace ── route ──> node 0: event queue, Node      nodes that share nothing are replayed separately, in several
                  └──> node 1: event queue, Node      processes; nodes with a common object store share a queue

The same trace and scenario give the same figures, whatever the number of processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stowage.core.geometry import IntArray
from stowage.simulator.disk_segments import Segments
from stowage.simulator.node import Node, keys_of
from stowage.simulator.scenario import Scenario
from stowage.simulator.store import EventQueue
from stowage.simulator.tiers import Content, Objects
from stowage.simulator.trace import Trace

_REPORT_EVERY: Final = 2048
_MIX: Final = np.uint64(0x9E3779B97F4A7C15)
_FOLD: Final = np.uint64(32)


@dataclass(frozen=True, slots=True)
class Part:
    """Nodes that must be replayed together, with their prompts in order of arrival."""

    prompts: IntArray
    node_of: IntArray
    nodes: Sequence[int]


@dataclass(frozen=True, slots=True)
class Report:
    """The results of one node's prompts. Columns: prompt numbers, seconds to the first token, tokens reused by tier.

    Bytes are by tier below host memory; `held_bytes`: what each tier holds at the end.
    """

    node: int
    prompts: IntArray
    ttft_s: NDArray[np.float64]
    reused: list[IntArray]
    busy_s: float
    ended_s: float
    read_bytes: list[int]
    written_bytes: list[int]
    held_bytes: list[int]
    copied_bytes: int
    loads_refused: int
    evictions: int
    spills_dropped: int


def route(trace: Trace, scenario: Scenario) -> IntArray:
    """The node of every prompt."""
    count = len(trace)
    numbers = np.arange(count, dtype=np.int64)
    if scenario.routing == "random":
        return np.random.default_rng(scenario.seed).integers(scenario.nodes, size=count, dtype=np.int64)
    if scenario.routing == "sticky" and len(trace.blocks):
        whole = np.diff(trace.first)
        last = np.minimum(whole, scenario.sticky_blocks) - 1
        ids = trace.blocks[np.maximum(trace.first[:-1] + last, 0).clip(max=len(trace.blocks) - 1)].astype(np.uint64)
        mixed = ids * _MIX
        mixed = (mixed ^ (mixed >> _FOLD)) * _MIX
        spread = ((mixed >> _FOLD) % np.uint64(scenario.nodes)).astype(np.int64)
        return np.where(whole > 0, spread, numbers % scenario.nodes)
    return numbers % scenario.nodes


def parts_of(trace: Trace, scenario: Scenario) -> list[Part]:
    """The parts that can be replayed separately: each node, or all of them together."""
    node_of = route(trace, scenario)
    if not scenario.are_nodes_apart:
        return [Part(np.arange(len(trace)), node_of, range(scenario.nodes))]
    return [Part(np.flatnonzero(node_of == node), node_of, [node]) for node in range(scenario.nodes)]


def replay(
    trace: Trace, scenario: Scenario, part: Part, progress: Callable[[int], None] = lambda done: None
) -> list[Report]:
    """Replay a part of a trace. `progress` is told now and then how many of its prompts have arrived."""
    events = EventQueue()
    shared = Objects(scenario.stored_bytes)
    contents = {number: _contents(scenario, shared) for number in part.nodes}
    chunks_max = _chunks_max(trace, part)
    nodes = {number: Node(scenario, events, contents[number], chunks_max[number]) for number in part.nodes}
    now_s = 0.0
    for done in range(0, len(part.prompts), _REPORT_EVERY):
        progress(done)
        some = part.prompts[done : done + _REPORT_EVERY]
        # As lists, made for many prompts at once: reading a number from an array costs as much as ten from a list.
        times_s, tokens = trace.arrived_s[some].tolist(), trace.tokens[some].tolist()
        keys = keys_of(np.concatenate([trace.blocks_of(prompt) for prompt in some.tolist()]))
        ends = np.cumsum(trace.first[some + 1] - trace.first[some]).tolist()
        begin = 0
        for at, (prompt, node) in enumerate(zip(some.tolist(), part.node_of[some].tolist(), strict=True)):
            now_s, end = times_s[at], ends[at]
            events.run(now_s)
            nodes[node].arrive(prompt, tokens[at], keys[begin:end], now_s)
            begin = end
    ended_s = max(events.run(math.inf), now_s)
    progress(len(part.prompts))
    for content in {id(content): content for of_node in contents.values() for content in of_node}.values():
        content.check()
    return [_report(number, node, contents[number], ended_s) for number, node in nodes.items()]


def _chunks_max(trace: Trace, part: Part) -> dict[int, int]:
    """By node, the most chunks that it has in host memory: each of its prompts', while it is loaded and computed."""
    counts = np.diff(trace.first)[part.prompts]
    totals = np.bincount(part.node_of[part.prompts], counts, minlength=max(part.nodes) + 1).astype(np.int64)
    return {number: min(len(trace.blocks), 2 * int(totals[number])) for number in part.nodes}


def _contents(scenario: Scenario, shared: Objects) -> list[Content]:
    contents: list[Content] = []
    if scenario.disk_bytes:
        contents.append(Segments(scenario.disk_bytes, scenario.stored_bytes))
    if scenario.objects:
        contents.append(shared if scenario.shared_objects else Objects(scenario.stored_bytes))
    return contents


def _report(number: int, node: Node, contents: list[Content], ended_s: float) -> Report:
    node.store.check()
    assert node.idle, "a prompt was left over"
    outcomes, stats = node.outcomes, node.store.flow.stats()
    return Report(
        node=number,
        prompts=np.array(outcomes.prompts, np.int64),
        ttft_s=np.array(outcomes.ttft_s, np.float64),
        reused=[np.array(column, np.int64) for column in outcomes.reused],
        busy_s=outcomes.busy_s,
        ended_s=ended_s,
        read_bytes=[tier.read_bytes for tier in node.store.tiers],
        written_bytes=[tier.written_bytes for tier in node.store.tiers],
        held_bytes=[content.held_bytes for content in contents],
        copied_bytes=node.copied_bytes,
        loads_refused=outcomes.loads_refused,
        evictions=stats["evictions"],
        spills_dropped=stats["spills_dropped"],
    )
