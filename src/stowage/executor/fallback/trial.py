"""The trial of a fallback model: are its logits with the cache in pools bit-identical to those with Transformers' own?

A prompt is computed in pieces, with another prompt's forwards in between. Every logit must be bit-identical to that of
Transformers' ``DynamicCache`` without the other prompt. And what Transformers computes in pieces must agree with what
it computes in one go: some models silently lose state between pieces.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from stowage.core.geometry import Kind
from stowage.errors import UnsupportedModelError
from stowage.executor.batch import Work
from stowage.executor.block_pool import BlockPool, blocks_needed
from stowage.executor.fallback.runner import FallbackRunner
from stowage.executor.sequence_state import probe_sequence, take_blocks
from stowage.models.fallback_layout import probe
from stowage.models.layout import ModelLayout
from stowage.models.probing import RAISED_BY_MODELS
from stowage.models.state_access import forward, keeper_of

_TOKENS = 24
_NEAR = {torch.float32: 1e-3}
_NEAR_OTHERWISE = 0.25
"""The largest relative difference between the logits of a prompt in pieces and in one go. (With fewer bits, a router
that is near a tie may choose another expert.)"""


def proved_layout(model: Any, block_tokens: Mapping[Kind, int], chunk_blocks: int) -> ModelLayout:
    """The layout of a fallback model that has passed the trial. Raises ``UnsupportedModelError``."""
    try:
        layout = probe(model, block_tokens, chunk_blocks)
        prove(model, layout)
    except RAISED_BY_MODELS as error:
        instead = "" if model.dtype is torch.float32 else f" It was tried in {model.dtype}: give --dtype float32."
        raise UnsupportedModelError(
            f"the model does not run with Transformers' own dynamic cache: {str(error).rstrip('.')}.{instead}"
        ) from error
    return layout


@torch.inference_mode()
def prove(model: Any, layout: ModelLayout) -> None:
    """Raises ``UnsupportedModelError`` if the trial fails. Takes blocks for two short prompts, and frees them."""
    trial = _Trial(model, layout)
    own = trial.own()
    for piece, (expected, found) in enumerate(zip(own, trial.pooled(), strict=True)):
        if not torch.equal(expected, found):
            raise UnsupportedModelError(
                f"the model gives other answers when its cache is kept by the engine (piece {piece} of a trial, by up "
                f"to {float((expected - found).abs().max()):.1e}): it keeps something elsewhere, or changes its cache."
            )
    whole = trial.whole()
    far = float((whole - own[-1][-1:]).norm() / whole.norm())
    if far > _NEAR.get(model.dtype, _NEAR_OTHERWISE):
        raise UnsupportedModelError(
            "Transformers computes something else when this model goes on from a cache than when it computes a prompt "
            f"in one go (the logits differ by {far:.1%}), so a reused prefix would change answers."
        )


class _Trial:
    """Two prompts, the first a few windows of every compressor long."""

    def __init__(self, model: Any, layout: ModelLayout) -> None:
        self._model, self._layout = model, layout
        every = max(tensor.every for block in layout.blocks for layer in block.layers for tensor in layer.tensors)
        count = min(max(_TOKENS, 2 * every + every // 2 + 3), layout.context_tokens)
        vocab = int(model.config.vocab_size)
        self._prompts = [[(step * index + 13) % vocab for index in range(count)] for step in (7919, 6007)]
        first = count // 2
        self._sizes = [first, *([count - first - 2, 1, 1] if layout.continues else [1] * (count - first))]

    def own(self) -> list[Tensor]:
        """Logits of each piece with Transformers' own cache."""
        cache, found, begin = self._fresh(), [], 0
        for size in self._sizes:
            tokens = self._prompts[0][begin : begin + size]
            found.append(forward(self._model, tokens, begin, cache, every_logit=True))
            begin += size
        return found

    def whole(self) -> Tensor:
        return forward(self._model, self._prompts[0], 0, self._fresh())

    def _fresh(self) -> DynamicCache:
        return keeper_of(self._model).fresh(self._model.config)

    def pooled(self) -> list[Tensor]:
        """Logits of each piece with the cache in pools, and the other prompt computed in between."""
        count = len(self._prompts[0])
        needed = [2 * blocks_needed(group, count, count) for group in self._layout.groups]
        pools = [BlockPool(b, n, self._model.device) for b, n in zip(self._layout.blocks, needed, strict=True)]
        runner = FallbackRunner(self._model, self._layout, pools, scores_bytes_max=1 << 62)
        sequences = [probe_sequence(0, prompt, self._layout.groups) for prompt in self._prompts]
        found = []
        for size in self._sizes:
            for sequence in sequences:
                take_blocks(sequence, pools, sequence.computed + size)
            mine, _ = runner.run([Work(s, s.computed, size, True) for s in sequences])
            found.append(mine)
            for sequence in sequences:
                sequence.computed += size
        return found
