"""One simulated engine: the store's own state machine, with simulated tiers and a clock that is an argument.

    arrive ──> waiting ──(compute is idle)──> admitted: look-up, deadline rule ──> loading ──> ready ──> computing
                  └──<──(a chunk did not come: again without it)───────────────────────┘           └──> stored

Admission, the choice of what is loaded, deadlines and retries follow `engine.scheduler` and `engine.admission`; speeds
are judged by the engine's own `CostModel`. Differences: prompts are computed one by one, at a constant speed; what
is generated costs no time and is not stored; the device keeps nothing once a prompt was computed; nothing is computed
while its end is loaded (`engine.overlapped_load`).
"""

from __future__ import annotations

import heapq
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Final

import numpy as np

from stowage.cache.cost_model import CostModel
from stowage.cache.events import Discard, Fetch, StartLoad, StartStore
from stowage.cache.flow import Flow
from stowage.cache.keymap import holds
from stowage.cache.policy import POLICIES
from stowage.core.geometry import IntArray, MaskArray
from stowage.simulator.scenario import Scenario
from stowage.simulator.tiers import Content, Landing, Tier

__all__ = ["Agenda", "Node", "Outcomes", "keys_of"]

_SPILL_BYTES_MAX: Final = 256 << 20
_SPILL_SHARE: Final = 4
"""As in `cache/store.py`: what may be under way to the lower tiers, and of which part of host memory at most."""
_CHUNK_BYTES_MAX: Final = 1 << 20
"""Chunks are told to the flow as no longer than this, so that a transfer takes up to 32 of them: blocks of a trace are
longer than chunks of an engine, and one transfer for each would cost the simulation more than all the rest."""
_FORWARD_TOKENS: Final = 1 << 20
_HOST: Final = b"\x00"
_NOWHERE: Final = b"\xff"
"""Sources as bytes, which for the few blocks of a prompt are searched and counted several times as fast as arrays."""


class Agenda:
    """What happens when. Things of one time happen in the order in which they were put down."""

    __slots__ = ("_heap", "_numbers")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = count()

    def at(self, time_s: float, call: Callable[[float], None]) -> None:
        """`call` at that time, with the time as its argument."""
        heapq.heappush(self._heap, (time_s, next(self._numbers), call))

    def run(self, until_s: float) -> float:
        """All that is due by then. When the last of it happened, 0 if nothing did."""
        last_s = 0.0
        while self._heap and self._heap[0][0] <= until_s:
            last_s, _, call = heapq.heappop(self._heap)
            call(last_s)
        return last_s


@dataclass(slots=True)
class Outcomes:
    """What became of the prompts of one node, as columns: which prompt, its time to first token, where its tokens came
    from (`reused[i]` from tier i).
    """

    prompts: array[int]
    ttft_s: array[float]
    reused: list[array[int]]
    busy_s: float = 0.0
    loads_refused: int = 0


@dataclass(slots=True, eq=False)
class _Prompt:
    number: int
    arrived_s: float
    tokens: int
    keys: list[bytes]
    answer_s: float
    refused: frozenset[bytes] = frozenset()
    waited_s: float = 0.0
    began_s: float = 0.0
    fetch: Fetch | None = None
    began_forward: int = 0
    boundary: int = 0
    """Chunks that need not be computed."""
    below: dict[int, int] = field(default_factory=dict)
    """Bytes that the fetch is to bring from each lower tier."""
    by_tier: Sequence[int] = ()
    came: dict[bytes, int] = field(default_factory=dict)
    """Where chunks of an earlier try, which did not bring all in time, came from: now they are in host memory."""


class Node:
    """See the module. `contents`: what its lower tiers lead to, fastest first. `chunks_max`: all that can ever come."""

    def __init__(self, scenario: Scenario, agenda: Agenda, contents: list[Content], chunks_max: int) -> None:
        self._scenario = scenario
        self._agenda = agenda
        links = {"disk": scenario.disk, "object": scenario.object}
        names = scenario.tier_names[1:]
        self.tiers = [
            Tier(links[name], content, scenario.chunk_bytes) for name, content in zip(names, contents, strict=True)
        ]
        (slab,) = scenario.slabs
        scale = -(-scenario.chunk_bytes // _CHUNK_BYTES_MAX)
        told = scenario.geometry(max(1, scenario.kv_bytes_per_token // scale))
        arena_bytes = slab.slots * slab.slot_bytes
        spill_bytes = min(
            max(_SPILL_BYTES_MAX, 64 * scenario.chunk_bytes if scale > 1 else 0), arena_bytes // _SPILL_SHARE
        )
        indexes = [content.masks for content in contents]
        slab = replace(slab, slots=min(slab.slots, chunks_max + 1))  # room that nothing would ever fill costs memory
        self.flow = Flow(told, [slab], indexes, spill_bytes // scale, POLICIES[scenario.policy])
        self.cost_model = _pace_of(scenario)
        self.outcomes = Outcomes(array("q"), array("d"), [array("q") for _ in scenario.tier_names])
        self.copied_bytes = 0
        self._answer_s = scenario.object.latency_s if scenario.objects else 0.0
        self._waiting: deque[_Prompt] = deque()
        self._loading: list[_Prompt] = []
        self._ready: deque[_Prompt] = deque()
        self._computing = False
        self._forwards = 0
        self._ones: MaskArray = np.ones(64, np.uint64)
        self._limits_s: dict[int, float] = {}
        """Known limits, by chunks: the speed of computing never changes here."""

    @property
    def idle(self) -> bool:
        """Whether every prompt that arrived was computed, and nothing is under way."""
        return not (self._waiting or self._loading or self._ready or self._computing or self.flow.flights())

    def arrive(self, number: int, tokens: int, keys: list[bytes], now_s: float) -> None:
        """A prompt whose whole blocks have these keys; see `keys_of`."""
        self._waiting.append(_Prompt(number, now_s, tokens, keys, now_s + self._answer_s))
        self._turn(now_s)

    def _turn(self, now_s: float) -> None:
        """Compute what is ready; as long as nothing is, admit what waits."""
        while not self._computing:
            if self._ready:
                self._compute(self._ready.popleft(), now_s)
            elif self._waiting and len(self._loading) < self._scenario.max_num_seqs:
                self._admit(self._waiting.popleft(), now_s)
            else:
                return

    # Loading

    def _admit(self, prompt: _Prompt, now_s: float) -> None:
        prompt.began_s, prompt.began_forward = now_s, self._forwards
        if now_s < prompt.answer_s:  # a shared store was asked what it has
            self._loading.append(prompt)
            self._agenda.at(prompt.answer_s, partial(self._answered, prompt))
            return
        prompt.boundary = boundary = self._boundary(prompt, now_s)
        if not boundary:
            self._ready.append(prompt)
            return
        limit_s = self._limit_s(boundary) - prompt.waited_s
        fetch = prompt.fetch = self.flow.fetch([(0, prompt.keys[:boundary])], now_s + limit_s, now_s)
        self._loading.append(prompt)
        if self.tiers:
            self._act(now_s)
        if fetch.done:
            self._loaded(prompt, now_s)
        else:
            self._agenda.at(fetch.deadline_s, self._tick)

    def _limit_s(self, boundary: int) -> float:
        """How long a load of so many chunks may take."""
        limit_s = self._limits_s.get(boundary)
        if limit_s is None:
            limit_s = self.cost_model.load_limit_s(boundary * self._scenario.block_tokens)
            self._limits_s[boundary] = limit_s
        return limit_s

    def _answered(self, prompt: _Prompt, now_s: float) -> None:
        self._again(prompt, now_s)
        self._turn(now_s)

    def _again(self, prompt: _Prompt, now_s: float) -> None:
        self._loading.remove(prompt)
        prompt.waited_s += now_s - prompt.began_s
        self._waiting.appendleft(prompt)

    def _boundary(self, prompt: _Prompt, now_s: float) -> int:
        """How many leading chunks are to be fetched; at least one token is always computed."""
        limit = (prompt.tokens - 1) // self._scenario.block_tokens
        if not prompt.keys:
            return 0
        if not self.tiers:
            there = self.flow.lookup(0, prompt.keys, now_s).astype(np.bool_).tobytes()
            return min(_leading(there.find(0), len(there)), limit)
        sources = self.flow.sources(0, prompt.keys, now_s).tobytes()
        found = _leading(sources.find(_NOWHERE), len(sources))
        if prompt.refused:
            found = next((at for at in range(found) if prompt.keys[at] in prompt.refused), found)
        found = min(found, limit)
        return self._affordable(prompt, sources[:found]) if found else 0

    def _affordable(self, prompt: _Prompt, sources: bytes) -> int:
        """The engine's rule: what comes from below must not take longer than computing all that it saves. If it does,
        what host memory has in front of it is taken.
        """
        boundary = len(sources)
        prompt.below = self._bytes_below(self._by_tier(sources))
        if not prompt.below or self.cost_model.worth_loading(boundary * self._scenario.block_tokens, prompt.below):
            return boundary
        self.outcomes.loads_refused += 1
        prompt.below = {}
        return boundary - len(sources.lstrip(_HOST))

    def _by_tier(self, sources: bytes) -> list[int]:
        """How many chunks come from each tier, the host first."""
        return [sources.count(tier) for tier in range(1 + len(self.tiers))]

    def _loaded(self, prompt: _Prompt, now_s: float) -> None:
        """The fetch has ended: what it brought is copied to the device, or the rest is done without."""
        fetch = prompt.fetch
        assert fetch is not None and fetch.done
        missing = [] if holds(fetch.slots[0] >= 0) else (fetch.slots[0] < 0).nonzero()[0].tolist()
        prompt.fetch = None
        self.flow.release(fetch)
        sources = fetch.sources[0]
        by_tier = self._by_tier(sources.tobytes())
        if missing:
            due = prompt.began_s < fetch.deadline_s <= now_s
            if due and prompt.began_forward == self._forwards:
                self.cost_model.missed(prompt.below, self._bytes_below(by_tier), now_s - prompt.began_s)
            prompt.refused = prompt.refused.union(prompt.keys[at] for at in missing)
            prompt.came.update((prompt.keys[at], int(sources[at])) for at in (sources > 0).nonzero()[0].tolist())
            self._again(prompt, now_s)
            return
        self._loading.remove(prompt)
        if self.tiers and prompt.began_forward == self._forwards:  # while one computes, an engine sees nothing arrive
            self.cost_model.delivered(self._bytes_below(by_tier), now_s - prompt.began_s)
        for at in (sources == 0).nonzero()[0].tolist() if prompt.came else ():  # rare: most come at the first try
            tier = prompt.came.get(prompt.keys[at], 0)
            by_tier[0] -= 1
            by_tier[tier] += 1
        prompt.by_tier = by_tier
        self._ready.append(prompt)

    def _bytes_below(self, by_tier: list[int]) -> dict[int, int]:
        """Bytes of each tier below the host that so many chunks are."""
        chunk_bytes = self._scenario.chunk_bytes
        return {tier: number * chunk_bytes for tier, number in enumerate(by_tier) if tier and number}

    # Computing

    def _compute(self, prompt: _Prompt, now_s: float) -> None:
        scenario = self._scenario
        copied_bytes = len(prompt.keys) * scenario.chunk_bytes
        rest = prompt.tokens - prompt.boundary * scenario.block_tokens
        took_s = scenario.forward_s(rest) + copied_bytes / scenario.copy_bytes_per_s
        if prompt.boundary:
            took_s += scenario.load_s_fixed
        self.copied_bytes += copied_bytes
        self.outcomes.busy_s += took_s
        self._computing = True
        self._forwards += 1
        self._agenda.at(now_s + took_s, partial(self._computed, prompt))

    def _computed(self, prompt: _Prompt, now_s: float) -> None:
        self._computing = False
        self.outcomes.prompts.append(prompt.number)
        self.outcomes.ttft_s.append(now_s - prompt.arrived_s)
        for tier, column in enumerate(self.outcomes.reused):
            column.append(prompt.by_tier[tier] * self._scenario.block_tokens if prompt.boundary else 0)
        step = self._scenario.step_tokens // self._scenario.block_tokens or len(prompt.keys)
        for begin in range(prompt.boundary, len(prompt.keys), step):
            keys = prompt.keys[begin : begin + step]
            after = prompt.keys[begin - 1] if begin else None
            slots = self.flow.reserve(0, keys, self._whole(len(keys)), after)
            self.flow.commit(slots, now_s)
        if self.tiers:
            self._act(now_s)
        self._turn(now_s)

    def _whole(self, count: int) -> MaskArray:
        """The masks of so many chunks, not to be changed: each has the one block."""
        if count > len(self._ones):
            self._ones = np.ones(2 * count, np.uint64)
        return self._ones[:count]

    # Tiers

    def _act(self, now_s: float) -> None:
        """Carry out what the flow asks for."""
        for action in self.flow.take_actions():
            tier = self.tiers[action.tier]
            if isinstance(action, Discard):
                tier.content.drop(action.keys)
                continue
            assert isinstance(action, StartLoad | StartStore)
            landing = tier.begin(action, now_s)
            self._agenda.at(landing.at_s, partial(self._landed, action, landing))
            if landing.at_s > action.deadline_s and isinstance(action, StartStore):
                self._agenda.at(action.deadline_s, self._tick)

    def _landed(self, action: StartLoad | StartStore, landing: Landing, now_s: float) -> None:
        self.tiers[action.tier].land(action, landing)
        masks = self._whole(len(landing.ok)) if isinstance(action, StartStore) else landing.ok.astype(np.uint64)
        self.flow.outcome(action.id, landing.ok, masks, now_s, landing.refused)
        self._progress(now_s)

    def _tick(self, now_s: float) -> None:
        self.flow.tick(now_s)
        self._progress(now_s)

    def _progress(self, now_s: float) -> None:
        self._act(now_s)
        if self._loading:
            for prompt in [one for one in self._loading if one.fetch is not None and one.fetch.done]:
                self._loaded(prompt, now_s)
            self._turn(now_s)

    def check(self) -> None:
        """Assert the invariants of the flow, and of what its tiers lead to."""
        self.flow.check()
        for tier in self.tiers:
            tier.content.check()


def _pace_of(scenario: Scenario) -> CostModel:
    """What the engine would have measured of a machine whose speed never changes."""
    step_tokens = scenario.step_tokens or _FORWARD_TOKENS
    cost_model = CostModel(scenario.load_timeout_s, step_tokens)
    for tokens in (1, step_tokens):
        cost_model.computed(tokens, scenario.prefill_s_fixed + tokens / scenario.prefill_tokens_per_s)
    return cost_model


def keys_of(blocks: IntArray) -> list[bytes]:
    """A key of 32 bytes for each block: its id."""
    words = np.zeros((len(blocks), 4), np.int64)
    words[:, 0] = blocks
    keys: list[bytes] = words.view("V32").ravel().tolist()
    return keys


def _leading(first: int, count: int) -> int:
    """How many come before the first, which is -1 if there is none."""
    return count if first < 0 else first
