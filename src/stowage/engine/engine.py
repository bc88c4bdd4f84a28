"""The embedded engine: prompts in, completions out, on one thread of its own.

Owns the model, its memory and the thread, from opening to closing; the loop of that thread is in ``loop``.

    a token:           submit → Scheduler → Admissions (device, host, disk) → Runner → Sampler → Delta
    a complete chunk:  KVManager.cache_blocks → BlockTransfer → TieredStore → tiers
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from stowage.cache.cost_model import CostModel
from stowage.config.memory import Memory
from stowage.core.key import SequenceKeys
from stowage.engine.adapters import install, memory_without_adapters, namespace_for_adapter, select_adapter
from stowage.engine.argument_checks import check_engine, check_request, prompt_list
from stowage.engine.assembly import Parts, assemble
from stowage.engine.completion import namespace_of, progress_of
from stowage.engine.detokenizer import detokenizer
from stowage.engine.grammar import Grammars
from stowage.engine.locks import held
from stowage.engine.loop import Loop
from stowage.engine.memory_budget import kv_budget, weights_budget
from stowage.engine.prompts import Prompts
from stowage.engine.request import Completion, Delta, Request
from stowage.engine.sampling import Sampler
from stowage.engine.sampling_params import SamplingParams
from stowage.engine.scheduler_assembly import assemble_scheduler
from stowage.engine.sequence import Sequence
from stowage.engine.shutdown import Shutdown
from stowage.engine.too_long import too_long
from stowage.errors import RequestError
from stowage.executor.block_table import BlockTable
from stowage.executor.determinism.pieces import exactness_of, no_kernels_reason, no_offload_reason, slow_path_reason
from stowage.executor.device import carrier, device_of
from stowage.executor.int8_activations import int8_note
from stowage.executor.peak_compute import prefill_tokens_per_s_most
from stowage.metrics import exposition
from stowage.models import loading
from stowage.models.adapters import read_all
from stowage.models.loading import eos_ids
from stowage.storage.protocol import Tier

Prompt = str | list[int] | list[dict[str, str]]
_FLUSH_TURN_S, _FLUSH_PAUSE_S = 0.005, 0.0005


class Engine:
    """Runs one model under memory budgets.

    Args:
        model: checkpoint directory, hub id, or a Transformers causal model in memory (then give its ``tokenizer`` for
            text prompts).
        memory: the budgets; see ``Memory``.
        dtype: ``auto`` (the checkpoint's own; on a CPU ``float32`` for a quantised one in ``float16``, which has no
            kernels there), ``float32``, ``bfloat16`` or ``float16``.
        device: what it computes on: ``cpu``, ``cuda``, ``cuda:1``; empty: where a model in memory lies, else ``cpu``
            (``docs/internals.md#cuda``).
        deterministic: do not open where answers cannot be exact, which is the same to the bit however a prompt's state
            arrived and whatever is computed beside it (``docs/internals.md#exact-answers``).
        batch_dependent: answers need not be exact where they can.
        int8_activations: round what weights in integer formats are multiplied with to 8 bits, and what attention weighs
            values with to bfloat16, which is quicker; answers are not those of the published weights then
            (``docs/weights.md#activations-in-8-bits``).
        cuda_graphs: decode steps are recorded and replayed (``docs/internals.md#cuda``); None: where that is possible.
        salt: prompts of engines with different salts never share cached state; nor do requests with different ``salt``.
        adapter: a LoRA adapter's directory, as PEFT saves it, which is added to every answer; or several by name
            (``{"name": DIR}``), of which each request says which (``docs/weights.md#adapters``).
        tiers: further tiers, below those of ``memory``, fastest first; closed with the engine.

    It computes on a thread of its own: a script is quicker with ``GOMP_SPINCOUNT=1000`` in its environment
    (``docs/internals.md#threads``).

    Raises ``ModelError``, ``ConfigError`` (``BudgetError``) or ``StorageError`` when it cannot be built.
    """

    def __init__(
        self,
        model: str | Path | Any,
        memory: Memory | None = None,
        *,
        dtype: str = "auto",
        tokenizer: Any = None,
        device: str = "",
        deterministic: bool = False,
        batch_dependent: bool = False,
        int8_activations: bool = False,
        cuda_graphs: bool | None = None,
        salt: str = "",
        adapter: str | Path | Mapping[str, str | Path] = "",
        tiers: Iterable[Tier] = (),
    ) -> None:
        given = {"dtype": dtype, "tokenizer": tokenizer, "device": device, "cuda_graphs": cuda_graphs, "salt": salt}
        given |= {"deterministic": deterministic, "batch_dependent": batch_dependent, "tiers": tiers}
        given |= {"int8_activations": int8_activations}
        own, files = check_engine(model, memory, given), read_all(adapter)
        self.memory = memory_without_adapters(files, memory or Memory())
        self._clock = time.monotonic
        here = device_of(model, device)
        exactness = exactness_of(deterministic, batch_dependent)
        budget = partial(weights_budget, self.memory, carrier(here), adapters_bytes=sum(file.nbytes for file in files))
        loaded = loading.load(model, dtype, tokenizer, budget if self.memory.places_weights else None, device=here)
        self.weights, self._owns_weights = loaded.weights, loaded.owns_weights
        try:
            self.memory = kv_budget(self.memory, self.weights, loaded.model.config)
            asked = loaded, self.memory, salt, self._clock, own, exactness
            parts = assemble(*asked, cuda_graphs=cuda_graphs, int8=int8_activations)
            self._adapters = install(loaded, files, parts)
        except BaseException:
            if self.weights is not None and self._owns_weights:
                self.weights.close()
            raise
        self.adapter_names: tuple[str, ...] = self._adapters.names if self._adapters is not None else ()
        self.int8_note = int8_note(loaded.model) if int8_activations else ""
        """What 8-bit activations mean for this model; empty: they are off."""
        self._adapter = self.adapter_names[0] if files and not isinstance(adapter, Mapping) else ""
        self.model, self.tokenizer, self.name = loaded.model, loaded.tokenizer, loaded.name
        below = parts.store is not None and bool(parts.store.tiers)
        most = prefill_tokens_per_s_most(loaded.model) if below else 0.0
        cost_model = CostModel(self.memory.load_timeout_s, self.memory.max_num_batched_tokens, most)
        self._begin(parts, cost_model, eos_ids(loaded.model) | loaded.placeholders)

    def _begin(self, parts: Parts, cost_model: CostModel, eos: frozenset[int], threads: Any = threading) -> None:
        """Build the scheduler over ``parts`` and start the loop. ``threads``: see ``Loop``."""
        self.store, self.parts, self.prompts = parts.store, parts, Prompts(self.tokenizer, parts.layout)
        self.sequence_tokens_max = parts.capacity.longest({pool.group.index: pool.blocks for pool in parts.pools})
        """The longest sequence in tokens, without the last sampled: the context, or what device and host hold."""
        self._cost_model, self._eos = cost_model, eos
        self.grammars = Grammars(self.tokenizer, parts.layout.vocab, eos)
        self._kv_manager, self._scheduler = assemble_scheduler(parts, self.memory, cost_model, self._clock)
        self._ids = itertools.count()
        scheduler, kv_manager = self._scheduler, self._kv_manager
        self._loop = Loop(parts.runner, scheduler, kv_manager, self.store, cost_model, eos, self._clock, threads)
        self._lock = self._loop.lock
        weights = self.weights if self._owns_weights else None
        self._shutdown = Shutdown(self._loop, parts, kv_manager.async_copies, self._adapters, weights, self._clock)
        if threads is threading:
            weakref.finalize(self, self._shutdown.dropped).atexit = False

    # asking

    def generate(
        self,
        prompts: list[Prompt] | str,
        params: SamplingParams | None = None,
        *,
        salt: str | bytes = "",
        adapter: str | None = None,
    ) -> list[Completion]:
        """Complete all ``prompts`` (one text counts as one prompt) together and return their completions in order.

        Raises the first request's error, if one failed; the others are cancelled.
        """
        requests: list[Request] = []
        self._refuse_own_thread()
        try:
            requests += (self.submit(prompt, params, salt=salt, adapter=adapter) for prompt in prompt_list(prompts))
            for request in requests:
                while not request.wait(0.5):
                    pass
            return [request.result() for request in requests]
        finally:
            for request in requests:
                self.cancel(request)

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        salt: str | bytes = "",
        adapter: str | None = None,
    ) -> AsyncIterator[Delta]:
        """Pieces of a completion; the last one has ``completion``. Leaving the loop cancels the request."""
        self._refuse_own_thread()
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[Delta] = asyncio.Queue()

        def hand_over(delta: Delta) -> None:
            try:
                loop.call_soon_threadsafe(pieces.put_nowait, delta)
            except RuntimeError:  # the event loop was closed
                self.cancel(request)

        request = self.submit(prompt, params, hand_over, salt=salt, adapter=adapter)
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
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        salt: str | bytes = "",
        adapter: str | None = None,
    ) -> Iterator[Delta]:
        """``stream`` for code without an event loop."""
        self._refuse_own_thread()
        pieces: queue.SimpleQueue[Delta] = queue.SimpleQueue()
        request = self.submit(prompt, params, pieces.put, salt=salt, adapter=adapter)
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
        adapter: str | None = None,
    ) -> Request:
        """Queue one prompt and return its handle at once. ``salt`` names the tenant: only its own requests share state.
        ``adapter``: the name of one of the engine's; empty: the model without one; None: the one that it was given.

        Raises ``RequestError`` for a prompt that cannot be served and ``BudgetError`` for one that the device budget
        cannot hold.
        """
        check_request(params, on_delta)
        sequence = self._new_sequence(prompt, params or SamplingParams(), salt, adapter)
        request = Request(sequence.id, on_delta, lambda: progress_of(sequence, self._clock))  # keeps the engine open
        self._loop.submit(request, sequence)
        return request

    def cancel(self, request: Request) -> None:
        """End ``request`` after the running step; its completion has what was generated. Once ended: no effect."""
        self._loop.cancel(request)

    def _refuse_own_thread(self) -> None:
        if threading.current_thread() is self._loop.thread:
            raise RequestError(
                "on_delta may call submit and cancel, but not wait for its engine: it is called on that thread."
            )

    def _new_sequence(
        self, prompt: Prompt, params: SamplingParams, salt: str | bytes, adapter_name: str | None
    ) -> Sequence:
        adapter = select_adapter(self._adapters, self._adapter if adapter_name is None else adapter_name)
        hooks = self.parts.runner.hooks.seen()
        space = namespace_for_adapter(hooks.apart(self.parts.namespace), adapter)
        tokens = self.prompts.read(prompt)
        grammar = None if (wanted := params.structured_outputs) is None else self.grammars.begin(wanted)
        sequence = Sequence(
            id=next(self._ids),
            tokens=tokens,
            params=params,
            keys=SequenceKeys(namespace_of(space, salt), self.parts.layout.groups),
            adapter=adapter,
            tables=[BlockTable() for _ in self.parts.pools],
            sampler=Sampler(params, tokens, self._eos, grammar),
            text=detokenizer(self.tokenizer, tokens, params, self._eos),
            prompt_tokens=len(tokens),
            own_from=sys.maxsize if self.parts.pieces.whole else len(tokens),
            new_tokens_max=min(params.max_new_tokens, self.parts.layout.context_tokens - len(tokens) + 1),
            exact=self.exact,
            hooks=hooks,
        )
        if any(token >= self.parts.layout.vocab for token, _ in params.biases):
            raise RequestError(f"logit_bias has a token outside the model's vocabulary of {self.parts.layout.vocab}.")
        if params.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and this model has none; use stop_token_ids.")
        sequence.times.arrived_s = self._clock()
        if sequence.length_max > self.sequence_tokens_max:
            raise too_long(sequence, self.parts, self.memory, no_offload_reason(self.model))
        sequence.restart()
        return sequence

    # looking and tending

    @property
    def alive(self) -> bool:
        """Whether it takes requests: it is neither closed nor stopped by a bug."""
        return self._loop.alive

    @property
    def failed(self) -> bool:
        """Whether a bug has stopped it, or a file of its weights was written to: only a new one will compute."""
        return self._loop.failed

    @property
    def executor(self) -> str:
        """``paged``, or ``fallback``: one sequence at a time, with Transformers' own attention."""
        return "fallback" if self.parts.layout.alone else "paged"

    @property
    def exact(self) -> bool:
        """Whether answers do not depend, to the bit, on tiers and hits or on what is computed beside them."""
        return not self.parts.inexact_because

    @property
    def exactness_note(self) -> str:
        """Why answers are not exact, or cost more than they could; empty: neither."""
        return self.parts.inexact_because or no_kernels_reason(self.model) or slow_path_reason(self.model)

    @property
    def tokens_computed(self) -> int:
        """By all steps that have ended: the running one is not waited for."""
        return self._kv_manager.counters.tokens_computed

    def stats(self, timeout_s: float | None = None) -> dict[str, Any]:
        """What it holds and did. ``store`` is None without host memory, ``graphs`` where no steps are recorded. Raises
        TimeoutError where a step goes on for ``timeout_s``; without it the step is waited for.
        """
        with held(self._lock, timeout_s):
            counters = self._kv_manager.counters
            return {
                "executor": self.executor,
                "exact": self.exact,
                "engine": {name: getattr(counters, name) for name in counters.__slots__},
                "pools": [pool.stats() for pool in self.parts.pools],
                "store": self.store.stats() if self.store is not None else None,
                "prefill_tokens_per_s": self._cost_model.prefill_tokens_per_s,
                "weights": self.weights.stats() if self.weights is not None else None,
                "graphs": self.parts.graphs.stats() if self.parts.graphs is not None else None,
            }

    def metrics(self) -> str:
        """``stats`` in the text format that Prometheus reads; docs/reference/metrics.md lists what is in it."""
        return exposition(self.stats())

    def drop_device_cache(self) -> int:
        """Forget every prefix that is cached on the device; return the blocks that became free."""
        with self._lock:
            return sum(pool.drop_cache() for pool in self.parts.pools)

    def drop_host(self) -> int:
        """Evict every chunk from host memory that nobody uses; return how many. Lower tiers keep theirs."""
        with self._lock:
            return self.store.drop_host() if self.store is not None else 0

    def forget_costs(self, for_good: bool = False) -> None:
        """Forget how fast this engine computed and loaded: the next prefixes are loaded, be it quicker or not.
        ``for_good``: and do not measure it again, so that all later ones are.
        """
        with self._lock:
            self._cost_model.forget(for_good)

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Wait, at most ``timeout_s``, until all is stored in the lower tiers; whether it is. Requests go on."""
        if self.store is None:
            return True
        until_s = self._clock() + timeout_s
        while True:
            left_s = until_s - self._clock()
            with self._lock:
                self._kv_manager.async_copies.collect(wait=True)
                if self.store.flush(max(0.0, min(left_s, _FLUSH_TURN_S))):
                    return True
            if left_s <= 0:
                return False
            time.sleep(_FLUSH_PAUSE_S)  # for whoever else wants the lock

    def check(self) -> None:
        """Assert the invariants of every stateful part."""
        self._loop.check()
        with self._lock:
            self.parts.runner.check()

    def close(self, timeout_s: float = 30.0) -> None:
        """Cancel what runs, let spills finish within ``timeout_s``, give all memory back. Again: what an interrupt or a
        long step left undone. An engine that is dropped, with all of its requests, is closed, with a ResourceWarning.
        """
        self._refuse_own_thread()
        self._shutdown.close(timeout_s)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "an Engine cannot be copied or pickled: it has a thread and open files. Open one where it is used."
        )
