"""Runs forwards of fallback models: one sequence after the other, with Transformers' own attention.

Owns how a sequence's tokens are cut into forwards. Some models' attention materializes all scores, so a forward has no
more tokens than ``SCORES_BYTES_MAX`` allows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from stowage.executor.batch import Work
from stowage.executor.block_pool import BlockPool
from stowage.executor.fallback.cache_layers import Pooled, TokenSpan
from stowage.executor.hooks import Hooks
from stowage.models.adapters import Adapters
from stowage.models.layout import ModelLayout
from stowage.models.state_access import forward, keeper_of
from stowage.weights.mapped_files import MappedFiles

SCORES_BYTES_MAX = 256 << 20
"""Limit of one layer's attention scores in float32."""


class FallbackRunner:
    """Computes work on a Transformers model whose cache lies in ``pools``. ``grid``: forwards end at its multiples, so
    that a prompt's tokens are always computed in the same pieces; 1: anywhere. ``exact``: where the model can only
    continue a state with single tokens, all tokens are computed one by one. ``mode``: is on while the model runs.
    ``scores_bytes_max``: instead of ``SCORES_BYTES_MAX``.
    """

    def __init__(
        self,
        model: Any,
        layout: ModelLayout,
        pools: Sequence[BlockPool],
        *,
        grid: int = 1,
        exact: bool = False,
        mode: AbstractContextManager[Any] | None = None,
        scores_bytes_max: int | None = None,
    ) -> None:
        self._model = model
        self._cache = Pooled(keeper_of(model).fresh(model.config), layout, pools)
        self._continues, self._exact = layout.continues, exact
        self._grid = grid
        config = model.config
        heads = max(int(getattr(config, name, None) or 1) for name in ("num_attention_heads", "index_n_heads"))
        self._scores_max = (scores_bytes_max or SCORES_BYTES_MAX) // (4 * heads)
        self._mode = mode or nullcontext()
        self.hooks = Hooks(model, getattr(model, "stowage", None))
        self.adapters: Adapters | None = None
        self.mapped = MappedFiles()
        """See ``Runner``."""

    def close(self) -> None:
        """The model was not changed."""
        self.mapped.close()

    def check(self) -> None:
        """Nothing is kept between steps."""

    @torch.inference_mode()
    def run(self, work: Sequence[Work]) -> list[Tensor]:
        """See ``Runner.run``."""
        self.hooks.look()
        with self.mapped.unchanged():
            return [self._adapted(item) for item in work]

    def _adapted(self, work: Work) -> Tensor:
        with nullcontext() if self.adapters is None else self.adapters.on(work.sequence.adapter):
            return self._run(work)

    def _run(self, work: Work) -> Tensor:
        addresses = [table.addresses for table in work.sequence.tables]
        found = []
        for begin, end in self._pieces(work.start, work.start + work.count):
            self._cache.begin(TokenSpan(begin, end - begin, addresses))
            with self._mode:
                logits = forward(
                    self._model, work.sequence.tokens[begin:end], begin, self._cache.cache, every_logit=work.every_logit
                )
            self._cache.end()
            found.append(logits)
        return torch.cat(found) if work.every_logit else found[-1]

    def _pieces(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        while begin < end:
            if not self._continues and (begin or self._exact):  # as in ``Runner``: exact answers are computed one way
                yield begin, begin + 1
                begin += 1
                continue
            stop = min(end, (begin // self._grid + 1) * self._grid) if self._grid > 1 else end
            stop = min(stop, begin + max(1, self._scores_max // stop))
            yield begin, stop
            begin = stop
