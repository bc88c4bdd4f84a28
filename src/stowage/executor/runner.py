"""Runs forwards: from work on sequences to logits.

Owns the model. ``forwards`` cuts work into forwards of some shape; each is computed here, or a recording answers
(``replay``). Never decides what is computed, and never samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stowage.core.groups import GroupStrategy
from stowage.executor import attention, decode_attention, kernels, paged_trial
from stowage.executor.batch import ForwardStep, Work, build, current
from stowage.executor.block_pool import PADDING_BLOCK, BlockPool
from stowage.executor.decode_attention import PagedKernel
from stowage.executor.determinism.pieces import Pieces, device_rows
from stowage.executor.determinism.row_invariance import mode_of
from stowage.executor.determinism.slices import RowSlices
from stowage.executor.device import paged_kernel
from stowage.executor.forwards import Forward, Forwards, ForwardShape
from stowage.executor.fused import norms, recurrent_layers
from stowage.executor.hooks import Hooks
from stowage.executor.int8_activations import ROUNDED_FROM
from stowage.executor.latent_weights import LatentWeights
from stowage.executor.paged_cache import PagedCache
from stowage.executor.replay.backend import StepShape
from stowage.executor.replay.cache import ReplayCache
from stowage.executor.replay.calls.backend import ModelStep, RecordedSteps, recorded_steps
from stowage.executor.replay.calls.prompts import LEAST, PromptStep, is_known, recorded_prompts
from stowage.executor.replay.graphs.backend import GraphBackend, Graphs, rules
from stowage.executor.replay.graphs.recorder import Recorder
from stowage.executor.static_steps import Inputs, StaticSteps
from stowage.models.adapters import Adapters
from stowage.models.layout import ModelLayout
from stowage.models.probing import cache_name, takes_rows
from stowage.native.memory import keep_freed
from stowage.weights.mapped_files import MappedFiles
from stowage.weights.source import WeightSource


class Runner:
    """Computes work on a Transformers model whose KV cache lies in ``pools``; ``attention`` is installed in it.

    ``exact``: how prompts are cut so that a token's bits do not depend on its neighbours (``determinism.pieces``; the
    trial verifies it); ``None``: bits may depend on what is computed together.
    ``weights``: delivers the model's offloaded weights. ``max_num_seqs``: the most single tokens of a step. ``int8``:
    see ``RowInvariance``.
    """

    def __init__(
        self,
        model: Any,
        layout: ModelLayout,
        pools: Sequence[BlockPool],
        strategies: Sequence[GroupStrategy],
        *,
        exact: Pieces | None = None,
        weights: WeightSource | None = None,
        max_num_seqs: int = 1,
        int8: bool = False,
    ) -> None:
        self._model, self._dtype, self._device = model, model.dtype, model.device
        self._layout = layout
        self._pools = pools
        self._strategies = strategies
        recurrent = layout.recurrent
        self._recurrent = pools[recurrent.group.index] if recurrent else None
        self._cache = PagedCache(layout.layers, self._recurrent)
        self._takes_rows = takes_rows(model)
        self._cache_name = cache_name(model)
        self._exact, self._rounded_from = exact is not None, ROUNDED_FROM if int8 else kernels.NEVER
        self._piece_tokens = exact.grid if exact is not None and exact.alone else 0
        self._kernels = kernels.wanted(model.device, model.dtype)
        if model.device.type == "cpu":
            keep_freed()
        norms.install(model, fused=self._kernels)
        self._uninstall = [norms.uninstall]
        if self._kernels:
            recurrent_layers.install(model)
            self._uninstall.append(recurrent_layers.uninstall)
        mode = mode_of(model, exact=self._exact, int8=int8)
        self._mode: AbstractContextManager[Any] = mode or nullcontext()
        self._mode_of_pieces: AbstractContextManager[Any] = self._mode
        self._in_one_shape = self._exact and model.device.type != "cpu"
        self._slices = RowSlices(self._piece_tokens)
        self._latent_weights = LatentWeights(keeps=weights is None)
        if self._in_one_shape:
            self._mode_of_pieces = self._slices
        elif self._piece_tokens:  # all forwards have one shape, so the fastest way is also deterministic
            self._mode_of_pieces = mode_of(model, exact=False, int8=int8) or nullcontext()
        again = self._kernels and (weights is None or not weights.copies_to_device)  # a list of calls waits for no copy
        self.hooks = Hooks(model, weights)
        self.steps: RecordedSteps | None = recorded_steps(model, mode, weights) if again else None
        own_bits = self._exact and not self._piece_tokens and self._recurrent is None and layout.ragged
        stays = is_known(model) and (weights is None or not weights.moving)
        self.prompts = recorded_prompts(self.steps) if self.steps is not None and own_bits and stays else None
        self.graphs: Graphs | None = None
        self._closed = False
        self.adapters: Adapters | None = None
        """Sequences with the same adapter are computed together, by the model's own code."""
        self.mapped = MappedFiles()
        """Files that the model computes from where they lie."""
        kernel = paged_trial.trusted(paged_kernel(model.device, model.dtype), model, pools)
        self._paged = kernel.attend if kernel is not None else None
        self._static = self._static_steps(kernel, max_num_seqs)
        self.forwards = Forwards(
            ragged=layout.ragged,
            continues=layout.continues,
            exact=self._exact,
            piece_tokens=self._piece_tokens,
            singles=self._kernels or self._in_one_shape,
            rows=self._static.rows,
            static=self._in_one_shape,
        )

    @property
    def can_slice(self) -> bool:
        """Whether ``Forwards.pieces_at_once`` may be tried."""
        return self._in_one_shape and self._layout.ragged and self._layout.continues and not self._slices.others

    def _static_steps(self, kernel: PagedKernel | None, max_num_seqs: int) -> StaticSteps:
        """Exact steps on a device have a fixed number of rows: 1 where torch's attention reads as many keys as the
        longest sequence of a step has.
        """
        attend, context, rows = self._paged or decode_attention.attend, self._layout.context_tokens, 0
        if self._in_one_shape:
            rows = 1
            if kernel is not None and kernel.of_length is not None:
                attend, rows = kernel.of_length(context), device_rows(max_num_seqs)
        octave = 4 if kernel is None else 1
        return StaticSteps(self._pools, self._strategies, attend, max_num_seqs, context, octave, rows)

    def record(self, recorder: Recorder, limit_bytes: int) -> None:
        """Record and replay decode steps from now on, with up to ``limit_bytes`` of device memory."""
        backend = GraphBackend(self._recorded, self._static, recorder)
        self.graphs = ReplayCache(backend, rules(self._model.dtype, exact=self._in_one_shape), limit_bytes)
        self.forwards.static = True
        self.steps = self.prompts = None

    def check(self) -> None:
        """Assert what must hold between steps."""
        for cache in (self.steps, self.prompts, self.graphs):
            if cache is not None:
                cache.check()
        if self.graphs is not None:
            for pool in self._pools:
                assert not bool(pool.storage[PADDING_BLOCK].any()), "the padding block is not zero"

    def close(self) -> None:
        """Restore the model's own modules and attention, and free the recordings. Again: what an interrupt left."""
        for cache in (self.steps, self.prompts, self.graphs):
            if cache is not None:
                cache.close()
        self.mapped.close()
        if not self._closed:
            self._closed = True
            attention.uninstall(self._model)
        self.give_back()

    def give_back(self) -> None:
        """Restore the model's own norms and recurrent layers."""
        while self._uninstall:
            self._uninstall.pop()(self._model)

    def run(self, work: Sequence[Work]) -> list[Tensor]:
        """Compute ``work`` and return, in its order, each item's logits: ``[1, vocab]`` of its last token, or ``[count,
        vocab]``; float32, in host memory. Raises CheckpointError when a file of the weights was written to.
        """
        if not torch.is_inference_mode_enabled():
            with torch.inference_mode():
                return self.run(work)
        self.hooks.look()
        with self.mapped.unchanged():
            if self.adapters is None:
                return self._run(work)
            return self.adapters.apart(work, lambda item: item.sequence.adapter, self._run)

    @property
    def _adapted(self) -> bool:
        return self.adapters is not None and self.adapters.active is not None

    @property
    def _as_written(self) -> bool:
        """Whether the model's own code must run: it has something that its traces do not know, such as an adapter."""
        return self._adapted or self.hooks.there

    def _run(self, work: Sequence[Work]) -> list[Tensor]:
        found: dict[int, Tensor] = {}
        for part, forwards in self.forwards.cut(work):
            logits = [self._forward(forward) for forward in forwards]
            sizes = [w.count if w.every_logit else 1 for w in part]
            whole = torch.cat(logits) if part[0].every_logit and len(logits) > 1 else logits[-1]
            rows = torch.split(whole, sizes) if len(part) > 1 else [whole]
            found.update(zip(map(id, part), rows, strict=True))
        return [found[id(w)] for w in work]

    def _forward(self, forward: Forward) -> Tensor:
        work, shape = forward
        if shape is ForwardShape.OWN:
            return self._in_its_own_shape(work)
        if shape is ForwardShape.PIECES:
            step = self._step(work)
            step.logit_rows = step.logit_rows[-1:]
            return self._compute(step, [], fresh=work[0].start == 0, batched=False).cpu()
        plain = partial(self._static.compute, work, self._recorded)
        if not self._in_one_shape:  # a step that is not replayed needs no static shape
            plain = partial(self._in_its_own_shape, work)
        return plain() if self.graphs is None or self._adapted else self.graphs.run(work, plain)

    def _in_its_own_shape(self, work: Sequence[Work]) -> Tensor:
        step = self._step(work)
        blocks: list[int] = []
        if self._recurrent is not None:
            blocks = [int(w.sequence.table(self._recurrent.group.index)[0]) for w in work]
        batched = not self._layout.ragged and len(work) > 1
        prompt = self._prompt(work, step)
        return self._compute(step, blocks, fresh=work[0].start == 0, batched=batched, prompt=prompt).cpu()

    def _prompt(self, work: Sequence[Work], step: ForwardStep) -> PromptStep | None:
        """``work`` as a prompt that may be recorded, if it is one."""
        if self.prompts is None or step.decodes == len(work) or len(step.logit_rows) != len(work):
            return None
        longest = max(work, key=lambda w: w.count)
        if longest.count < LEAST and StepShape(len(work)) not in self.prompts.recorded:
            return None
        return PromptStep(len(work), _given(step, (1, len(step.ids))), partial(self._part, work, longest))

    @contextmanager
    def _part(self, work: Sequence[Work], longest: Work, tokens: int) -> Iterator[ModelStep]:
        """See ``PromptStep``."""
        counts = [tokens if w is longest else min(w.count, 2) for w in work]
        step = self._step([replace(w, count=count) for w, count in zip(work, counts, strict=True)])
        given = _given(step, (1, len(step.ids)))
        token = current.set(step)
        try:
            forward, bound = partial(self._call, step, given[1], batched=False), partial(self._bound, [], fresh=False)
            yield ModelStep(given, forward, bound, partial(self._cache.rows_of, []), gathered=False)
        finally:
            current.reset(token)

    def _step(self, work: Sequence[Work]) -> ForwardStep:
        step = build(
            *(work, self._pools, self._strategies, self._dtype),
            native=self._reads_natively,
            paged=self._paged,
            device=self._device,
        )
        step.kernels, step.latent_weights, step.rounded_from = self._kernels, self._latent_weights, self._rounded_from
        return step

    def _recorded(self, inputs: Inputs) -> Tensor:
        """A step of static inputs, all of it on the device: what graphs record. Padding is taken back."""
        logits = self._compute(inputs.step, inputs.states, fresh=False, batched=not self._layout.ragged)
        for pool in self._pools:
            pool.storage[PADDING_BLOCK].zero_()
        return logits

    def _compute(
        self,
        step: ForwardStep,
        states: Sequence[int] | Tensor,
        *,
        fresh: bool,
        batched: bool,
        prompt: PromptStep | None = None,
    ) -> Tensor:
        """Logits of ``step``, on the device. ``states``: blocks of recurrent state; ``batched``: a row is a sequence;
        ``prompt``: the same step, if it may be recorded as one.
        """
        given = _given(step, (step.ids.shape[0], 1) if batched else (1, step.ids.shape[0]))
        positions = given[1]
        forward, bound = partial(self._call, step, positions, batched), partial(self._bound, states, fresh)
        singles = not fresh and step.decodes == step.ids.shape[0]
        token = current.set(step)
        try:
            if not singles:
                plain = partial(self._by_model, forward, bound, self._mode_of_pieces)
                recorded = self.prompts if prompt is not None and not self._as_written else None
                return plain() if recorded is None or prompt is None else recorded.run(prompt, plain)
            if self.steps is None or self._as_written:
                return self._by_model(forward, bound, self._mode)
            assert not isinstance(states, Tensor), "graphs name states on the device"
            one = ModelStep(given, forward, bound, partial(self._cache.rows_of, states), gathered=batched)
            return self.steps.run(one, partial(self._by_model, forward, bound, self._mode))
        finally:
            current.reset(token)

    def _by_model(
        self,
        forward: Callable[[], Tensor],
        bound: Callable[[], AbstractContextManager[Sequence[Tensor]]],
        mode: AbstractContextManager[Any],
    ) -> Tensor:
        with bound(), mode:
            return forward()

    @contextmanager
    def _bound(self, states: Sequence[int] | Tensor, fresh: bool) -> Iterator[Sequence[Tensor]]:
        self._cache.bind_states(states, fresh=fresh)
        try:
            yield self._cache.bound_states()
        finally:
            self._cache.unbind_states()

    def _reads_natively(self, pool: BlockPool, work: Sequence[Work]) -> bool:
        """Whether the kernels compute the attention of ``work``: wherever there are kernels, unless answers need not be
        exact and torch, which expands latents, is faster. The kernels read offloaded keys in host memory.
        """
        if not self._kernels:
            return False
        by_rows = self._exact and (not self._piece_tokens or work[0].count == 1)
        has_offloaded = any(w.sequence.tables[pool.group.index].has_offloaded for w in work)
        return by_rows or has_offloaded or not pool.layout.layers[0].latent

    def _call(self, step: ForwardStep, positions: Tensor, batched: bool) -> Tensor:
        shape = positions.shape
        rows: int | Tensor = 1 if batched else step.logit_rows
        if not batched and len(step.logit_rows) == len(step.ids) and step.decodes == len(step.ids):
            rows = 0  # all of them, and nothing has to pick them
        out = self._model(
            input_ids=step.ids.view(shape),
            position_ids=positions,
            **{self._cache_name: self._cache},
            use_cache=True,
            attention_mask=torch.ones(shape, device=step.ids.device)
            if self._layout.ragged
            else None,  # some would make one from the cache
            **({"logits_to_keep": rows} if self._takes_rows else {}),
        )
        logits: Tensor = out.logits
        if not self._layout.own_rows:
            logits = logits[:, -1:] if batched else logits[:, step.logit_rows]
        return logits.reshape(-1, logits.shape[-1]).float()


def _given(step: ForwardStep, shape: tuple[int, int]) -> tuple[Tensor, ...]:
    """See ``ModelStep``."""
    return (step.ids, step.positions.view(shape), step.logit_rows, step.positions)
