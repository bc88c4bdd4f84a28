"""The engine's thread: requests come in, steps are computed, completions go out.

Owns the lives of requests. The scheduler and everything behind it is touched by this thread only, or under ``lock``
while it rests. What is done for one request (drawing, text, keys, telling) ends that request alone when it raises; a
forward that raises is tried again without the request that made it. What is nobody's request's fault ends the loop,
with every request told; an operating error never does.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from stowage import openmp
from stowage.cache.cost_model import CostModel
from stowage.cache.store import TieredStore
from stowage.engine.completion import is_over, last_piece, piece
from stowage.engine.kv_manager import KVManager
from stowage.engine.request import Delta, Request
from stowage.engine.sampling import check_logits
from stowage.engine.scheduler import Scheduler
from stowage.engine.sequence import Sequence, sequence_of
from stowage.errors import RequestError, StowageError
from stowage.executor.batch import Work
from stowage.executor.fallback.runner import FallbackRunner
from stowage.executor.runner import Runner
from stowage.executor.sequence_state import sequence_on_trial, take_blocks

logger = logging.getLogger("stowage.engine")
REQUESTS_MAX = 1 << 16
"""Requests that may be open at once: more are refused, because a queue without a limit only hides the trouble."""
CHECK_EVERY_S = 30.0
"""An engine that has become idle verifies its invariants, at most this often."""
_LOADING_WAIT_S = 0.005
"""Longest wait for a tier while something is loaded: what it is worth to wait for runs out by itself. Waits for host
memory that tiers write from begin with it, too; each is twice as long, up to `_IDLE_WAIT_S`."""
_IDLE_WAIT_S = 0.05
"""Longest wait while tiers write."""
_EXIT_S = 10.0
"""Longest wait for the thread when the process ends with the engine open."""
_TELLERS = 32
"""Threads that call ``on_delta`` of what was open when the engine stopped: one that blocks holds up nobody else."""


class Loop:
    """Runs from the moment it is made. ``eos``: tokens that end a sequence. ``threads``: what locks, conditions and
    threads are made of (a simulator plays its own). ``closing``: nothing new is taken.
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
        self._inbox: list[tuple[Request, Sequence]] = []
        self._news = threads.Condition()
        self._checked_s = clock()
        self._memory_wait_s = _LOADING_WAIT_S
        self._broken: BaseException | None = None
        _leave_cores()
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
        """Whether a bug has stopped it."""
        return self._broken is not None

    def submit(self, request: Request, sequence: Sequence) -> None:
        """Raises StowageError when it has ended, RequestError when too many requests are open."""
        _leave_cores()
        with self._news:
            if self._broken is not None:
                raise StowageError(f"the engine has stopped: {self._broken}") from self._broken
            if self.closing:
                raise StowageError("the engine is closed.")
            if len(self._inbox) + len(self.open) >= REQUESTS_MAX:
                raise RequestError(f"{REQUESTS_MAX} requests are open already; wait for some to end.")
            self._inbox.append((request, sequence))
            self._rouse()

    def cancel(self, request: Request) -> None:
        """``request`` ends when the running step is done."""
        with self._news:
            request.cancelled = True
            self._rouse()

    def end(self) -> bool:
        """Take nothing new, and cancel what runs; False when that was said before."""
        with self._news:
            if self.closing:
                return False
            self.closing = True
            self._rouse()
            return True

    def _at_exit(self) -> None:
        """The process ends with the engine open: a thread that Python ends inside a library's code may abort it. A
        fork's child has no thread, and perhaps a lock that is held for ever.
        """
        if os.getpid() == self._process:
            self.end()
            self.thread.join(_EXIT_S)

    def check(self) -> None:
        """Assert the invariants of every stateful part."""
        with self.lock:
            self._scheduler.check()
            if self._store is not None:
                self._store.check()

    # inside

    def _rouse(self) -> None:
        """There is news for the loop, which may be waiting for that or for a tier."""
        self._news.notify()
        if self._store is not None:
            self._store.rouse()

    def _run(self) -> None:
        try:
            while self._rest():
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
            self._tell_all()

    def _tell_all(self) -> None:
        """The loop has ended: so have all requests that are still open, because a bug ended it."""
        with self._news:
            arrived, self._inbox = self._inbox, []
        told = [request for request, _ in [*self.open.values(), *arrived]]
        self.open.clear()
        error = StowageError(f"the engine stopped: {self._broken!r}")
        error.__cause__ = self._broken
        for request in told:
            request.end(error)
        listening = deque(request for request in told if request.on_delta is not None)
        try:
            for _ in range(min(_TELLERS, len(listening))):
                self._threads.Thread(target=_tell, args=(listening, error), name="stowage-tell", daemon=True).start()
        except RuntimeError:  # no more threads are to be had
            _tell(listening, error)

    def _rest(self) -> bool:
        """Poll the store, and wait until there is something to do; False when closing."""
        while True:
            with self.lock:
                self._kv_manager.async_copies.collect()
                spilling = len(self._kv_manager.async_copies) > 0 or (
                    self._store is not None and not self._store.flush(0.0)
                )
                self._check_if_idle()
            with self._news:
                if self.closing:
                    return False
                if self._inbox or self._scheduler.busy:
                    return True
                self._news.wait(_IDLE_WAIT_S if spilling else None)

    def _check_if_idle(self) -> None:
        now_s = self._clock()
        if not self._scheduler.busy and now_s - self._checked_s >= CHECK_EVERY_S:
            self._checked_s = now_s
            self.check()

    def _accept(self) -> None:
        with self._news:
            arrived, self._inbox = self._inbox, []
        for request, sequence in arrived:
            self.open[sequence.id] = (request, sequence)
            with self._alone(sequence):
                self._scheduler.add(sequence)

    def _end_cancelled(self) -> None:
        self._finish_all([pair for pair in self.open.values() if pair[0].cancelled])

    def _finish_all(self, ended: list[tuple[Request, Sequence]]) -> None:
        for request, sequence in ended:
            with self._alone(sequence):
                self._finish(request, sequence, "cancelled")

    @contextmanager
    def _alone(self, sequence: Sequence) -> Iterator[None]:
        """What goes wrong in here ends the request of ``sequence``, and nobody else's, if everything else is in order
        then.
        """
        try:
            yield
        except StowageError as error:
            logger.warning("a request failed: %s", error, extra={"stowage_event": "request-failed"})
            self._end(sequence, error)
        except BaseException as error:
            logger.warning("a request failed", exc_info=True, extra={"stowage_event": "fault"})
            self._end(sequence, _own(error))
            self._scheduler.check()

    def _step(self) -> float:
        """Compute what is next. Where nothing can be before a tier has done more: the longest wait for one, which what
        it has done ends, and so does a request.
        """
        self._kv_manager.async_copies.collect()
        work = self._scheduler.schedule()
        self._end_failed()
        if not work:
            if len(self._kv_manager.async_copies):  # which hold what somebody may be waiting for
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
            self._find_culprit(work, error)
            return
        elapsed_s = self._clock() - began_s
        tokens = sum(w.count for w in work)
        counters = self._kv_manager.counters
        counters.tokens_computed += tokens
        counters.prompt_tokens_computed += sum(w.prompt_tokens for w in work)
        if tokens > 2 * len(work) or len(work) == 1:  # many single tokens say nothing about a prompt of that length
            self._cost_model.computed(tokens, elapsed_s)
        for item, logits in zip(work, outputs, strict=True):
            self._advance(item, logits)

    def _end_failed(self) -> None:
        """End the requests that cannot go on."""
        failed, self._scheduler.failed = self._scheduler.failed, []
        for sequence, error in failed:
            self._end(sequence, error)

    def _fail(self, work: list[Work], error: StowageError) -> None:
        logger.warning("a step failed: %s", error, extra={"stowage_event": "step-failed"})
        for item in work:
            self._end(sequence_of(item), error)

    def _find_culprit(self, work: list[Work], error: Exception) -> None:
        """A forward raised. Of several requests each is tried by itself; one by itself ends, and if not even a token
        that nobody asked for can be computed then, it was not its fault: raises what that raised.
        """
        if len(work) > 1:
            self._scheduler.separate(work)
            self._scheduler.check()
            return
        self._scheduler.found()
        self._end(sequence_of(work[0]), _own(error))
        self._scheduler.check()
        self._try_model()

    def _try_model(self) -> None:
        """Compute a token that nobody asked for."""
        pools = self._kv_manager.pools
        if any(not pool.available for pool in pools):
            return
        sequence = sequence_on_trial(-1, [0], self._kv_manager.layout.groups)
        take_blocks(sequence, pools, 1)
        try:
            with suppress(StowageError):  # weights that could not be delivered say nothing of the model
                self._runner.run([Work(sequence, 0, 1)])
        finally:
            self._kv_manager.vacate(sequence)

    def _end(self, sequence: Sequence, error: StowageError) -> None:
        """End one request with its error; what it has is given back."""
        self._scheduler.finish(sequence)
        self.open.pop(sequence.id)[0].deliver(Delta("", [], error=error))

    def _advance(self, work: Work, logits: Any) -> None:
        sequence = sequence_of(work)
        with self._alone(sequence):
            check_logits(logits)  # before anything of the step is kept: its keys and values may be no numbers either
            sequence.computed += work.count
            sequence.extend_keys()
        if sequence.id in self.open:
            self._kv_manager.settle(sequence)
            with self._alone(sequence):
                self._say(work, logits)

    def _say(self, work: Work, logits: Any) -> None:
        """Draw the next token, if it is known, and tell it."""
        sequence = sequence_of(work)
        if work.every_logit:
            sequence.score(work.start, logits)
        if sequence.computed < len(sequence.tokens):
            return
        token, report = sequence.sampler.draw(logits[-1])
        sequence.tokens.append(token)
        if report is not None:
            sequence.logprobs.append(report)
        if not sequence.times.first_token_s:
            sequence.times.first_token_s = self._clock()
        text = "" if token in self._eos and not sequence.params.ignore_eos else sequence.text.push(token)
        request = self.open[sequence.id][0]
        reason = is_over(sequence, token, self._eos)
        if reason:
            self._finish(request, sequence, reason, text)
        elif request.on_delta is not None:
            request.deliver(piece(sequence, text))

    def _finish(self, request: Request, sequence: Sequence, reason: str, text: str = "") -> None:
        self._scheduler.finish(sequence)
        sequence.times.finished_s = self._clock()
        last = last_piece(sequence, text + sequence.text.finish(), reason)
        del self.open[sequence.id]
        request.deliver(last)


def _own(cause: BaseException) -> StowageError:
    """What a request is told that something has gone wrong for, and for no other one."""
    error = StowageError(f"this request failed ({cause!r}), and no other one with it; the log has the traceback.")
    error.__cause__ = cause
    return error


def _tell(listening: deque[Request], error: StowageError) -> None:
    while listening:
        with suppress(IndexError):  # another one took it
            listening.popleft().deliver(Delta("", [], error=error))


def _leave_cores() -> None:
    """To the loop: idle threads of the calling one, which may have computed too, would be in its way (``openmp``)."""
    if openmp.waits_briefly():
        openmp.release_team()
