"""Between the event loop and the engine's thread: requests go over, pieces of answers come back.

Owns what is open. The engine never waits for the loop, and the loop never for the engine: pieces are put into an inbox
that the loop empties when it comes to it, and pieces that wait there are handed out as one, so a slow client costs no
more memory than its answer. An exchange that is closed before its end cancels what it has in the engine.
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
from typing import Final, TypeVar

from stowage.engine.engine import Delta, Engine, Request
from stowage.engine.sampling import TokenLogprob
from stowage.errors import ConfigError, RequestError, StowageError
from stowage.server.limits import Limits
from stowage.server.openai import Ask, Reader
from stowage.server.refusal import ApiError, bad, busy, internal, stopping
from stowage.server.vocabulary import Vocabulary

T = TypeVar("T")
logger = logging.getLogger("stowage.server")
_RETRY_AFTER_S_MAX: Final = 60
SHORT_BYTES: Final = 1 << 16
"""Bodies up to this are read on a thread of their own, so that they never wait for the long ones of others."""


class Bridge:
    """One engine, for one event loop. All methods are called on the loop's thread."""

    def __init__(self, engine: Engine, name: str, limits: Limits) -> None:
        self.engine = engine
        self.name = name
        self.tokens_max = engine.sequence_tokens_max
        self.reader = Reader(engine, name, limits)
        self.vocabulary = Vocabulary(engine.tokenizer)
        self.max_choices = engine.memory.max_num_seqs + limits.max_queued_requests
        self.choices_open = 0
        self.stopping = False
        self._exchanges: set[Exchange] = set()
        self._seconds = 1.0
        """How long a request takes, as far as the last ones tell."""
        self._reading = ThreadPoolExecutor(1, "stowage-read")
        self._reading_long = ThreadPoolExecutor(1, "stowage-read-long")
        self._looking = ThreadPoolExecutor(1, "stowage-look")

    async def read(self, chat: bool, body: bytes) -> Ask:
        """Understand a body. Until that is done it counts as one choice. Raises ApiError."""
        self.refuse_if_full()
        threads = self._reading if len(body) <= SHORT_BYTES else self._reading_long
        self.choices_open += 1
        try:
            return await self._in(threads, lambda: (self.reader.chat if chat else self.reader.completion)(body))
        finally:
            self.choices_open -= 1

    def look(self, at: Callable[[], T]) -> asyncio.Future[T]:
        """Ask the engine something that waits for its lock, which a step may hold for long."""
        return asyncio.get_running_loop().run_in_executor(self._looking, at)

    def refuse_if_full(self, choices: int = 1) -> None:
        """Raises ApiError while so many more choices cannot be taken in."""
        if self.stopping:
            raise stopping()
        if self.choices_open + choices > self.max_choices:
            what = (
                f"{self.choices_open} of at most {self.max_choices} choices are being served or wait; try again later."
            )
            raise busy(what, min(_RETRY_AFTER_S_MAX, math.ceil(self._seconds)))

    async def open(self, ask: Ask, salt: bytes) -> Exchange:
        """Submit `ask` to the engine. The caller closes the exchange. Raises ApiError."""
        self.refuse_if_full(ask.choices)
        self.choices_open += ask.choices
        exchange = Exchange(self, ask, salt)
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

    def close(self) -> None:
        """Cancel what is still open, and let the threads end."""
        for exchange in list(self._exchanges):
            exchange.close()
        self._reading.shutdown(wait=False, cancel_futures=True)
        self._reading_long.shutdown(wait=False, cancel_futures=True)
        self._looking.shutdown(wait=False, cancel_futures=True)

    def closed(self, exchange: Exchange, seconds: float) -> None:
        """Called by an exchange when it closes."""
        self._exchanges.remove(exchange)
        self.choices_open -= exchange.ask.choices
        self._seconds += 0.1 * (seconds - self._seconds)

    async def run(self, work: Callable[[], T]) -> T:
        """Do what takes too long for the event loop, after what was given earlier."""
        return await self._in(self._reading, work)

    async def _in(self, threads: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(threads, work)


class Exchange:
    """What one HTTP request has in the engine. Of several choices of one prompt the first goes ahead; the others follow
    when its prompt is computed, and reuse it.
    """

    def __init__(self, bridge: Bridge, ask: Ask, salt: bytes) -> None:
        self.ask = ask
        self.began_s = time.monotonic()
        self.scores: dict[int, list[TokenLogprob | None]] = {}
        """By prompt: its tokens' log-probabilities, where they were asked for and are known."""
        self._bridge = bridge
        self._salt = salt
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._inbox: deque[tuple[int, Delta]] = deque()
        self._told = False
        self._lock = threading.Lock()
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
        engine, ask = self._bridge.engine, self.ask
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
        self._inbox.append((choice, delta))
        if not self._told:
            self._told = True
            try:
                self._loop.call_soon_threadsafe(self._news.set)
            except RuntimeError:  # the loop has ended: nobody listens any more
                logger.debug("a piece came after the server had ended")

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
        while self._inbox:
            choice, delta = self._inbox.popleft()
            come.setdefault(choice, []).append(delta)
        merged = {choice: _merged(deltas) for choice, deltas in come.items()}
        for delta in merged.values():
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
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for request in self._requests:
            self._bridge.engine.cancel(request)
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
