"""The embedded engine: prompts in, completions out, on one thread of its own.

Owns the loop and the lives of requests. Everything behind it (scheduler, pools, store) is touched by the loop's thread
only, or under ``_lock`` while the loop rests. A bug ends the engine with every request told; an operating error never
does.

A token's way: ``submit`` → ``Scheduler`` → ``Arrivals`` (device, host, disk) → ``Runner`` → ``Sampler`` → ``Delta``; a
finished chunk's way: ``Residency.settle`` → ``Transfer`` → ``TieredStore`` → tiers.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from stowage.config import Memory, format_size
from stowage.engine import loading
from stowage.engine.arrival import Arrivals
from stowage.engine.assembly import assemble
from stowage.engine.budgets import left, weights_budget
from stowage.engine.completion import eos_ids, is_over, last_piece, namespace_of, piece, progress_of, prompt_tokens
from stowage.engine.detokenizer import Detokenizer
from stowage.engine.pace import Pace
from stowage.engine.peak import prefill_tokens_per_s_most
from stowage.engine.pool import bytes_needed, tokens_fitting
from stowage.engine.questions import Questions
from stowage.engine.request import Completion, Delta, Progress, Request
from stowage.engine.residency import Residency
from stowage.engine.sampler import Sampler, SamplingParams
from stowage.engine.scheduler import Scheduler
from stowage.engine.sequence import BlockTable, Sequence, SequenceKeys
from stowage.engine.spill import Spill
from stowage.engine.step import Work
from stowage.errors import BudgetError, RequestError, StowageError
from stowage.metrics import exposition
from stowage.tiers.protocol import Tier

__all__ = ["Completion", "Delta", "Engine", "Progress", "Prompt", "Request"]

Prompt = str | list[int] | list[dict[str, str]]
logger = logging.getLogger("stowage.engine")
_LOADING_WAIT_S = 0.005
_IDLE_WAIT_S = 0.05
CHECK_EVERY_S = 30.0
"""An engine that has become idle verifies its invariants, at most this often."""
REQUESTS_MAX = 1 << 16
"""Requests that may be open at once: more are refused, because a queue without a limit only hides the trouble."""


class Engine:
    """Runs one model under memory budgets.

    Args:
        model: checkpoint directory, hub id, or a Transformers causal model in memory (then give its ``tokenizer`` for
        text prompts). memory: the budgets; see ``Memory``.
        dtype: ``auto`` (the checkpoint's own), ``float32``, ``bfloat16`` or ``float16``.
        salt: prompts of engines with different salts never share cached state; nor do requests with different ``salt``.
        tiers: further places for cached state, below those of ``memory``, fastest first; closed with the engine.

    Raises ``ModelError``, ``ConfigError`` (``BudgetError``) or ``StorageError`` when it cannot be built.
    """

    def __init__(
        self,
        model: str | Path | Any,
        memory: Memory | None = None,
        *,
        dtype: str = "auto",
        tokenizer: Any = None,
        salt: str = "",
        tiers: Iterable[Tier] = (),
    ) -> None:
        self.memory = memory or Memory()
        self._clock = time.monotonic
        budget = partial(weights_budget, self.memory) if self.memory.places_weights else None
        loaded = loading.load(model, dtype, tokenizer, budget)
        self.weights, self._owns_weights = loaded.weights, loaded.owns_weights
        try:
            self.memory = left(self.memory, self.weights)
            parts = assemble(loaded, self.memory, salt, self._clock, tuple(tiers))
        except BaseException:
            self._close_weights()
            raise
        self.model, self.tokenizer, self.name = loaded.model, loaded.tokenizer, loaded.name
        self.store, self.parts = parts.store, parts
        self._eos = eos_ids(loaded.model)
        self.sequence_tokens_max = tokens_fitting(parts.pools, self.memory.step_tokens_max, parts.layout.context_tokens)
        """Tokens that one sequence may come to, without the last one drawn: the context, or what the device holds."""
        below = parts.store is not None and bool(parts.store.tiers)
        most = prefill_tokens_per_s_most(loaded.model) if below else 0.0
        self._pace = Pace(self.memory.load_timeout_s, self.memory.step_tokens_max, most)
        self._residency = Residency(
            parts.layout, parts.pools, parts.strategies, parts.store, parts.transfer, parts.snapshot_tokens
        )
        questions = Questions(self.store, self._pace, self._clock, self.memory.probe_timeout_s)
        arrivals = Arrivals(
            self._residency,
            parts.geometry.boundary_tokens,
            self.memory.step_tokens_max,
            self._pace,
            questions,
            self._clock,
        )
        spill = Spill(self._residency, parts.namespace, secrets.token_bytes(16), self._clock)
        self._scheduler = Scheduler(
            self._residency, arrivals, spill, self.memory.step_tokens_max, self.memory.sequences_max
        )
        self._ids = itertools.count()
        self._alive: dict[int, tuple[Request, Sequence]] = {}
        self._inbox: list[tuple[Request, Sequence]] = []
        self._lock = threading.RLock()
        self._news = threading.Condition()
        self._closing = False
        self._checked_s = self._clock()
        self._broken: BaseException | None = None
        self._thread = threading.Thread(target=self._loop, name="stowage-engine", daemon=True)
        self._thread.start()

    # asking

    def generate(
        self, prompts: list[Prompt] | str, params: SamplingParams | None = None, *, salt: str | bytes = ""
    ) -> list[Completion]:
        """Complete all ``prompts`` (one text counts as one prompt) together and return their completions in order.

        Raises the first request's error, if one failed; the others are cancelled.
        """
        listed: list[Prompt] = [prompts] if isinstance(prompts, str) else prompts
        requests: list[Request] = []
        try:
            requests += (self.submit(prompt, params, salt=salt) for prompt in listed)
            for request in requests:
                while not request.wait(0.5):
                    pass
            return [request.result() for request in requests]
        finally:
            for request in requests:
                self.cancel(request)

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, salt: str | bytes = ""
    ) -> AsyncIterator[Delta]:
        """Pieces of a completion as they come; the last one has ``completion``. Leaving the loop cancels the
        request.
        """
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[Delta] = asyncio.Queue()

        def hand_over(delta: Delta) -> None:
            loop.call_soon_threadsafe(pieces.put_nowait, delta)

        request = self.submit(prompt, params, hand_over, salt=salt)
        try:
            delta = Delta("", [])
            while delta.completion is None:
                delta = await pieces.get()
                if delta.error is not None:
                    raise delta.error
                yield delta
        finally:
            self.cancel(request)

    def iterate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, salt: str | bytes = ""
    ) -> Iterator[Delta]:
        """``stream`` for code without an event loop."""
        pieces: queue.SimpleQueue[Delta] = queue.SimpleQueue()
        request = self.submit(prompt, params, pieces.put, salt=salt)
        try:
            delta = Delta("", [])
            while delta.completion is None:
                delta = pieces.get()
                if delta.error is not None:
                    raise delta.error
                yield delta
        finally:
            self.cancel(request)

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        on_delta: Callable[[Delta], None] | None = None,
        *,
        salt: str | bytes = "",
    ) -> Request:
        """Queue one prompt and return its handle at once. ``salt`` names the tenant: only its own requests share state.

        Raises ``RequestError`` for a prompt that cannot be served and ``BudgetError`` for one that the device budget
        cannot hold.
        """
        sequence = self._new_sequence(prompt, params or SamplingParams(), salt)
        request = Request(sequence.id, on_delta, partial(progress_of, sequence, self._clock))
        with self._news:
            if self._broken is not None:
                raise StowageError(f"the engine has stopped: {self._broken}") from self._broken
            if self._closing:
                raise StowageError("the engine is closed.")
            if len(self._inbox) + len(self._alive) >= REQUESTS_MAX:
                raise RequestError(f"{REQUESTS_MAX} requests are open already; wait for some to end.")
            self._inbox.append((request, sequence))
            self._news.notify()
        return request

    def cancel(self, request: Request) -> None:
        """End ``request`` as soon as the running step is done; its completion has what was generated. No effect on an
        ended one.
        """
        with self._news:
            request.cancelled = True
            self._news.notify()

    def _new_sequence(self, prompt: Prompt, params: SamplingParams, salt: str | bytes) -> Sequence:
        tokens = prompt_tokens(prompt, self.tokenizer, self.parts.layout)
        room = self.parts.layout.context_tokens - len(tokens) + 1
        sequence = Sequence(
            id=next(self._ids),
            tokens=tokens,
            params=params,
            keys=SequenceKeys(namespace_of(self.parts.namespace, salt), self.parts.layout.groups),
            tables=[BlockTable() for _ in self.parts.pools],
            sampler=Sampler(params),
            text=Detokenizer(self.tokenizer, tokens, params.stop),
            prompt_tokens=len(tokens),
            new_tokens_max=min(params.max_new_tokens, room),
        )
        if params.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and this model has none; use stop_token_ids.")
        sequence.times.arrived_s = self._clock()
        self._refuse_too_long(sequence)
        sequence.restart()
        return sequence

    def _refuse_too_long(self, sequence: Sequence) -> None:
        length = sequence.length_max
        if length <= self.sequence_tokens_max:
            return
        need = bytes_needed(self.parts.layout.blocks, length, self.memory.step_tokens_max)
        raise BudgetError(
            f"a sequence of {length} tokens ({sequence.prompt_tokens} of the prompt, up to {sequence.new_tokens_max} "
            f"new) does not fit into the device KV budget of {format_size(self.memory.device_kv_bytes)}. "
            f"It needs {need:,} bytes: --device-kv {-(-need // 1024)}KiB."
        )

    # looking and tending

    @property
    def alive(self) -> bool:
        """Whether it takes requests: it is neither closed nor stopped by a bug."""
        return self._broken is None and not self._closing

    def stats(self) -> dict[str, Any]:
        """What the engine holds and did: ``engine`` counters, ``pools`` by group, ``store`` counters (``None`` without
        host memory).
        """
        with self._lock:
            counters = self._residency.counters
            return {
                "engine": {name: getattr(counters, name) for name in counters.__slots__},
                "pools": [pool.stats() for pool in self.parts.pools],
                "store": self.store.stats() if self.store is not None else None,
                "prefill_tokens_per_s": self._pace.prefill_tokens_per_s,
                "weights": self.weights.stats() if self.weights is not None else None,
            }

    def metrics(self) -> str:
        """``stats`` in the text format that Prometheus reads; docs/metrics.md lists what is in it."""
        return exposition(self.stats())

    def drop_device_cache(self) -> int:
        """Forget every prefix that is cached on the device; return the blocks that became free."""
        with self._lock:
            return sum(pool.drop_cache() for pool in self.parts.pools)

    def drop_host(self) -> int:
        """Evict every chunk from host memory that nobody uses; return how many. Lower tiers keep theirs."""
        with self._lock:
            return self.store.drop_host() if self.store is not None else 0

    def forget_pace(self) -> None:
        """Forget how fast this engine computed and loaded: the next prefixes are loaded even where computing is
        quicker.
        """
        with self._lock:
            self._pace.forget()

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Wait until everything stored has reached the lower tiers, at most ``timeout_s``; whether it has."""
        with self._lock:
            return self.store.flush(timeout_s) if self.store is not None else True

    def check(self) -> None:
        """Assert the invariants of every stateful part."""
        with self._lock:
            self._scheduler.check()
            if self.store is not None:
                self.store.check()

    def close(self, timeout_s: float = 30.0) -> None:
        """Cancel what runs, let spills finish within ``timeout_s``, give all memory back. Closing again does
        nothing.
        """
        with self._news:
            if self._closing:
                return
            self._closing = True
            self._news.notify()
        until_s = self._clock() + timeout_s
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.warning(
                "a step outlasted the %.0f s given to close; its memory is given back when the process ends", timeout_s
            )
            return
        self.parts.runner.close()
        self._close_weights()
        if self.store is not None:
            if self.parts.transfer is not None:
                self.parts.transfer.close()
            self.store.close(max(0.0, until_s - self._clock()))

    def _close_weights(self) -> None:
        if self.weights is not None and self._owns_weights:
            self.weights.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # the loop

    def _loop(self) -> None:
        try:
            while self._rest():
                with self._lock:
                    self._accept()
                    self._end_cancelled()
                    self._step()
        except Exception as error:  # the thread's outermost frame: a bug; every request is told, nothing hangs
            logger.exception("the engine stopped", extra={"stowage_event": "fault"})
            self._broken = error
        with self._lock, self._news:
            self._accept()
            for request, sequence in list(self._alive.values()):
                self._end_with_loop(request, sequence)

    def _end_with_loop(self, request: Request, sequence: Sequence) -> None:
        if self._broken is not None:
            error = StowageError(f"the engine stopped: {self._broken!r}")
            error.__cause__ = self._broken
            request.deliver(Delta("", [], error=error))
            return
        self._finish(request, sequence, "cancelled")

    def _rest(self) -> bool:
        """Poll the store, and wait until there is something to do; False when closing."""
        while True:
            with self._lock:
                spilling = self.store is not None and not self.store.flush(0.0)
                self._check_if_idle()
            with self._news:
                if self._closing:
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
            self._alive[sequence.id] = (request, sequence)
            self._scheduler.add(sequence)

    def _end_cancelled(self) -> None:
        for request, sequence in [pair for pair in self._alive.values() if pair[0].cancelled]:
            self._finish(request, sequence, "cancelled")

    def _step(self) -> None:
        work = self._scheduler.schedule()
        if not work:
            if self.store is not None and self._scheduler.loading:
                self.store.wait(_LOADING_WAIT_S)
            return
        began_s = self._clock()
        try:
            outputs = self.parts.runner.run(work)
        except StowageError as error:  # weights that could not be delivered: the next step may have them
            self._fail(work, error)
            return
        elapsed_s = self._clock() - began_s
        tokens = sum(w.count for w in work)
        counters = self._residency.counters
        counters.tokens_computed += tokens
        counters.prompt_tokens_computed += sum(w.prompt_tokens for w in work)
        if tokens > 2 * len(work) or len(work) == 1:  # many single tokens say nothing about a prompt of that length
            self._pace.computed(tokens, elapsed_s)
        for item, logits in zip(work, outputs, strict=True):
            self._advance(item, logits)

    def _fail(self, work: list[Work], error: StowageError) -> None:
        logger.warning("a step failed: %s", error, extra={"stowage_event": "step-failed"})
        for item in work:
            request, sequence = self._alive.pop(item.sequence.id)
            self._scheduler.finish(sequence)
            request.deliver(Delta("", [], error=error))

    def _advance(self, work: Work, logits: Any) -> None:
        sequence = work.sequence
        sequence.computed += work.count
        self._residency.settle(sequence)
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
        request = self._alive[sequence.id][0]
        reason = is_over(sequence, token, self._eos)
        if reason:
            self._finish(request, sequence, reason, text)
        elif request.on_delta is not None:
            request.deliver(piece(sequence, text))

    def _finish(self, request: Request, sequence: Sequence, reason: str, text: str = "") -> None:
        del self._alive[sequence.id]
        self._scheduler.finish(sequence)
        sequence.times.finished_s = self._clock()
        text += sequence.text.finish()
        request.deliver(last_piece(sequence, text, reason))
