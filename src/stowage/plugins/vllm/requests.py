"""The scheduler side's record of one vLLM request, and the fetch of a prefix for it into host memory.

Owns a fetch at most: the chunks of the prefix that was chosen, pinned until the workers have copied them. Never blocks.
"""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from stowage.cache.cost_model import CostModel
from stowage.cache.prefix_planner import PrefixPlan, PrefixPlanner, PrefixRequest, device_masks
from stowage.cache.remote_lookup import RemoteLookup
from stowage.cache.store import TieredStore
from stowage.core.copy_plan import CopyPlan
from stowage.core.geometry import NULL_BLOCK, Group, IntArray, Kind
from stowage.core.groups import GroupStrategy
from stowage.core.key import SequenceKeys
from stowage.core.prefix_search import Anchors
from stowage.core.retention import Learner, Retention
from stowage.plugins.vllm import adapter
from stowage.plugins.vllm.namespace import Namespaces


class Phase(enum.Enum):
    """NEW: nothing was looked up. ASKING: shared stores are asked. FETCHING: chunks come into host memory, or are
    there. LOADING: workers copy them. SETTLED: no load for this request (any more).
    """

    NEW = "new"
    ASKING = "asking"
    FETCHING = "fetching"
    LOADING = "loading"
    SETTLED = "settled"


class Tracked:
    """One request. ``stored``: by tokens of a chunk, the first one that was not offered to the store yet; ``due``: what
    number of tokens completes the next. ``refused``: its loads failed on a worker once: it is computed, and not offered
    again. ``tainted``: its blocks were computed before the weights changed, and are not stored. ``junction``: where it
    parts from what is stored, as full attention sees it. ``plan``: the prefix that is fetched, beyond ``held`` tokens
    that the device had. ``drafts``: of the engine's speculative decoding. ``watched_at``: see ``due``. ``retention``:
    which of its windows and states are stored; ``None``: those that are of every prompt. Raises what ``names`` does.
    """

    def __init__(
        self, request: Any, names: Namespaces, groups: Sequence[Group], drafts: adapter.Drafts | None = None
    ) -> None:
        self.request = request
        self.name: str = request.request_id
        self.drafts = drafts
        self._lookahead = drafts.lookahead if drafts is not None else 0
        self._names, self._namespace, self._groups = names, names.of(request), groups
        self._begin_keys()
        self.phase = Phase.NEW
        self._chunk_tokens = {group.chunk_tokens for group in groups}
        self.begin_at(0)
        self.refused = False
        self.tainted = False
        self.counted = False
        self.watched_at = 0
        self.preemptions = 0
        self.junction = 0
        self.held = -1
        self.prefix = PrefixRequest()
        self.plan: PrefixPlan | None = None
        self.retention: Retention | None = None

    @property
    def settled_tokens(self) -> int:
        """Of so many tokens everything is known that their cache depends on. Drafts that nobody has confirmed are not
        among a request's tokens.
        """
        return max(0, int(self.request.num_tokens) - self._lookahead)

    @property
    def usable_tokens(self) -> int:
        """So many of a prompt's tokens can be loaded at most: the last one is always computed."""
        return min(int(self.request.num_tokens) - 1, self.settled_tokens)

    def _begin_keys(self) -> None:
        self.keys = SequenceKeys(self._namespace, self._groups, self._lookahead)
        self._media = self._names.media_of(self.request)
        self._prompt_tokens = len(self.request.prompt_token_ids)

    def extend_keys(self, tokens: int) -> None:
        """Take the request's tokens up to ``tokens`` into account. All anew where its prompt has grown: the next turn
        of a streaming session takes the place of the last token that was sampled, and may bring media.
        """
        if len(self.request.prompt_token_ids) != self._prompt_tokens:
            self._begin_keys()
        media, self._media = self._media, []
        self.keys.extend(adapter.tokens_of(self.request), tokens, media)

    def begin_at(self, tokens: int) -> None:
        """What lies before is stored already, or never will be by this request."""
        self.stored = {size: tokens // size for size in self._chunk_tokens}
        self.due = min((stored + 1) * size for size, stored in self.stored.items())

    def count(self, tokens: int, counts: dict[str, int]) -> None:
        """Once, in an engine's numbers: so many tokens of it are loaded."""
        if not self.counted:
            self.counted = True
            counts["requests"] += 1
            counts["requests_hit"] += tokens > 0
            counts["tokens_asked"] += self.request.num_tokens
            counts["tokens_loaded"] += tokens

    def restart(self) -> None:
        """It lost its blocks, and begins anew. (A fetch is given back before.)"""
        assert self.plan is None
        self.phase = Phase.NEW
        self.begin_at(0)
        self.preemptions = self.request.num_preemptions
        self.prefix = PrefixRequest()


class Prefixes:
    """Finds and fetches prefixes. ``timeout_s``: the longest wait for shared stores to say what they have.
    ``retention``: what is stored of every prompt, or the learner that says so of each.
    """

    def __init__(
        self,
        store: TieredStore,
        cost_model: CostModel,
        strategies: Sequence[GroupStrategy],
        retention: Retention | Learner,
        timeout_s: float,
    ) -> None:
        self._store = store
        self._strategies = strategies
        self._planner = PrefixPlanner(store, strategies, cost_model)
        self._remote_lookup = RemoteLookup(store, cost_model, timeout_s)
        self._learner = retention.learner
        self._points = retention.least.points
        self._grid = math.lcm(*(strategy.group.block_tokens for strategy in strategies))
        self.given_up = 0
        self._under_way: list[tuple[Tracked, PrefixPlan]] = []

    def ask(self, tracked: Tracked) -> None:
        """Start to ask shared stores about a request that is new."""
        if tracked.phase is not Phase.NEW or not self._remote_lookup.asks:
            return
        usable = tracked.usable_tokens
        tracked.extend_keys(usable)
        certain = self._certain(usable)
        self._remote_lookup.ask(tracked.prefix, [tracked.keys], usable, time.monotonic(), certain)
        tracked.phase = Phase.ASKING

    def _certain(self, usable: int) -> dict[int, Anchors]:
        """By group, of those that are not stored whole: the chunks that are stored of every prompt. A state is stored
        where a step has ended, which is not known of another server.
        """
        found: dict[int, Anchors] = {}
        for strategy in self._strategies:
            group = strategy.group
            if group.kind is Kind.RECURRENT:
                found[group.index] = Anchors()
            elif group.kind is not Kind.FULL and not self._points.everywhere:
                chunks = range(usable // group.chunk_tokens)
                at = np.flatnonzero(self._points.kept(strategy, chunks)).tolist()
                found[group.index] = Anchors(tuple(at), -(-group.window // group.chunk_tokens) + 1)
        return found

    def offer(self, tracked: Tracked, held: int) -> int | None:
        """The boundary up to which host memory now holds, pinned, what the device lacks beyond ``held`` tokens; 0 when
        there is nothing; ``None`` while it is on its way. Asking again changes nothing.
        """
        if tracked.phase is Phase.NEW:
            self.ask(tracked)
        if tracked.phase is Phase.ASKING and self._remote_lookup.pending(tracked.prefix, time.monotonic()):
            return None
        if tracked.phase is Phase.SETTLED and tracked.held == held:
            return 0
        if tracked.phase is Phase.FETCHING and tracked.held != held:  # the device holds more now, or less: choose anew
            self.give_back(tracked)
        plan = tracked.plan or self._choose(tracked, held)
        while plan is not None:
            assert plan.fetch is not None
            if not plan.fetch.done:
                return None
            if self._planner.copies(tracked.prefix, plan.boundary, plan.fetched()) is not None:
                return plan.boundary
            tracked.prefix.waited_s += time.monotonic() - plan.began_s
            self.give_back(tracked)
            plan = self._choose(tracked, held)
        return 0

    def _choose(self, tracked: Tracked, held: int) -> PrefixPlan | None:
        """Choose a boundary beyond ``held`` and begin to fetch it, if there is one."""
        usable = tracked.usable_tokens
        tracked.extend_keys(tracked.settled_tokens)  # a chunk that ends the prompt serves its other blocks
        plan = self._planner.plan(tracked.prefix, [tracked.keys], usable, device_masks(self._strategies, held))
        self.given_up += plan.load_refused
        tracked.junction, tracked.held = plan.known // self._grid * self._grid, held
        if self._learner is not None and tracked.retention is None:
            keys, tokens = tracked.keys.of(self._learner.group.index), len(tracked.request.prompt_token_ids)
            tracked.retention = self._learner.arrived(keys, tokens, plan.known, held, plan.boundary)
        if plan.boundary <= held:
            tracked.phase = Phase.SETTLED
            return None
        tracked.phase, tracked.plan = Phase.FETCHING, plan
        if not self._planner.fetch(tracked.prefix, plan, time.monotonic()).done:
            self._under_way.append((tracked, plan))
        return plan

    def note(self) -> None:
        """The store was polled: measure what has come by now. (vLLM asks again only when its step is over.)"""
        for pair in [*self._under_way]:
            tracked, plan = pair
            assert plan.fetch is not None
            if tracked.plan is not plan or plan.fetch.done:
                self._under_way.remove(pair)
                if tracked.plan is plan:
                    self._planner.learn(plan, time.monotonic())

    def plans(self, tracked: Tracked, tables: Sequence[IntArray]) -> list[CopyPlan] | None:
        """The copies into the blocks of ``tables``; ``None`` when a block that is needed is not there."""
        assert tracked.plan is not None
        for part in tracked.plan.groups:
            table, stop = tables[part.group], part.first_block + len(part.on_device)
            if len(table) < stop or (table[part.first_block : stop][~part.on_device] == NULL_BLOCK).any():
                return None
        fetched = tracked.plan.fetched()
        copies = self._planner.copies(tracked.prefix, tracked.plan.boundary, fetched, lambda part: tables[part.group])
        return None if copies is None else [copy for _, copy in copies]

    def ended(self, tracked: Tracked) -> None:
        """A request has ended: unpin what was fetched for it, and learn from its answer."""
        self.give_back(tracked)
        if self._learner is not None and tracked.retention is not None:
            group, prompt_tokens = self._learner.group, len(tracked.request.prompt_token_ids)
            tracked.extend_keys(tracked.stored[group.chunk_tokens] * group.chunk_tokens)
            keys = tracked.keys.of(group.index)
            if (tokens := len(keys) * group.chunk_tokens) > prompt_tokens:
                self._learner.answered(keys, prompt_tokens, tokens, tracked.retention)

    def give_back(self, tracked: Tracked) -> None:
        """Unpin what was fetched for it."""
        if tracked.plan is not None and tracked.plan.fetch is not None:
            self._store.release(tracked.plan.fetch)
        tracked.plan = None
        tracked.phase, tracked.held = Phase.SETTLED, -1
