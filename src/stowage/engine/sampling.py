"""From logits to tokens: greedy or sampled, reproducible by seed.

Owns one random generator per sequence, so that what a sequence draws never depends on its
neighbours, on preemption or on how its prefix arrived. Filters apply in the order temperature, top-k, top-p (Holtzman
et al., arXiv:1904.09751), min-p (Nguyen et al., arXiv:2407.01082), which is the order of Transformers' own logits
processors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stowage.engine.grammar import GrammarState
from stowage.engine.logits_processors import LogitsProcessors, processors_of
from stowage.engine.sampling_params import LOGPROBS_MAX, SamplingParams
from stowage.errors import ModelError

__all__ = ["LOGPROBS_MAX", "Sampler", "SamplingParams", "TokenLogprob", "check_logits", "logprobs_of"]


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


def check_logits(logits: Tensor) -> None:
    """Raises ModelError for a row of ``logits`` ``[rows, vocab]`` that says nothing: with a NaN, with plus infinity, or
    with minus infinity everywhere. Minus infinity at some tokens says that those are never drawn.
    """
    highest = [row.max() for row in logits.numpy()]  # numpy: torch wakes a thread for so little, which takes longer
    if not all(map(math.isfinite, highest)):
        raise ModelError(
            "the model computed logits that are not numbers (NaN or infinite) for this request, so no token can be "
            "drawn; nothing of this step is kept. Try another dtype (float32), and check the checkpoint's weights."
        )


class Sampler:
    """Draws the tokens of one sequence. ``prompt``: its tokens; ``eos``: those that end a sequence of this model;
    ``grammar``: of the answer.
    """

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
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed)

    @property
    def is_over(self) -> bool:
        """Whether nothing may follow what was drawn."""
        return self._processors is not None and self._processors.are_over

    def draw(self, logits: Tensor) -> tuple[int, TokenLogprob | None]:
        """The next token from ``logits`` ``[vocab]``, float32, with its log-probability when asked for."""
        token = self._pick(logits) if self._processors is None else self._pick_allowed(logits, self._processors)
        if not self.params.logprobs:
            return token, None
        return token, logprobs_of(logits[None], [token], self.params.logprobs)[0]

    def _pick(self, logits: Tensor) -> int:
        if self.params.temperature == 0:
            return int(logits.numpy().argmax())
        return int(torch.multinomial(self._filtered(logits), 1, generator=self._generator))

    def _pick_allowed(self, logits: Tensor, processors: LogitsProcessors) -> int:
        """Draws a token and counts it as drawn. A mask costs much, so it is drawn without one where that is the same.
        It is if the grammar allows what was drawn: the likeliest of all tokens is then the likeliest of those allowed.
        So it is of sampling too, where the least of exponential variables wins (PyTorch's `multinomial` of one), unless
        filters look at other tokens.
        """
        params = self.params
        filtered = params.top_k or params.top_p < 1 or params.min_p
        if processors.has_grammar and (params.temperature == 0 or not filtered):
            state = self._generator.get_state() if params.temperature else None
            token = self._pick(processors.apply(logits, masked=False))
            if processors.take(token):
                return token
            if state is not None:
                self._generator.set_state(state)
        token = self._pick(processors.apply(logits))
        processors.drawn(token)
        return token

    def _filtered(self, logits: Tensor) -> Tensor:
        """Probabilities ``[vocab]`` after temperature and filters."""
        params = self.params
        # The likeliest is 0 whatever the temperature, and others at worst minus infinity: no overflow, no NaN.
        scaled = ((logits.double() - logits.max()) / params.temperature).float()
        if 0 < params.top_k < scaled.numel():
            least = scaled.topk(params.top_k).values[-1]
            scaled = scaled.masked_fill(scaled < least, -math.inf)
        if params.top_p < 1:
            ordered, order = scaled.softmax(-1).sort(descending=True)
            beyond = ordered.cumsum(-1) - ordered >= params.top_p
            beyond[0] = False  # where top_p is less than a float32 can say
            scaled = scaled.index_fill(0, order[beyond], -math.inf)
        probabilities = scaled.softmax(-1)
        if params.min_p > 0:
            probabilities = probabilities.masked_fill(probabilities < params.min_p * probabilities.max(), 0.0)
        return probabilities
