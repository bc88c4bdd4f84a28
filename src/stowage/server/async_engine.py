"""The engine for the event loop: submits requests to the engine's thread, and brings the pieces of answers back.

Owns the open exchanges and the threads that read requests. Neither side waits for the other: the engine puts pieces
into an exchange's inbox, and the loop takes all that wait there as one piece, so a slow client costs no more memory
than its answer, which is accounted for (`server.memory`). An exchange that is closed early cancels its engine requests.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeVar

from stowage.engine.engine import Engine
from stowage.engine.prompts import Begin
from stowage.engine.request import Delta, Request
from stowage.engine.sampling import TokenLogprob
from stowage.errors import ConfigError, RequestError, StowageError
from stowage.server.api_errors import ApiError, bad, busy, internal, reopening, stopping
from stowage.server.apis.generation_request import GenerationRequest
from stowage.server.apis.reader import Reader
from stowage.server.fair_queue import FairQueue, Job
from stowage.server.limits import Limits
from stowage.server.memory import RequestMemory, Reservation, bytes_of_piece
from stowage.server.served_model import ServedModel
from stowage.server.supervisor import EngineSupervisor
from stowage.server.vocabulary import Vocabulary

T = TypeVar("T")
Read = Callable[[Reader, bytes | bytearray, Begin], T]
"""Parses the body of a request."""
logger = logging.getLogger("stowage.server")
_RETRY_AFTER_S_MAX: Final = 60
_STEP_S: Final = 5.0
"""How long statistics wait for a step; scrapers usually wait for ten seconds."""
_HANGS_S: Final = 600.0
"""A step that goes on for longer hangs, or for longer than a request may take altogether: no request survives it."""
SHORT_BYTES: Final = 1 << 16
"""Bodies up to this size are read on a thread of their own, so that they never wait for the long ones of others."""


class AsyncEngine:
    """One engine at a time, for one event loop. All methods are called on the loop's thread."""

    def __init__(self, supervisor: EngineSupervisor, served: ServedModel, limits: Limits) -> None:
        self.supervisor = supervisor
        self.served, self.name = served, served.name
        self._limits = limits
        self._step: tuple[int, float] | None = None
        """Of the step that statistics wait for: tokens computed before it, and since when they wait."""
        self._adopt(self.engine)
        self._stats: dict[str, Any] = self.engine.stats()
        self.max_num_seqs = self.engine.memory.max_num_seqs
        self.max_choices = self.max_num_seqs + limits.max_queued_requests
        self.choices_open = 0
        self.stopping = self._reopening = False
        self._exchanges: set[Exchange] = set()
        self._seconds = 1.0
        """Moving average of how long a request takes."""
        self.memory = RequestMemory(limits.request_bytes_max)
        self._reading = FairQueue("stowage-read")
        self._reading_long = FairQueue("stowage-read-long", limits.reading_timeout_s)
        self._submitting = ThreadPoolExecutor(1, "stowage-submit")
        self._looking = ThreadPoolExecutor(1, "stowage-look")

    @property
    def engine(self) -> Engine:
        """Raises ApiError while there is none."""
        if self.supervisor.engine is None:
            raise reopening()
        return self.supervisor.engine

    @property
    def status(self) -> str:
        """`ok` while requests are accepted; `stopping`, `reopening`, `failed`, or `hanging` in a step."""
        if self.stopping:
            return "stopping"
        if self._reopening:
            return "reopening"
        engine = self.supervisor.engine
        if engine is None or not engine.alive or engine.failed:
            return "failed"
        return "hanging" if self.step_s > self.hangs_s else "ok"

    @property
    def hangs_s(self) -> float:
        """How long a step may go on."""
        return max(_HANGS_S, self._limits.request_timeout_s)

    @property
    def step_s(self) -> float:
        """How long statistics have waited for the running step, as far as is known; 0: they do not wait."""
        return 0.0 if (step := self._step) is None else time.monotonic() - step[1]

    def stats(self) -> dict[str, Any]:
        """The engine's statistics, or the last ones where there is no engine, or it hangs in a step. Waits for a step:
        not without end, so that metrics are answered and this thread keeps no process that is to end.
        """
        engine = self.supervisor.engine
        if engine is not None:
            step = engine.tokens_computed, time.monotonic()
            try:
                self._stats, self._step = engine.stats(_STEP_S), None
            except TimeoutError:
                if self._step is None or self._step[0] != step[0]:  # other steps may have taken the lock meanwhile
                    self._step = step
        return self._stats

    async def reopen(self) -> None:
        """Open another engine after the last one failed. Open exchanges end with an error, and requests are refused
        meanwhile. Raises what opening it raises.
        """
        self._reopening = True
        try:
            self.end_all(reopening())
            for exchange in list(self._exchanges):
                exchange.close()
            await asyncio.get_running_loop().run_in_executor(None, self._reopen)
        finally:
            self._reopening = False

    def _reopen(self) -> None:
        self.stats()
        del self.reader, self.vocabulary  # they refer to the old engine
        self.supervisor.reopen()
        self._adopt(self.engine)

    def _adopt(self, engine: Engine) -> None:
        self._step = None
        self.tokens_max = engine.sequence_tokens_max
        self.reader = Reader(engine, self.served, self._limits)
        self.vocabulary = Vocabulary(engine.tokenizer)

    async def read(self, read: Read[T], body: bytes | bytearray, reservation: Reservation) -> T:
        """Parse a body, when it is its client's turn. Meanwhile it counts as one choice. Raises ApiError."""
        self.refuse_if_full()
        queue = self._reading if len(body) <= SHORT_BYTES else self._reading_long
        reader = self.reader

        def work(job: Job) -> T:
            return read(reader, body, reservation.tokenizing(job.check))

        self.choices_open += 1
        try:
            return await queue.run(reservation.client, work)
        finally:
            self.choices_open -= 1

    def look(self, at: Callable[[], T]) -> asyncio.Future[T]:
        """Run a query that waits for the engine's lock, which a step may hold for long."""
        return asyncio.get_running_loop().run_in_executor(self._looking, at)

    def refuse_if_full(self, choices: int = 1) -> None:
        """Raises ApiError while there is no room for this many more choices."""
        if self.stopping:
            raise stopping()
        if self._reopening:
            raise reopening()
        if self.choices_open + choices > self.max_choices:
            what = (
                f"{self.choices_open} of at most {self.max_choices} choices are being served or wait; try again later."
            )
            raise busy(what, min(_RETRY_AFTER_S_MAX, math.ceil(self._seconds)))

    async def open(self, request: GenerationRequest, salt: bytes, reservation: Reservation) -> Exchange:
        """Submit a request to the engine. The caller closes the exchange. Raises ApiError."""
        self.refuse_if_full(request.choices)
        self.choices_open += request.choices
        exchange = Exchange(self, request, salt, reservation)
        self._exchanges.add(exchange)
        try:
            await exchange.submit(range(0, request.choices, request.n))
        except BaseException:
            exchange.close()
            raise
        return exchange

    def end_all(self, error: ApiError) -> None:
        """End every exchange with `error`."""
        for exchange in list(self._exchanges):
            exchange.fail(error)

    def relieve(self) -> None:
        """Where unsent answers exceed the memory limit, end the request that holds the most."""
        most = max(self._exchanges, key=lambda exchange: exchange.reservation.bytes, default=None)
        if most is not None and self.memory.held_bytes > self.memory.limit_bytes:
            most.fail(busy("The answer waits for its client, and takes more memory than the server has for that.", 5))
            most.close()

    def close(self) -> None:
        """Cancel all open exchanges, and let the threads end."""
        for exchange in list(self._exchanges):
            exchange.close()
        self._reading.close()
        self._reading_long.close()
        self._submitting.shutdown(wait=False, cancel_futures=True)
        self._looking.shutdown(wait=False, cancel_futures=True)

    def closed(self, exchange: Exchange, seconds: float) -> None:
        """Called by an exchange when it closes."""
        self._exchanges.remove(exchange)
        self.choices_open -= exchange.request.choices
        self._seconds += 0.1 * (seconds - self._seconds)

    async def run(self, work: Callable[[], T]) -> T:
        """Run work that takes too long for the event loop on a thread, in the order of the calls."""
        return await asyncio.get_running_loop().run_in_executor(self._submitting, work)


class Exchange:
    """The engine requests of one HTTP request. Of several choices of one prompt the first is submitted alone; the
    others follow when its prompt is computed, and reuse it.
    """

    def __init__(
        self, async_engine: AsyncEngine, request: GenerationRequest, salt: bytes, reservation: Reservation
    ) -> None:
        self.request = request
        self.reservation = reservation
        self.began_s = time.monotonic()
        self.scores: dict[int, list[TokenLogprob | None]] = {}
        """By prompt: the log-probabilities of its tokens, where they were requested and are known."""
        self._async_engine = async_engine
        self._engine = async_engine.engine
        self.exact = self._engine.exact
        self.vocabulary = async_engine.vocabulary
        self._salt = salt
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._inbox: deque[tuple[int, Delta, int]] = deque()
        self._sending_bytes = 0
        self._noted_bytes = 0
        self._told = False
        self._lock = threading.Lock()
        self._noting = threading.Lock()
        self._requests: list[Request] = []
        self._closed = False
        self._failure: ApiError | None = None

    @property
    def requests(self) -> list[Request]:
        """Its engine requests: first one for each prompt, then those of the other choices."""
        return list(self._requests)

    async def submit(self, choices: Iterable[int]) -> None:
        """Raises ApiError."""
        await self._async_engine.run(lambda: self._submit(choices))

    def _submit(self, choices: Iterable[int]) -> None:
        """On the reading thread, since it takes time in proportion to the prompts."""
        engine, request = self._engine, self.request
        for choice in choices:
            prompt, params = request.prompts[choice // request.n], request.params_of(choice)

            with self._lock:
                if self._closed:
                    return
                try:
                    adapter = request.model if request.model in engine.adapter_names else ""
                    self._requests.append(
                        engine.submit(
                            prompt.tokens, params, partial(self._hand_over, choice), salt=self._salt, adapter=adapter
                        )
                    )
                except (RequestError, ConfigError) as error:
                    raise bad(str(error)) from error
                except StowageError as error:
                    logger.error("the engine takes no requests: %s", error, extra={"stowage_event": "refused"})
                    raise internal() from error

    def _hand_over(self, choice: int, delta: Delta) -> None:
        """On the engine's thread."""
        nbytes = bytes_of_piece(delta)
        self._inbox.append((choice, delta, nbytes))
        if not self._note(nbytes):
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._async_engine.relieve)
        if not self._told:
            self._told = True
            try:
                self._loop.call_soon_threadsafe(self._news.set)
            except RuntimeError:  # the loop has ended: nobody listens any more
                logger.debug("a piece came after the server had ended")

    def _note(self, nbytes: int) -> bool:
        """Count `nbytes` more for unsent answers; whether that is within the memory limit."""
        with self._noting:
            if self._closed:
                return True
            self._noted_bytes += nbytes
            return self.reservation.note(nbytes)

    async def pieces(self) -> AsyncIterator[tuple[int, Delta]]:
        """Pieces of all choices as they arrive, until every choice has its completion. Raises ApiError."""
        request, left, ahead = self.request, self.request.choices, set(range(0, self.request.choices, self.request.n))
        while left:
            for choice, delta in (await self._next()).items():
                if delta.completion is not None:
                    left -= 1
                if choice in ahead:
                    ahead.remove(choice)
                    self.scores[choice // request.n] = list(delta.prompt_logprobs)
                    if request.n > 1:
                        await self.submit(range(choice + 1, choice + request.n))
                yield choice, delta

    async def _next(self) -> dict[int, Delta]:
        """What arrived since the last call, merged to one piece per choice. Waits until there is any."""
        await self._news.wait()
        self._news.clear()
        self._told = False  # before the inbox is emptied, so that later pieces set the event again
        if self._failure is not None:
            raise self._failure
        come: dict[int, list[Delta]] = {}
        if self.request.stream:  # the pieces of the last call are sent; a whole answer is kept until its end
            self._note(-self._sending_bytes)
        self._sending_bytes = 0
        while self._inbox:
            choice, delta, nbytes = self._inbox.popleft()
            self._sending_bytes += nbytes
            come.setdefault(choice, []).append(delta)
        merged = {choice: _merged(deltas) for choice, deltas in come.items()}
        for delta in merged.values():
            if isinstance(delta.error, RequestError):  # a grammar that is too much work: only this request's
                raise bad(str(delta.error)) from delta.error
            if delta.error is not None:
                raise internal() from delta.error
            if delta.completion is not None and delta.completion.finish_reason == "cancelled":
                raise stopping()
        return merged

    def fail(self, error: ApiError) -> None:
        """End with `error`: the next wait for a piece raises it."""
        self._failure = error
        self._news.set()

    def close(self) -> None:
        """Cancel the engine requests that have not ended. Closing again does nothing."""
        with self._lock, self._noting:
            if self._closed:
                return
            self._closed = True
            self.reservation.note(-self._noted_bytes)
        self._inbox.clear()
        for request in self._requests:
            self._engine.cancel(request)
        self._async_engine.closed(self, time.monotonic() - self.began_s)


def _merged(deltas: list[Delta]) -> Delta:
    first, last = deltas[0], deltas[-1]
    if first is last:
        return first
    return Delta(
        "".join(delta.text for delta in deltas),
        [token for delta in deltas for token in delta.token_ids],
        last.completion,
        last.error,
        [report for delta in deltas for report in delta.logprobs],
        first.prompt_logprobs,
    )
