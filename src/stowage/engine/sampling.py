"""Sampling: from logits to tokens, greedy or random, reproducible by seed.

Each sequence has its own random generator, so its tokens depend neither on other sequences, nor on preemption, nor on
where its prefix came from. Filters apply in the order of Transformers' logits processors: temperature, top-k, top-p
(Holtzman et al., arXiv:1904.09751), min-p (Nguyen et al., arXiv:2407.01082).
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stowage.engine.grammar import GrammarState
from stowage.engine.logits_processors import LogitsProcessors, processors_of
from stowage.engine.sampling_params import SamplingParams
from stowage.errors import ModelError


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability (natural logarithm) of a chosen token, and the likeliest ``(token_id, logprob)`` there."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def logprobs_of(logits: Tensor, tokens: list[int], top: int) -> list[TokenLogprob]:
    """The log-probability of one token for each row of ``logits`` ``[rows, vocab]``, with the ``top`` likeliest."""
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(-1, torch.tensor(tokens)[:, None])[:, 0].tolist()
    values, ids = logprobs.topk(min(top, logprobs.shape[-1]))
    likeliest = [tuple(zip(*row, strict=True)) for row in zip(ids.tolist(), values.tolist(), strict=True)]
    return [TokenLogprob(*report) for report in zip(tokens, chosen, likeliest, strict=True)]


def check_logits(logits: Tensor) -> int:
    """The likeliest token of the last row of ``logits`` ``[rows, vocab]``. Raises ModelError for a row with NaN, plus
    infinity, or minus infinity everywhere. Minus infinity at some tokens is fine: they are never sampled.
    """
    # numpy: torch wakes a thread for so little, which takes longer. Its argmax is quicker than max, and the first NaN.
    rows = logits.numpy()
    likeliest = [int(row.argmax()) for row in rows]
    if not all(math.isfinite(row[token]) for row, token in zip(rows, likeliest, strict=True)):
        raise ModelError(
            "the model computed logits that are not numbers (NaN or infinite) for this request, so no token can be "
            "drawn; nothing of this step is kept. Try another dtype (float32), and check the checkpoint's weights."
        )
    return likeliest[-1]


class Sampler:
    """Samples one sequence. ``prompt``: its tokens; ``eos``: what ends it; ``grammar``: that of the answer."""

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int] = (),
        eos: frozenset[int] = frozenset(),
        grammar: GrammarState | None = None,
    ) -> None:
        self.params = params
        self._processors = processors_of(params, prompt, eos, grammar)
        self._generator = torch.Generator()
        # torch's own seed() opens a file, which fails where a process has too many open.
        self._generator.manual_seed(int.from_bytes(os.urandom(8)) if params.seed is None else params.seed)

    @property
    def finished(self) -> bool:
        """Whether the grammar allows no further token."""
        return self._processors is not None and self._processors.finished

    @property
    def takes_likeliest(self) -> bool:
        """Whether ``sample`` gives the likeliest token, and no log-probability."""
        return self._processors is None and self.params.temperature == 0 and not self.params.logprobs

    def sample(self, logits: Tensor) -> tuple[int, TokenLogprob | None]:
        """The next token from ``logits`` ``[vocab]``, float32, with its log-probability when asked for."""
        token = (
            self._sample_from(logits)
            if self._processors is None
            else self._sample_constrained(logits, self._processors)
        )
        if not self.params.logprobs:
            return token, None
        return token, logprobs_of(logits[None], [token], self.params.logprobs)[0]

    def _sample_from(self, logits: Tensor) -> int:
        if self.params.temperature == 0:
            return int(logits.numpy().argmax())
        return int(torch.multinomial(self._filtered(logits), 1, generator=self._generator))

    def _sample_constrained(self, logits: Tensor, processors: LogitsProcessors) -> int:
        """Sample a token that the grammar allows, and count it. Masks are slow, so first sample without one: if the
        grammar allows that token, it is the one that masking would give. This holds for the argmax, and for PyTorch's
        `multinomial` of one (the least of exponential variables wins), unless top-k, top-p or min-p look at other
        tokens.
        """
        params = self.params
        filtered = params.top_k or params.top_p < 1 or params.min_p
        if processors.has_grammar and (params.temperature == 0 or not filtered):
            state = self._generator.get_state() if params.temperature else None
            token = self._sample_from(processors.apply(logits, masked=False))
            if processors.try_accept(token):
                return token
            if state is not None:
                self._generator.set_state(state)
        token = self._sample_from(processors.apply(logits))
        processors.accept(token)
        return token

    def _filtered(self, logits: Tensor) -> Tensor:
        """Probabilities ``[vocab]`` after temperature and filters."""
        params = self.params
        # Subtracting the maximum first: no overflow and no NaN at any temperature.
        scaled = ((logits.double() - logits.max()) / params.temperature).float()
        if 0 < params.top_k < scaled.numel():
            least = scaled.topk(params.top_k).values[-1]
            scaled = scaled.masked_fill(scaled < least, -math.inf)
        if params.top_p < 1:
            ordered, order = scaled.softmax(-1).sort(descending=True)
            beyond = ordered.cumsum(-1) - ordered >= params.top_p
            beyond[0] = False  # top_p may round to 0 in float32
            scaled = scaled.index_fill(0, order[beyond], -math.inf)
        probabilities = scaled.softmax(-1)
        if params.min_p > 0:
            probabilities = probabilities.masked_fill(probabilities < params.min_p * probabilities.max(), 0.0)
        return probabilities
