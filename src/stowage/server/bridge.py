"""Between the event loop and the engine's thread: requests go over, pieces of answers come back.

Owns what is open, and who reads what when. The engine never waits for the loop, and the loop never for the engine:
pieces are put into an inbox that the loop empties when it comes to it, and pieces that wait there are handed out as
one, so a slow client costs no more memory than its answer; that counts (`server.memory`). An exchange that is closed
before its end cancels what it has in the engine.
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
from typing import Any, Final, TypeVar

from stowage.engine.engine import Delta, Engine, Request
from stowage.engine.prompts import Begin
from stowage.engine.sampling import TokenLogprob
from stowage.errors import ConfigError, RequestError, StowageError
from stowage.server.apis.ask import Ask
from stowage.server.apis.reader import Reader
from stowage.server.engines import Engines
from stowage.server.limits import Limits
from stowage.server.memory import RequestMemory, Reservation, bytes_of_piece
from stowage.server.refusal import ApiError, bad, busy, internal, reopening, stopping
from stowage.server.served import Served
from stowage.server.turns import Job, Turns
from stowage.server.vocabulary import Vocabulary

T = TypeVar("T")
Read = Callable[[Reader, bytes | bytearray, Begin], T]
"""Understands the body of a request."""
logger = logging.getLogger("stowage.server")
_RETRY_AFTER_S_MAX: Final = 60
SHORT_BYTES: Final = 1 << 16
"""Bodies up to this are read on a thread of their own, so that they never wait for the long ones of others."""


class Bridge:
    """One engine at a time, for one event loop. All methods are called on the loop's thread."""

    def __init__(self, engines: Engines, served: Served, limits: Limits) -> None:
        self.engines = engines
        self.served, self.name = served, served.name
        self._limits = limits
        self._adopt(self.engine)
        self._stats: dict[str, Any] = {}
        self.max_num_seqs = self.engine.memory.max_num_seqs
        self.max_choices = self.max_num_seqs + limits.max_queued_requests
        self.choices_open = 0
        self.stopping = self._renewing = False
        self._exchanges: set[Exchange] = set()
        self._seconds = 1.0
        """How long a request takes, as far as the last ones tell."""
        self.memory = RequestMemory(limits.request_bytes_max)
        self._reading = Turns("stowage-read")
        self._reading_long = Turns("stowage-read-long", limits.reading_timeout_s)
        self._submitting = ThreadPoolExecutor(1, "stowage-submit")
        self._looking = ThreadPoolExecutor(1, "stowage-look")

    @property
    def engine(self) -> Engine:
        """Raises ApiError while there is none."""
        if self.engines.engine is None:
            raise reopening()
        return self.engines.engine

    @property
    def status(self) -> str:
        """`ok` while requests are taken in; `stopping`, `reopening`, or `failed`."""
        if self.stopping:
            return "stopping"
        if self._renewing:
            return "reopening"
        return "ok" if self.engines.engine is not None and self.engines.engine.alive else "failed"

    def stats(self) -> dict[str, Any]:
        """The engine's; while there is none, what they were. Waits for its lock."""
        engine = self.engines.engine
        if engine is not None:
            self._stats = engine.stats()
        return self._stats

    async def renew(self) -> None:
        """The engine has failed, and everybody who waited for it was told: open another one. Requests are refused
        meanwhile. Raises what opening it raises.
        """
        self._renewing = True
        try:
            self.end_all(reopening())
            for exchange in list(self._exchanges):
                exchange.close()
            await asyncio.get_running_loop().run_in_executor(None, self._renew)
        finally:
            self._renewing = False

    def _renew(self) -> None:
        self.stats()
        del self.reader, self.vocabulary  # which know the old one
        self.engines.renew()
        self._adopt(self.engine)

    def _adopt(self, engine: Engine) -> None:
        self.tokens_max = engine.sequence_tokens_max
        self.reader = Reader(engine, self.served, self._limits)
        self.vocabulary = Vocabulary(engine.tokenizer)

    async def read(self, read: Read[T], body: bytes | bytearray, hold: Reservation) -> T:
        """Understand a body with one of the APIs' functions, when it is the turn of its client. Until that is done it
        counts as one choice. Raises ApiError.
        """
        self.refuse_if_full()
        turns = self._reading if len(body) <= SHORT_BYTES else self._reading_long
        reader = self.reader

        def work(job: Job) -> T:
            return read(reader, body, hold.tokenizing(job.check))

        self.choices_open += 1
        try:
            return await turns.run(hold.client, work)
        finally:
            self.choices_open -= 1

    def look(self, at: Callable[[], T]) -> asyncio.Future[T]:
        """Ask the engine something that waits for its lock, which a step may hold for long."""
        return asyncio.get_running_loop().run_in_executor(self._looking, at)

    def refuse_if_full(self, choices: int = 1) -> None:
        """Raises ApiError while so many more choices cannot be taken in."""
        if self.stopping:
            raise stopping()
        if self._renewing:
            raise reopening()
        if self.choices_open + choices > self.max_choices:
            what = (
                f"{self.choices_open} of at most {self.max_choices} choices are being served or wait; try again later."
            )
            raise busy(what, min(_RETRY_AFTER_S_MAX, math.ceil(self._seconds)))

    async def open(self, ask: Ask, salt: bytes, hold: Reservation) -> Exchange:
        """Submit `ask` to the engine. The caller closes the exchange. Raises ApiError."""
        self.refuse_if_full(ask.choices)
        self.choices_open += ask.choices
        exchange = Exchange(self, ask, salt, hold)
        self._exchanges.add(exchange)
        try:
            await exchange.submit(range(0, ask.choices, ask.n))
        except BaseException:
            exchange.close()
            raise
        return exchange

    def end_all(self, error: ApiError) -> None:
        """End every exchange with `error`."""
        for exchange in list(self._exchanges):
            exchange.fail(error)

    def relieve(self) -> None:
        """Answers that nobody takes hold more than there is memory for: the request that holds most ends."""
        most = max(self._exchanges, key=lambda exchange: exchange.hold.bytes, default=None)
        if most is not None and self.memory.held_bytes > self.memory.limit_bytes:
            most.fail(busy("The answer waits for its client, and takes more memory than the server has for that.", 5))
            most.close()

    def close(self) -> None:
        """Cancel what is still open, and let the threads end."""
        for exchange in list(self._exchanges):
            exchange.close()
        self._reading.close()
        self._reading_long.close()
        self._submitting.shutdown(wait=False, cancel_futures=True)
        self._looking.shutdown(wait=False, cancel_futures=True)

    def closed(self, exchange: Exchange, seconds: float) -> None:
        """Called by an exchange when it closes."""
        self._exchanges.remove(exchange)
        self.choices_open -= exchange.ask.choices
        self._seconds += 0.1 * (seconds - self._seconds)

    async def run(self, work: Callable[[], T]) -> T:
        """Do what takes too long for the event loop, after what was given earlier."""
        return await asyncio.get_running_loop().run_in_executor(self._submitting, work)


class Exchange:
    """What one HTTP request has in the engine. Of several choices of one prompt the first goes ahead; the others follow
    when its prompt is computed, and reuse it.
    """

    def __init__(self, bridge: Bridge, ask: Ask, salt: bytes, hold: Reservation) -> None:
        self.ask = ask
        self.hold = hold
        self.began_s = time.monotonic()
        self.scores: dict[int, list[TokenLogprob | None]] = {}
        """By prompt: its tokens' log-probabilities, where they were asked for and are known."""
        self._bridge = bridge
        self._engine = bridge.engine
        self.exact = self._engine.exact
        self.vocabulary = bridge.vocabulary
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
        """What it has in the engine: first one request for each prompt, then those that follow them."""
        return list(self._requests)

    async def submit(self, choices: Iterable[int]) -> None:
        """Raises ApiError."""
        await self._bridge.run(lambda: self._submit(choices))

    def _submit(self, choices: Iterable[int]) -> None:
        """On the reading thread, since it takes time in proportion to the prompts."""
        engine, ask = self._engine, self.ask
        for choice in choices:
            prompt, params = ask.prompts[choice // ask.n], ask.params_of(choice)

            def hand_over(delta: Delta, choice: int = choice) -> None:
                self._hand_over(choice, delta)

            with self._lock:
                if self._closed:
                    return
                try:
                    adapter = ask.model if ask.model in engine.adapter_names else ""
                    self._requests.append(
                        engine.submit(prompt.tokens, params, hand_over, salt=self._salt, adapter=adapter)
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
                self._loop.call_soon_threadsafe(self._bridge.relieve)
        if not self._told:
            self._told = True
            try:
                self._loop.call_soon_threadsafe(self._news.set)
            except RuntimeError:  # the loop has ended: nobody listens any more
                logger.debug("a piece came after the server had ended")

    def _note(self, nbytes: int) -> bool:
        """What its answers hold has grown. Whether there is memory for that."""
        with self._noting:
            if self._closed:
                return True
            self._noted_bytes += nbytes
            return self.hold.note(nbytes)

    async def pieces(self) -> AsyncIterator[tuple[int, Delta]]:
        """Pieces of all choices as they come, until every choice has its completion. Raises ApiError."""
        ask, left, ahead = self.ask, self.ask.choices, set(range(0, self.ask.choices, self.ask.n))
        while left:
            for choice, delta in (await self._next()).items():
                if delta.completion is not None:
                    left -= 1
                if choice in ahead:
                    ahead.remove(choice)
                    self.scores[choice // ask.n] = list(delta.prompt_logprobs)
                    if ask.n > 1:
                        await self.submit(range(choice + 1, choice + ask.n))
                yield choice, delta

    async def _next(self) -> dict[int, Delta]:
        """What has come since the last call, one piece for each choice that has any; waits for some."""
        await self._news.wait()
        self._news.clear()
        self._told = False  # before the inbox is emptied: what comes from now on is told anew
        if self._failure is not None:
            raise self._failure
        come: dict[int, list[Delta]] = {}
        if self.ask.stream:  # what came before is sent; a whole answer is kept until its end
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
        """End with `error`, at the next piece that is waited for."""
        self._failure = error
        self._news.set()

    def close(self) -> None:
        """Cancel what has not ended. Closing again does nothing."""
        with self._lock, self._noting:
            if self._closed:
                return
            self._closed = True
            self.hold.note(-self._noted_bytes)
        self._inbox.clear()
        for request in self._requests:
            self._engine.cancel(request)
        self._bridge.closed(self, time.monotonic() - self.began_s)


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
