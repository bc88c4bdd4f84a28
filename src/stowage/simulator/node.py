"""One simulated engine: the engine's own admission rule over a simulated store, with a clock that is an argument.

    arrive ──> waiting ──(compute is idle)──> admitted: look-up, plan ──> loading ──> ready ──> computing ──> stored
                  └──<──(a chunk failed: again without it)──────────────────┘           └──<──(a step)──┘

The engine's own `PrefixPlanner`, `OverlappedLoad` and `CostModel` decide what is loaded, how long that may take, and
how far a prompt is computed while its end is loaded. Differences from the engine: prompts are computed one by one, at a
constant speed; generated tokens cost no time and are not stored; the device keeps nothing of a prompt that is computed;
the store sees results of its tiers at once, not after the running forward.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np

from stowage.cache.cost_model import CostModel
from stowage.cache.overlapped_load import LoadState, OverlappedLoad
from stowage.cache.prefix_planner import PrefixPlan, PrefixPlanner, PrefixRequest
from stowage.cache.remote_lookup import RemoteLookup
from stowage.core.geometry import IntArray
from stowage.core.groups import strategy
from stowage.simulator.scenario import Scenario
from stowage.simulator.store import EventQueue, SimulatedStore
from stowage.simulator.tiers import Content

_FORWARD_TOKENS: Final = 1 << 20
_LOOK_EVERY_S: Final = 0.005
"""As in `engine/loop.py`: while nothing can be computed."""


@dataclass(slots=True)
class Outcomes:
    """One node's results, as columns: prompt, time to first token, reused tokens (`reused[i]` from tier i)."""

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
    prefix: PrefixRequest = field(default_factory=PrefixRequest)
    began_s: float = 0.0
    began_forward: int = 0
    plan: PrefixPlan | None = None
    overlap: OverlappedLoad | None = None
    computed: int = 0
    """Tokens that are on the device."""
    copied: int = 0
    """Chunks that were copied there, or from there."""
    reused: list[int] = field(default_factory=list)
    loads: int = 0
    """Which cost their fixed time, and have not yet."""

    def of(self, group: int) -> list[bytes]:
        """The keys of its one group."""
        return self.keys


class Node:
    """A simulated engine. `contents`: of its lower tiers, fastest first. `chunks_max`: the most in host memory."""

    def __init__(self, scenario: Scenario, events: EventQueue, contents: list[Content], chunks_max: int) -> None:
        self._scenario = scenario
        self._events = events
        self.store = SimulatedStore(scenario, events, contents, chunks_max, self._progress)
        self.cost_model = _cost_model_of(scenario)
        strategies = [strategy(group) for group in self.store.geometry.groups]
        self._planner = PrefixPlanner(self.store, strategies, self.cost_model)
        self._remote_lookup = RemoteLookup(self.store, self.cost_model, scenario.lookup_timeout_s)
        self.outcomes = Outcomes(array("q"), array("d"), [array("q") for _ in scenario.tier_names])
        self.copied_bytes = 0
        self._waiting: deque[_Prompt] = deque()
        self._loading: list[_Prompt] = []
        self._ready: deque[_Prompt] = deque()
        self._computing = False
        self._forwards = 0
        self._look_s = 0.0

    @property
    def idle(self) -> bool:
        """Whether every prompt that arrived was computed, and nothing is in flight."""
        return not (self._waiting or self._loading or self._ready or self._computing or self.store.flow.flights())

    def arrive(self, number: int, tokens: int, keys: list[bytes], now_s: float) -> None:
        """A prompt whose whole blocks have these keys; see `keys_of`."""
        self.store.now_s = now_s
        prompt = _Prompt(number, now_s, tokens, keys)
        self._remote_lookup.ask(prompt.prefix, [prompt], tokens - 1, now_s)
        self._waiting.append(prompt)
        self._turn(now_s)

    def _progress(self, now_s: float) -> None:
        """A transfer or look-up may have ended."""
        for prompt in [one for one in self._loading if not self._is_awaited(one, now_s)]:
            self._loaded(prompt, now_s)
        self._turn(now_s)

    def _turn(self, now_s: float) -> None:
        """Compute a prompt that is ready; while none is, admit waiting ones."""
        self.store.now_s = now_s
        while not self._computing and not self._compute_one(now_s):
            if not self._waiting or len(self._loading) + len(self._ready) >= self._scenario.max_num_seqs:
                return
            self._admit(self._waiting.popleft(), now_s)

    def _look(self, now_s: float) -> None:
        """Nothing was worth computing a while ago."""
        if now_s >= self._look_s:  # else it was looked at since
            self._turn(now_s)

    # Loading

    def _admit(self, prompt: _Prompt, now_s: float) -> None:
        prompt.began_s, prompt.began_forward = now_s, self._forwards
        prompt.plan = None
        if self._remote_lookup.pending(prompt.prefix, now_s):
            self._loading.append(prompt)
            self._events.at(prompt.prefix.answers_until_s, self._progress)
            return
        self.store.unanswered = self.store.probes and now_s < prompt.arrived_s + self._scenario.object.latency_s
        idle = not (self._loading or self._ready or self._waiting)
        plan = prompt.plan = self._planner.plan(prompt.prefix, [prompt], prompt.tokens - 1, overlaps=idle)
        self.outcomes.loads_refused += plan.load_refused
        if not plan.boundary or self._planner.fetch(prompt.prefix, plan, now_s).done:
            self._loaded(prompt, now_s)
        else:
            self._loading.append(prompt)

    def _is_awaited(self, prompt: _Prompt, now_s: float) -> bool:
        if prompt.plan is None:
            return self._remote_lookup.pending(prompt.prefix, now_s)
        return prompt.plan.fetch is not None and not prompt.plan.fetch.done

    def _again(self, prompt: _Prompt, now_s: float) -> None:
        prompt.prefix.waited_s += now_s - prompt.began_s
        self._waiting.appendleft(prompt)

    def _loaded(self, prompt: _Prompt, now_s: float) -> None:
        """A prompt's load has ended: copy it to the device, or go on without what failed."""
        plan = prompt.plan
        if prompt in self._loading:
            self._loading.remove(prompt)
        if plan is None:
            self._again(prompt, now_s)
            return
        counts = np.zeros(len(self.outcomes.reused), np.int64)
        if plan.fetch is not None:
            if self.store.tiers:  # while one computes, nobody sees what arrives
                self._planner.learn(plan, now_s, at_once=prompt.began_forward == self._forwards)
            self.store.flow.release(plan.fetch)
            if self._planner.refuse_missing(prompt.prefix, plan):
                self._again(prompt, now_s)
                return
            counts = np.bincount(plan.fetch.sources[0], minlength=len(counts))
        prompt.reused = (counts * self._scenario.block_tokens).tolist()
        prompt.computed = plan.boundary
        prompt.loads = plan.boundary > 0
        self._ready.append(prompt)
        if plan.overlap_end > plan.boundary:
            step = self._scenario.block_tokens
            prompt.overlap = self._planner.overlap(prompt, plan.boundary, plan.overlap_end, step, now_s)

    # Computing

    def _compute_one(self, now_s: float) -> bool:
        """Begin to compute the first prompt that is ready; False when none is."""
        for prompt in self._ready:
            count = self._next_tokens(prompt, now_s)
            if count:
                self._ready.remove(prompt)
                self._compute(prompt, count, now_s)
                return True
        return False

    def _next_tokens(self, prompt: _Prompt, now_s: float) -> int:
        """How many tokens of the prompt are computed now: all, unless its end is still being loaded."""
        load = prompt.overlap
        if load is not None:
            state = load.poll(prompt.computed, now_s)
            if state is LoadState.OPEN:
                rest = prompt.tokens - prompt.computed
                count = load.tokens(prompt.computed, min(rest, self._scenario.step_tokens or rest), now_s)
                if not count:
                    self._look_s = now_s + _LOOK_EVERY_S
                    self._events.at(self._look_s, self._look)
                return count
            if state is LoadState.MET:
                prompt.reused[load.main_source()] += load.end - prompt.computed
                prompt.computed, prompt.loads = load.end, prompt.loads + 1
            self._end_overlap(prompt, load, now_s)
        return prompt.tokens - prompt.computed

    def _end_overlap(self, prompt: _Prompt, load: OverlappedLoad, now_s: float) -> None:
        load.learn(now_s)
        for fetch in load.fetches:
            self.store.flow.release(fetch)
        prompt.overlap = None

    def _compute(self, prompt: _Prompt, count: int, now_s: float) -> None:
        scenario = self._scenario
        chunks = (prompt.computed + count) // scenario.block_tokens
        copied_bytes = (chunks - prompt.copied) * scenario.chunk_bytes
        took_s = scenario.forward_s(count) + copied_bytes / scenario.copy_bytes_per_s
        took_s += prompt.loads * scenario.load_s_fixed
        prompt.copied, prompt.loads = chunks, 0
        self.copied_bytes += copied_bytes
        self.outcomes.busy_s += took_s
        self._computing = True
        self._forwards += 1
        self._events.at(now_s + took_s, partial(self._computed, prompt, count))

    def _computed(self, prompt: _Prompt, count: int, now_s: float) -> None:
        self._computing = False
        self._keep(prompt, count, now_s)
        prompt.computed += count
        if prompt.computed < prompt.tokens:
            self._ready.appendleft(prompt)
        else:
            self.outcomes.prompts.append(prompt.number)
            self.outcomes.ttft_s.append(now_s - prompt.arrived_s)
            for column, tokens in zip(self.outcomes.reused, prompt.reused, strict=True):
                column.append(tokens)
        self._turn(now_s)

    def _keep(self, prompt: _Prompt, count: int, now_s: float) -> None:
        """Store the chunks that became complete, forward by forward."""
        size = self._scenario.block_tokens
        first, last = prompt.computed // size, (prompt.computed + count) // size
        step = self._scenario.step_tokens // size or max(1, last)
        for begin in range(first, last, step):
            after = prompt.keys[begin - 1] if begin else None
            self.store.store(prompt.keys[begin : min(begin + step, last)], after, now_s)
        self.store.act(now_s)


def _cost_model_of(scenario: Scenario) -> CostModel:
    """The cost model that the engine would have measured on a machine of constant speed."""
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
