"""The engine's thread: requests come in, steps are computed, completions go out.

Owns the life cycle of requests. Only this thread uses the scheduler and what is behind it; others need ``lock``.
An error in one request's own work (sampling, text, keys, callbacks) ends that request alone. When a forward raises, its
sequences are retried one by one to find the one at fault. Any other bug stops the loop and fails every open request; an
operating error (``StowageError``) never stops it.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch

from stowage import openmp
from stowage.cache.cost_model import CostModel
from stowage.cache.store import TieredStore
from stowage.engine.completion import final_delta, finish_reason, token_delta
from stowage.engine.kv_manager import KVManager
from stowage.engine.request import Delta, Request, failed_alone
from stowage.engine.sampling import check_logits
from stowage.engine.scheduler import Scheduler
from stowage.engine.sequence import Sequence, sequence_of
from stowage.errors import CheckpointError, RequestError, StowageError
from stowage.executor.batch import Work
from stowage.executor.fallback.runner import FallbackRunner
from stowage.executor.runner import Runner
from stowage.executor.sequence_state import probe_sequence, take_blocks

logger = logging.getLogger("stowage.engine")
ResultT = TypeVar("ResultT")
REQUESTS_MAX = 1 << 16
"""Open requests at once; more are refused, because an unbounded queue only hides overload."""
CHECK_EVERY_S = 30.0
"""An idle engine verifies its invariants at most this often."""
_LOADING_WAIT_S = 0.005
"""Longest wait for a tier while something is loading (loads have deadlines of their own). Waits for tiers to free host
memory start at this value, and double up to `_IDLE_WAIT_S`."""
_IDLE_WAIT_S = 0.05
"""Longest wait while tiers write."""
_EXIT_S = 10.0
"""Longest wait for the thread at process exit with the engine open."""
_NOTIFIERS_MAX = 32
"""Threads that report a stopped engine to open requests, so that one blocking ``on_delta`` does not delay the rest."""


class Loop:
    """The engine's thread. ``eos``: tokens that end a sequence. ``threads``: where locks and threads come from.
    ``closing``: new requests are refused. ``is_taken_apart``: what it used was given back.
    """

    def __init__(
        self,
        runner: Runner | FallbackRunner,
        scheduler: Scheduler,
        kv_manager: KVManager,
        store: TieredStore | None,
        cost_model: CostModel,
        eos: frozenset[int],
        clock: Callable[[], float],
        threads: Any = threading,
    ) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._kv_manager = kv_manager
        self._store = store
        self._cost_model = cost_model
        self._eos = eos
        self._clock = clock
        self._threads = threads
        self.lock = threads.RLock()
        self.open: dict[int, tuple[Request, Sequence]] = {}
        self.closing = False
        self._end_lock = threads.RLock()
        self.is_taken_apart = False
        self._inbox: list[tuple[Request, Sequence]] = []
        self._wakeup = threads.Condition()
        self._checked_s = clock()
        self._memory_wait_s = _LOADING_WAIT_S
        self._broken: BaseException | None = None
        self._stale = False
        _release_cores()
        self.thread = threads.Thread(target=self._run, name="stowage-engine", daemon=True)
        self.thread.start()
        self._process = os.getpid()
        if threads is threading:
            atexit.register(self._at_exit)

    @property
    def alive(self) -> bool:
        """Whether it takes requests: it is neither closed nor stopped by a bug."""
        return self._broken is None and not self.closing

    @property
    def failed(self) -> bool:
        """Whether a bug has stopped it, or its weights' files are no longer what they were."""
        return self._broken is not None or self._stale

    def submit(self, request: Request, sequence: Sequence) -> None:
        """Raises StowageError when it has ended or is another process's, RequestError when too many are open."""
        if os.getpid() != self._process:
            raise StowageError(
                "this process was forked after the engine was opened, whose thread and memory are its parent's: open "
                "an Engine in this process."
            )
        _release_cores()
        with self._wakeup:
            if self._broken is not None:
                raise StowageError(f"the engine has stopped: {self._broken}") from self._broken
            if self.closing:
                raise StowageError("the engine is closed.")
            if len(self._inbox) + len(self.open) >= REQUESTS_MAX:
                raise RequestError(f"{REQUESTS_MAX} requests are open already; wait for some to end.")
            self._inbox.append((request, sequence))
            self._wake()

    def cancel(self, request: Request) -> None:
        """``request`` ends when the running step is done."""
        with self._wakeup:
            request.cancelled = True
            self._wake()

    @contextmanager
    def ended(self, timeout_s: float) -> Iterator[bool]:
        """Refuse new requests, cancel running ones, wait for the thread. True: the body gives back what that used, and
        does so again where it was interrupted. False: it has, or a step goes on, or this is a forked child.
        """
        if os.getpid() != self._process:
            yield False
            return
        with self._end_lock:
            self._refuse()
            self.thread.join(timeout_s)
            alive = self.thread.is_alive()
            if alive:
                logger.warning("a step outlasts the %.0f s given to close; close again for its memory", timeout_s)
            yield not (alive or self.is_taken_apart)
            self.is_taken_apart = not alive

    def _refuse(self) -> None:
        with self._wakeup:
            self.closing = True
            self._wake()

    def _at_exit(self) -> None:
        """Stop the thread before Python kills it, which may abort the process. A forked child has none."""
        if os.getpid() == self._process:
            self._refuse()
            self.thread.join(_EXIT_S)

    def check(self) -> None:
        """Assert the invariants of every stateful part."""
        with self.lock:
            self._scheduler.check()
            if self._store is not None:
                self._store.check()

    # inside

    def _wake(self) -> None:
        """Wake the loop, whether it waits for requests or for a tier."""
        self._wakeup.notify()
        if self._store is not None:
            self._store.wake()

    @torch.inference_mode()  # not in each step: entering it takes as long as sampling does
    def _run(self) -> None:
        try:
            while self._wait_for_work():
                with self.lock:
                    self._accept()
                    self._end_cancelled()
                    wait_s = self._step()
                if wait_s and self._store is not None:
                    self._store.wait(wait_s)
            with self.lock:
                self._accept()
                self._finish_all(list(self.open.values()))
        except BaseException as error:  # the thread's outermost frame: a bug; every request is told, nothing hangs
            logger.exception("the engine stopped", extra={"stowage_event": "fault"})
            self._broken = error
        finally:
            atexit.unregister(self._at_exit)
            self._fail_open_requests()

    def _fail_open_requests(self) -> None:
        """A bug ended the loop: fail all requests that are still open."""
        with self._wakeup:
            arrived, self._inbox = self._inbox, []
        failed = [request for request, _ in [*self.open.values(), *arrived]]
        self.open.clear()
        error = StowageError(f"the engine stopped: {self._broken!r}")
        error.__cause__ = self._broken
        for request in failed:
            request.end(error)
        listening = deque(request for request in failed if request.on_delta is not None)
        try:
            for _ in range(min(_NOTIFIERS_MAX, len(listening))):
                self._threads.Thread(
                    target=_deliver_error, args=(listening, error), name="stowage-tell", daemon=True
                ).start()
        except RuntimeError:  # cannot start more threads
            _deliver_error(listening, error)

    def _wait_for_work(self) -> bool:
        """Poll the store, and wait until there is something to do; False when closing."""
        while True:
            with self.lock:
                self._kv_manager.async_copies.collect()
                spilling = len(self._kv_manager.async_copies) > 0 or (
                    self._store is not None and not self._store.flush(0.0)
                )
                self._check_if_idle()
                idle = not (self._inbox or self._scheduler.busy)
                touching = idle and any(pool.touch_ahead() for pool in self._kv_manager.pools)
            with self._wakeup:
                if self.closing:
                    return False
                if self._inbox or self._scheduler.busy:
                    return True
                self._wakeup.wait(0.0 if touching else _IDLE_WAIT_S if spilling else None)

    def _check_if_idle(self) -> None:
        now_s = self._clock()
        if not self._scheduler.busy and now_s - self._checked_s >= CHECK_EVERY_S:
            self._checked_s = now_s
            self.check()

    def _accept(self) -> None:
        with self._wakeup:
            arrived, self._inbox = self._inbox, []
        for request, sequence in arrived:
            self.open[sequence.id] = (request, sequence)
            self._isolated(sequence, self._scheduler.add, sequence)

    def _end_cancelled(self) -> None:
        self._finish_all([pair for pair in self.open.values() if pair[0].cancelled])

    def _finish_all(self, ended: list[tuple[Request, Sequence]]) -> None:
        for request, sequence in ended:
            self._isolated(sequence, self._finish, request, sequence, "cancelled")

    def _isolated(self, sequence: Sequence, function: Callable[..., ResultT], *args: Any) -> ResultT | None:
        """What ``function`` returns. Its error ends the request of ``sequence`` alone, if the scheduler is sound."""
        try:
            return function(*args)
        except StowageError as error:
            logger.warning("a request failed: %s", error, extra={"stowage_event": "request-failed"})
            self._end(sequence, error)
        except BaseException as error:
            logger.warning("a request failed", exc_info=True, extra={"stowage_event": "fault"})
            self._end(sequence, failed_alone(error))
            self._scheduler.check()
        return None

    def _step(self) -> float:
        """Compute the next step. Returns how long to wait for a tier before the next one, at most: 0 unless all
        sequences depend on a tier. A new request ends the wait, too.
        """
        self._kv_manager.async_copies.collect()
        work = self._scheduler.schedule()
        self._end_failed()
        if not work:
            if len(self._kv_manager.async_copies):  # they hold memory that a sequence may be waiting for
                self._kv_manager.async_copies.collect(wait=True)
            elif self._scheduler.loading:
                return _LOADING_WAIT_S
            elif self._store is not None and not self._store.idle:
                wait_s, self._memory_wait_s = self._memory_wait_s, min(2 * self._memory_wait_s, _IDLE_WAIT_S)
                return wait_s
            return 0.0
        self._memory_wait_s = _LOADING_WAIT_S
        self._compute(work)
        return 0.0

    def _compute(self, work: list[Work]) -> None:
        began_s = self._clock()
        try:
            outputs = self._runner.run(work)
        except StowageError as error:  # weights that could not be delivered: the next step may have them
            self._fail(work, error)
            return
        except Exception as error:
            logger.warning("a forward of %d raised", len(work), exc_info=True, extra={"stowage_event": "fault"})
            self._retry_alone(work, error)
            return
        elapsed_s = self._clock() - began_s
        tokens = sum(w.count for w in work)
        counters = self._kv_manager.counters
        counters.tokens_computed += tokens
        counters.prompt_tokens_computed += sum(w.prompt_tokens for w in work)
        if tokens > 2 * len(work) or len(work) == 1:  # a large decode batch says nothing about prefill speed
            self._cost_model.computed(tokens, elapsed_s)
        for item, logits in zip(work, outputs, strict=True):
            self._process_output(item, logits)

    def _end_failed(self) -> None:
        """End the requests that cannot go on."""
        failed, self._scheduler.failed = self._scheduler.failed, []
        for sequence, error in failed:
            self._end(sequence, error)

    def _fail(self, work: list[Work], error: StowageError) -> None:
        logger.warning("a step failed: %s", error, extra={"stowage_event": "step-failed"})
        self._stale |= isinstance(error, CheckpointError)
        for item in work:
            self._end(sequence_of(item), error)

    def _retry_alone(self, work: list[Work], error: Exception) -> None:
        """A forward raised. Several sequences are retried one by one. A single one ends with the error; then a dummy
        token is computed, and if that raises too, the model itself is broken: the error stops the loop.
        """
        if len(work) > 1:
            self._scheduler.isolate(work)
            self._scheduler.check()
            return
        self._scheduler.end_isolation()
        self._end(sequence_of(work[0]), failed_alone(error))
        self._scheduler.check()
        self._check_model()

    def _check_model(self) -> None:
        """Compute one dummy token; raises what the model raises."""
        pools = self._kv_manager.pools
        if any(not pool.available for pool in pools):
            return
        sequence = probe_sequence(-1, [0], self._kv_manager.layout.groups)
        take_blocks(sequence, pools, 1)
        try:
            with suppress(StowageError):  # weights that could not be delivered are no fault of the model
                self._runner.run([Work(sequence, 0, 1)])
        finally:
            self._kv_manager.free_device_blocks(sequence)

    def _end(self, sequence: Sequence, error: StowageError) -> None:
        """End one request with an error, and free its memory."""
        self._scheduler.finish(sequence)
        self.open.pop(sequence.id)[0].deliver(Delta("", [], error=error))

    def _process_output(self, work: Work, logits: Any) -> None:
        sequence = sequence_of(work)
        likeliest = self._isolated(sequence, self._count, sequence, work, logits)
        if sequence.id in self.open:
            self._kv_manager.cache_blocks(sequence)
            self._isolated(sequence, self._sample, sequence, work, logits, likeliest)

    def _count(self, sequence: Sequence, work: Work, logits: Any) -> int:
        likeliest = check_logits(logits)  # before the step's KV is cached: it may have NaN, too
        sequence.computed += work.count
        sequence.extend_keys()
        return likeliest

    def _sample(self, sequence: Sequence, work: Work, logits: Any, likeliest: int) -> None:
        """Sample the next token, if all tokens before it are computed, and deliver it."""
        if work.every_logit:
            sequence.score(work.start, logits)
        if sequence.computed < len(sequence.tokens):
            return
        sampler = sequence.sampler
        token, report = (likeliest, None) if sampler.takes_likeliest else sampler.sample(logits[-1])
        sequence.tokens.append(token)
        if report is not None:
            sequence.logprobs.append(report)
        if not sequence.times.first_token_s:
            sequence.times.first_token_s = self._clock()
        text = "" if token in self._eos and not sequence.params.ignore_eos else sequence.text.push(token)
        request = self.open[sequence.id][0]
        reason = finish_reason(sequence, token, self._eos)
        if reason:
            self._finish(request, sequence, reason, text)
        elif request.on_delta is not None:
            request.deliver(token_delta(sequence, text))

    def _finish(self, request: Request, sequence: Sequence, reason: str, text: str = "") -> None:
        self._scheduler.finish(sequence)
        sequence.times.finished_s = self._clock()
        last = final_delta(sequence, text + sequence.text.finish(), reason)
        del self.open[sequence.id]
        request.deliver(last)


def _deliver_error(listening: deque[Request], error: StowageError) -> None:
    while listening:
        with suppress(IndexError):  # another thread took it
            listening.popleft().deliver(Delta("", [], error=error))


def _release_cores() -> None:
    """Free the cores of the calling thread's idle OpenMP team, which would compete with the loop's (``openmp``)."""
    if openmp.waits_briefly():
        openmp.release_team()
