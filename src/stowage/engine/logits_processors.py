"""Logits processors: grammar, logit bias, min_tokens, and penalties for repetition, frequency and presence.

Owns the counts of tokens sampled so far. Everything depends on the request's own tokens alone, so it is the same in
every batch, after preemption, and wherever the prefix came from. Order and definitions are vLLM's (`vllm/v1/sample`).
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


class LogitsProcessors:
    """One sequence's processors. ``prompt``: its tokens; ``ends``: tokens that end it; ``grammar``: of its answer."""

    def __init__(
        self, params: SamplingParams, prompt: Sequence[int], ends: frozenset[int], grammar: GrammarState | None
    ) -> None:
        self._grammar = grammar
        self._params = params
        self._counts: dict[int, int] = {}
        self._bias = _columns(dict(params.biases))
        self._ends = torch.tensor(sorted(ends), dtype=torch.long)
        self._prompt = frozenset(prompt)
        self._count = 0
        penalties = params.repetition_penalty != 1.0 or params.frequency_penalty or params.presence_penalty
        self._changes = bool(penalties or params.biases or params.min_tokens)

    @property
    def has_grammar(self) -> bool:
        """Whether a grammar restricts the tokens."""
        return self._grammar is not None

    def apply(self, logits: Tensor, *, masked: bool = True) -> Tensor:
        """The processed logits ``[vocab]``: a copy, or ``logits`` itself if nothing changes. ``masked``: apply the
        grammar, too. Raises RequestError when no token is left.
        """
        params = self._params
        if not masked and not self._changes:
            return logits  # the loop has checked that they are finite
        logits = logits.clone()
        if self._grammar is not None and masked:
            self._grammar.mask(logits)
        if params.biases:
            tokens, values = self._bias
            logits[tokens] += values
        if self._count < params.min_tokens:
            ends = self._ends
            logits[ends[(ends >= 0) & (ends < logits.numel())]] = -math.inf  # others are never drawn
        if params.repetition_penalty != 1.0:
            seen = torch.tensor(sorted(self._prompt.union(self._counts)), dtype=torch.long)
            found = logits[seen]
            penalty = params.repetition_penalty
            logits[seen] = torch.where(found > 0, found / penalty, found * penalty)
        if self._counts and (params.frequency_penalty or params.presence_penalty):
            tokens, counts = _columns(self._counts)
            logits[tokens] -= params.frequency_penalty * counts + params.presence_penalty
        if not np.isfinite(logits.numpy().max()):  # numpy: torch would wake a thread for so little
            raise RequestError(
                "nothing is left that may be drawn: structured_outputs, min_tokens and logit_bias exclude every token "
                "together. Change one of them."
            )
        return logits

    def accept(self, token: int) -> None:
        """Advance by the sampled ``token``."""
        if self._grammar is not None:
            self._grammar.accept(token)
        self._count_token(token)

    def try_accept(self, token: int) -> bool:
        """``accept`` if the grammar allows ``token``; returns whether it does."""
        taken = self._grammar is None or self._grammar.try_accept(token)
        if taken:
            self._count_token(token)
        return taken

    def _count_token(self, token: int) -> None:
        self._count += 1
        self._counts[token] = self._counts.get(token, 0) + 1

    @property
    def finished(self) -> bool:
        """Whether the grammar allows no further token."""
        return self._grammar is not None and self._grammar.finished


def processors_of(
    params: SamplingParams, prompt: Sequence[int], eos: frozenset[int], grammar: GrammarState | None = None
) -> LogitsProcessors | None:
    """The processors that a request needs, or ``None``."""
    penalties = params.repetition_penalty != 1.0 or params.frequency_penalty or params.presence_penalty
    if not (penalties or params.biases or params.min_tokens or grammar):
        return None
    ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos)
    return LogitsProcessors(params, prompt if params.repetition_penalty != 1.0 else (), ends, grammar)


def _columns(values: dict[int, int] | dict[int, float]) -> tuple[Tensor, Tensor]:
    return torch.tensor(list(values), dtype=torch.long), torch.tensor(list(values.values()), dtype=torch.float32)
