"""The scheduler's side: owns the store, says what can be loaded, and decides what is stored.

A request is offered a prefix only when host memory holds every chunk of it, verified and pinned: what the workers then
do is a copy within the machine. Until then vLLM is told to ask again later, and schedules others. A copy that fails
after all ends as a recompute, and that request is never offered anything again.

A bug here must not end vLLM's engine: what raises is logged with its traceback and counted (``faults``), and from then
on nothing is offered or stored; requests that were promised something are computed.

What is stored: after each step, the chunks that it completed: of full attention all, of windows and recurrent states
those that `core.retention` says, so some in the middle of a prompt too, not only at its end. Generated
tokens count as soon as they are known.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from stowage.cache.background import Background
from stowage.cache.cost_model import CostModel
from stowage.cache.opening import open_store
from stowage.core.geometry import Geometry, Kind
from stowage.core.groups import snapshot_spacing, strategy
from stowage.errors import StowageError
from stowage.log import Trouble
from stowage.plugins.vllm import adapter, namespace, weight_updates
from stowage.plugins.vllm.division import Rank, divide
from stowage.plugins.vllm.due import Due
from stowage.plugins.vllm.events import Announcements
from stowage.plugins.vllm.memory import SharedArena
from stowage.plugins.vllm.messages import Load, Part, Report, Step, Store
from stowage.plugins.vllm.reports import Reports
from stowage.plugins.vllm.requests import Phase, Prefixes, Tracked
from stowage.plugins.vllm.settings import Options, retention, state_spacing
from stowage.plugins.vllm.startup_log import ranks_line, store_line
from stowage.plugins.vllm.step_times import StepTimes
from stowage.plugins.vllm.storing import Source, Storing
from stowage.plugins.vllm.worker import check_one_machine
from stowage.storage.lease import Lease

_IDLE_WAIT_S = 0.001
"""A step that has nothing to compute waits so long for a lower tier, once, instead of asking again at once."""
_COUNTS = (
    "requests requests_hit tokens_asked tokens_loaded loads_failed stores_failed loaded_bytes stored_bytes faults"
).split()


class SchedulerSide:
    """The scheduler's side of one engine; idle before ``connect``. ``hash_tokens``: per block hash, for events."""

    def __init__(
        self, config: Any, shapes: Sequence[adapter.GroupShape], options: Options, hash_tokens: int = 0
    ) -> None:
        self._config = config
        self._shapes = shapes
        self._options = options
        self._hash_tokens = hash_tokens
        self._drafts = adapter.drafts_of(config)
        self._announcements: Announcements | None = None
        self._tracked: dict[str, Tracked] = {}
        self._loads: list[Load] = []
        self._step_times = StepTimes()
        self._due = Due(1 + (self._drafts.tokens if self._drafts is not None else 0))
        self._weights = weight_updates.Validity()
        self._broken = False
        self._busy = True
        self._waited = False
        self._parts: dict[Rank, Part] = {}
        self._trouble = Trouble("stowage.vllm")
        self._background: Background | None = None
        self._lease: Lease | None = None
        self.counts = dict.fromkeys(_COUNTS, 0)

    # Opening

    def connect(self, parts: Mapping[Rank, Part]) -> None:
        """The workers have allocated their KV cache: lay out chunks and open the store.

        Raises ``ConfigError`` when the workers cannot share memory, or for budgets that cannot work.
        """
        check_one_machine({part.machine for part in parts.values()})
        by_name = self._options.any_parallel_size
        division = divide({rank: part.pieces for rank, part in parts.items()}, by_name=by_name)
        sizes = division.bytes_per_block
        self._groups = tuple(
            self._options.group(g, shape, size) for g, (shape, size) in enumerate(zip(self._shapes, sizes, strict=True))
        )
        memory = self._options.memory
        name = namespace.engine_namespace(self._config, self._groups, division, by_name=by_name)
        recurrent = [group.block_tokens for group in self._groups if group.kind is Kind.RECURRENT]
        grid = math.lcm(*recurrent)
        step_tokens = self._config.scheduler_config.max_num_batched_tokens
        dense = any(shape.dense for shape in self._shapes)
        spacing = snapshot_spacing(memory.snapshot_tokens if dense else state_spacing(self._options, step_tokens), grid)
        self._has_states = bool(recurrent)
        lease = self._lease = self._options.lease()
        self._strategies = [strategy(group) for group in self._groups]
        kept = retention(self._options, self._strategies, step_tokens)
        sparse = self._has_states or not kept.most.points.everywhere
        layout = Geometry(self._groups)
        store = open_store(layout, memory, name, spacing, time.monotonic, shared=True, common_slots=sparse, lease=lease)
        assert store is not None, "host was checked"
        self._store = store
        self._namespaces = namespace.Namespaces(name, hashes_media=adapter.hashes_media(self._config))
        if self._weights.was_reset:
            self._namespaces.renew()
        self._cost_model = CostModel(memory.load_timeout_s, self._config.scheduler_config.max_num_batched_tokens)
        self._prefixes = Prefixes(store, self._cost_model, self._strategies, kept, memory.lookup_timeout_s)
        part = "" if lease is None else str(lease.path)
        self._shared = SharedArena(store.arena.path, store.arena.bytes, store.slabs, sizes, division.shares, part)
        full = [group for group in self._groups if group.kind is Kind.FULL]
        if self._hash_tokens and full:
            self._announcements = Announcements(store, full[0], self._hash_tokens)
        sources = [Source.of(number, shape, spacing) for number, shape in enumerate(self._shapes)]
        self._storing = Storing(store, self._strategies, kept, sources, len(parts), self._announcements)
        self._reports = Reports(self._storing, self._cost_model, self.counts)
        self._background = Background(store, name="vllm", after_poll=self._settle)
        adapter.say(store_line(memory, store, self._groups, spacing, step_tokens) + ranks_line(division, by_name))

    # Loads

    def _fault(self, text: str) -> None:
        """An exception that is being handled, which is a bug."""
        self._broken = True
        self.counts["faults"] += 1
        self._trouble.fault(f"{text}; from now on nothing is loaded or stored")

    @property
    def _open(self) -> bool:
        return self._background is not None and not self._broken and not self._weights.stale

    def arrived(self, request: Any) -> None:
        """A request was queued: ask shared stores about it while it waits."""
        try:
            if self._open and adapter.reads_cache(request) and (tracked := self._track(request)) is not None:
                assert self._background is not None
                with self._background.turn:
                    self._prefixes.ask(tracked)
                    self._background.notice()
        except Exception:  # noqa: BLE001 a bug costs hits, not the engine
            self._fault("a new request could not be looked at")

    def _track(self, request: Any) -> Tracked | None:
        """The state of a request; ``None`` for one whose prompt is not told by tokens."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None and not adapter.uses_embeddings(request):
            try:
                tracked = Tracked(request, self._namespaces, self._groups, self._drafts)
            except (OSError, ValueError) as error:  # an adapter that cannot be read; a salt that is no text
                self._complain("request_unnamed", "a request's prefix cannot be named: it is not kept", error)
                return None
            self._tracked[request.request_id] = tracked
        return tracked

    def matched(self, request: Any, held: int) -> tuple[int | None, bool]:
        """How many tokens beyond the ``held`` that the device has can be loaded; ``None``: not known yet."""
        try:
            return self._matched(request, held) if self._open else (0, False)
        except Exception:  # noqa: BLE001 a bug costs hits, not the engine
            self._fault("a prefix could not be looked up")
            return 0, False

    def _matched(self, request: Any, held: int) -> tuple[int | None, bool]:
        tracked = self._track(request)
        if tracked is None:
            return 0, False
        assert self._background is not None
        with self._background.turn:
            if tracked.phase is Phase.LOADING:  # vLLM asks before it hears that the load has ended: it will ask again
                return None, False
            if request.num_preemptions != tracked.preemptions:
                self._prefixes.give_back(tracked)
                tracked.restart()
            tracked.tainted = False
            if tracked.refused or request.num_tokens <= held + 1 or not adapter.reads_cache(request):
                self._prefixes.give_back(tracked)
                return 0, False
            self._store.poll()  # a fetch may be due, even where nothing moves
            self._settle()
            boundary = self._prefixes.offer(tracked, held)
            if boundary is not None and self._has_states and tracked.junction > boundary:
                adapter.stop_at(request, tracked.junction)
            self._background.notice()
        if boundary is None:
            if not self._busy and not self._waited:
                self._waited = True
                self._store.wait(_IDLE_WAIT_S)
            return None, False
        return (boundary - held, True) if boundary > held else (0, False)

    def allocated(self, request: Any, blocks: Sequence[Sequence[int]], tokens: int) -> None:
        """vLLM has given a request its blocks; ``tokens`` of them are ours to fill."""
        tracked = self._tracked.get(request.request_id)
        if self._background is None or tracked is None or tracked.phase is Phase.LOADING:
            return
        try:
            self._allocated(tracked, blocks, tokens)
        except Exception:  # noqa: BLE001 a bug costs a recompute, not the engine
            self._fault("a load could not be planned")
            if tokens:
                self._loads.append(Load(request.request_id, None))
                tracked.phase = Phase.LOADING

    def _allocated(self, tracked: Tracked, blocks: Sequence[Sequence[int]], tokens: int) -> None:
        assert self._background is not None
        with self._background.turn:
            if not tokens:
                tracked.count(0, self.counts)
                self._prefixes.give_back(tracked)
                return
            plans = None
            if tracked.plan is not None and tracked.held + tokens == tracked.plan.boundary:
                tables = [adapter.table_of(blocks[one.group]).repeat(one.parts) for one in self._storing.sources]
                plans = self._prefixes.plans(tracked, tables)
            tracked.count(tokens if plans is not None else 0, self.counts)
            self._loads.append(Load(tracked.request.request_id, plans))
            tracked.phase = Phase.LOADING

    # Steps

    def build(self, scheduled: Any) -> Step:
        """What the workers copy in this step. Raises nothing: what cannot be stored is not stored."""
        self._busy, self._waited = scheduled.total_num_scheduled_tokens > 0, False
        stores: list[Store] = []
        try:
            if self._open:
                stores = self._stores(scheduled)
        except Exception:  # noqa: BLE001 a bug costs hits, not the engine
            self._fault("a step's blocks could not be stored")
        loads, self._loads = self._loads, []
        number = self._step_times.built(scheduled.total_num_scheduled_tokens)
        fresh = self._weights.fresh(busy=self._busy)
        return Step(number, self._shared if loads or stores else None, loads, stores, self._busy, fresh)

    def _stores(self, scheduled: Any) -> list[Store]:
        assert self._background is not None
        with self._background.turn:
            if not self._busy or self._reports.full:  # else the store's thread does, beside the step
                self._store.poll()
                self._settle()
                self._background.notice()
            for request_id in scheduled.preempted_req_ids or ():
                self._preempted(request_id)
            due = self._due.of(scheduled, self._tracked)
            stores = self._storing.plan(scheduled, due) if due else []
            for tracked, _, end in due:
                self._due.watch(tracked, end)
        return stores

    def _preempted(self, request_id: str) -> None:
        tracked = self._tracked.get(request_id)
        if tracked is not None and tracked.phase is not Phase.LOADING:
            self._prefixes.give_back(tracked)
            tracked.restart()

    # Reports

    def reported(self, output: Any) -> None:
        """What the workers did."""
        report = output.kv_connector_worker_meta
        try:
            if isinstance(report, Report) and report.changed and self._weights.changed(report.step):
                adapter.warn(weight_updates.CHANGED)
            if self._background is not None:
                self._reported(output)
            elif isinstance(report, Report) and report.parts:
                self._introduced(report.parts)
        except Exception:  # noqa: BLE001 a bug costs hits, not the engine
            self._fault("what workers reported could not be settled")

    def _introduced(self, parts: Mapping[Rank, Part]) -> None:
        """Workers told their parts in a report, no handshake: the engine runs, and goes on without what cannot open."""
        self._parts |= parts
        if len(self._parts) == self._config.parallel_config.world_size:
            try:
                self.connect(self._parts)
            except StowageError as error:
                self._complain("cannot_open", "nothing is stored or loaded", error)

    def _reported(self, output: Any) -> None:
        assert self._background is not None
        if isinstance(report := output.kv_connector_worker_meta, Report):
            self._reports.add(report, *self._step_times.ended(report.step))
        if output.finished_recving:
            failed = getattr(output, "failed_recving", None) or set()
            with self._background.turn:
                for request_id in output.finished_recving:
                    self._loaded(request_id, request_id in failed)
        if self._reports.due(last=not self._tracked):
            self._background.wake()

    def _settle(self) -> None:
        """By who has the store's turn: what came of copies and fetches."""
        try:
            self._reports.settle()
            self._prefixes.note()
        except Exception:  # noqa: BLE001 a bug costs hits, not the engine
            self._fault("what workers reported could not be settled")

    @property
    def behind(self) -> bool:
        """Whether reports are not settled, or stores that were made after their step's, which is when vLLM drafts."""
        drafting = self._drafts is not None
        return self._background is not None and (self._reports.behind or (drafting and not self._storing.idle))

    def events(self) -> list[Any]:
        """vLLM's events of what was stored and what has gone, since the last call."""
        if not self._open or self._background is None or self._announcements is None:
            return []
        with self._background.turn:
            return self._announcements.take()

    def _loaded(self, request_id: str, failed: bool) -> None:
        tracked = self._tracked.get(request_id)
        if tracked is None:
            return
        if failed:
            tracked.refused = True
            self.counts["loads_failed"] += 1
        elif tracked.plan is not None:  # what lies before the boundary came from the store
            tracked.begin_at(tracked.plan.boundary)
        self._prefixes.give_back(tracked)
        if tracked.request.is_finished():
            del self._tracked[request_id]

    def finished(self, request: Any) -> None:
        """A request ended or was aborted. One that is being loaded is kept until the workers are done."""
        tracked = self._tracked.get(request.request_id)
        if self._background is None or tracked is None or tracked.phase is Phase.LOADING:
            return
        del self._tracked[request.request_id]
        try:
            with self._background.turn:
                self._prefixes.ended(tracked)
            if self._reports.due(last=not self._tracked):
                self._background.wake()
        except Exception:  # noqa: BLE001 a bug costs hits, not the engine
            self._fault("what a request held could not be given back")

    # The rest

    def reset(self) -> bool:
        """vLLM's weights may have been changed: nothing that is stored is ever found again by this engine. False while
        a load is under way: what it brings is of the old weights.
        """
        if self._background is None:
            self._weights.reset(self._step_times.number)
            return True
        with self._background.turn:
            self._settle()
            if any(tracked.phase is Phase.LOADING for tracked in self._tracked.values()):
                return False
            self._weights.reset(self._step_times.number)
            self._namespaces.renew()
            for request_id, tracked in list(self._tracked.items()):
                self._prefixes.give_back(tracked)
                del self._tracked[request_id]
                if (fresh := self._track(tracked.request)) is not None:
                    fresh.counted, fresh.preemptions, fresh.tainted = True, tracked.preemptions, True
            self._store.drop_host()
            if self._announcements is not None:
                self._announcements.clear()
        return True

    def stats(self) -> dict[str, int | float | str]:
        """Numbers of the store, and ours; without reports that are not settled."""
        if self._background is None:
            return {}
        with self._background.turn:
            found = self._store.stats() | self.counts
            pinned = int(found["chunks_pinned"]) - self._storing.unnamed  # which hold no chunks
            return found | {"chunks_pinned": pinned, "loads_refused": self._prefixes.given_up}

    def check(self) -> None:
        """Assert what must hold while nothing is under way."""
        if self._background is not None:
            with self._background.turn:
                self._settle()
                self._store.check()
                assert self._storing.idle, "stores that no worker has ended"

    def close(self) -> None:
        """Write what is still to be written, and give all memory back."""
        if self._background is not None:
            with self._background.turn:
                self._settle()
            self._background.close(self._options.close_timeout_s)
            self._background = None
        if self._lease is not None:
            self._lease.release()

    def _complain(self, event: str, text: str, error: Exception) -> None:
        self._trouble.report(logging.WARNING, event, text, error=f"{type(error).__name__}: {error}")
