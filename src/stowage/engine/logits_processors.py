"""What a request asks to be changed about its logits before a token is drawn: grammar, bias, least length, penalties.

Owns what one sequence has drawn so far, counted by token. Everything here depends on the request's own tokens alone: so
it is the same in every batch, after preemption, and wherever the prefix came from. In vLLM's order and with its
definitions (`vllm/v1/sample`): grammar, bias, least length, repetition, frequency, presence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from stowage.engine.grammar import GrammarState
from stowage.engine.sampling_params import SamplingParams
from stowage.errors import RequestError

__all__ = ["LogitsProcessors", "processors_of"]


class LogitsProcessors:
    """Of one sequence. ``prompt``: its tokens; ``ends``: those that would end it; ``grammar``: of its answer."""

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        ends: frozenset[int],
        grammar: GrammarState | None = None,
    ) -> None:
        self._grammar = grammar
        self._params = params
        self._drawn: dict[int, int] = {}
        self._bias = _columns(dict(params.biases))
        self._ends = torch.tensor(sorted(ends), dtype=torch.long)
        self._prompt = frozenset(prompt)
        self._count = 0
        penalties = params.repetition_penalty != 1.0 or params.frequency_penalty or params.presence_penalty
        self._changes = bool(penalties or params.biases or params.min_tokens)

    @property
    def has_grammar(self) -> bool:
        """Whether a grammar says what may follow."""
        return self._grammar is not None

    def apply(self, logits: Tensor, *, masked: bool = True) -> Tensor:
        """The logits ``[vocab]`` to draw from; those given are not changed, and come back where nothing would change.
        masked: without what the grammar excludes. Raises RequestError when nothing is left that may be drawn.
        """
        params = self._params
        if not masked and not self._changes:
            return logits  # the step has looked for what is not finite
        logits = logits.clone()
        if self._grammar is not None and masked:
            self._grammar.mask(logits)
        if params.biases:
            tokens, values = self._bias
            logits[tokens] += values
        if self._count < params.min_tokens:
            logits[self._ends] = -math.inf
        if params.repetition_penalty != 1.0:
            seen = torch.tensor(sorted(self._prompt.union(self._drawn)), dtype=torch.long)
            found = logits[seen]
            penalty = params.repetition_penalty
            logits[seen] = torch.where(found > 0, found / penalty, found * penalty)
        if self._drawn and (params.frequency_penalty or params.presence_penalty):
            tokens, counts = _columns(self._drawn)
            logits[tokens] -= params.frequency_penalty * counts + params.presence_penalty
        if not np.isfinite(logits.numpy().max()):  # torch would wake a thread for so little
            raise RequestError(
                "nothing is left that may be drawn: structured_outputs, min_tokens and logit_bias exclude every token "
                "together. Change one of them."
            )
        return logits

    def drawn(self, token: int) -> None:
        """``token`` was drawn."""
        if self._grammar is not None:
            self._grammar.drawn(token)
        self._counted(token)

    def take(self, token: int) -> bool:
        """``drawn`` if the grammar lets ``token`` follow: whether it does."""
        taken = self._grammar is None or self._grammar.take(token)
        if taken:
            self._counted(token)
        return taken

    def _counted(self, token: int) -> None:
        self._count += 1
        self._drawn[token] = self._drawn.get(token, 0) + 1

    @property
    def are_over(self) -> bool:
        """Whether the grammar lets nothing follow."""
        return self._grammar is not None and self._grammar.is_over


def processors_of(
    params: SamplingParams, prompt: Sequence[int], eos: frozenset[int], grammar: GrammarState | None = None
) -> LogitsProcessors | None:
    """What changes the logits of a sequence; ``None``: nothing does."""
    penalties = params.repetition_penalty != 1.0 or params.frequency_penalty or params.presence_penalty
    if not (penalties or params.biases or params.min_tokens or grammar):
        return None
    ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos)
    return LogitsProcessors(params, prompt if params.repetition_penalty != 1.0 else (), ends, grammar)


def _columns(values: dict[int, int] | dict[int, float]) -> tuple[Tensor, Tensor]:
    return torch.tensor(list(values), dtype=torch.long), torch.tensor(list(values.values()), dtype=torch.float32)
