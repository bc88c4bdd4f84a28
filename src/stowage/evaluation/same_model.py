"""Checks that the engine computes the same model as Transformers, up to a measured rounding error.

Rounding differs wherever sums have another order, and its effect depends on the model: its depth, dtype, and how peaked
its answers are. So the bound is measured with the same model and prompts: plain Transformers computes each prompt and
its answer in one forward, again from a cache, the end token by token, and once more with embeddings that are rounded
otherwise: routers of experts choose others then, which no other order of computing may show. The engine's difference
from the first may be a few times that of the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stowage.engine.request import Completion
from stowage.models.state_access import forward, keeper_of

_TIMES = 4.0
"""How many times as far as Transformers is from itself, at most: the largest of some hundred differences varies by so
much between seeds."""
_LEAST = {torch.float32: 1e-4}
"""The least bound: on a few prompts Transformers' own difference may be small by luck. Real errors are far larger."""
_SINGLES = 8
"""Of the prompt's last tokens, that Transformers computes one by one when it goes on from a cache."""


@dataclass(frozen=True, slots=True)
class SameModel:
    """Largest differences of log-probabilities (natural logarithm): ``difference`` of the engine's from Transformers',
    ``own`` of Transformers' from its own, computed otherwise; ``bound``: of the first, so that both run one model.
    """

    difference: float
    own: float
    bound: float

    @property
    def same(self) -> bool:
        """Whether both run one model. Never with a NaN."""
        return self.difference <= self.bound

    def as_json(self) -> dict[str, Any]:
        return {"same": self.same, "difference": self.difference, "transformers_own": self.own, "bound": self.bound}


@torch.inference_mode()
def compare(model: Any, answers: Iterable[tuple[Sequence[int], Completion]], times: float = _TIMES) -> SameModel:
    """``model``: in memory, with Transformers' own attention again. ``answers``: prompts, and what the engine gave with
    log-probabilities. ``times``: how many times as far as Transformers is from itself.
    """
    with _capping(model):
        return _compared(model, answers, times)


@contextmanager
def _capping(model: Any) -> Iterator[None]:
    """Scores of attention are capped where the config says so: torch's own attention, which Transformers 5.17 takes by
    itself, leaves that out without a word.
    """
    config = model.config.get_text_config()
    before = config._attn_implementation
    leaves_out = before == "sdpa" and bool(getattr(config, "attn_logit_softcapping", None))
    if leaves_out:
        config._attn_implementation = "eager"
    try:
        yield
    finally:
        config._attn_implementation = before


@contextmanager
def _rounded_otherwise(model: Any) -> Iterator[None]:
    """Every second number of an embedding is the next that its dtype has."""

    def moved(_module: Any, _inputs: Any, embedded: Tensor) -> Tensor:
        odd = torch.arange(embedded.shape[-1], device=embedded.device) % 2
        return embedded * (1 + torch.finfo(embedded.dtype).eps * odd).to(embedded.dtype)

    hook = model.get_input_embeddings().register_forward_hook(moved)
    try:
        yield
    finally:
        hook.remove()


def _compared(model: Any, answers: Iterable[tuple[Sequence[int], Completion]], times: float) -> SameModel:
    difference = own = least = 0.0
    for prompt, answer in answers:
        tokens = [*prompt, *answer.token_ids[:-1]]
        whole = _logprobs(model, tokens, [len(tokens)], len(answer.token_ids))
        begun = max(1, len(prompt) - _SINGLES)
        again = _logprobs(model, tokens, [begun, *[1] * (len(tokens) - begun)], len(answer.token_ids))
        with _rounded_otherwise(model):
            nearby = _logprobs(model, tokens, [len(tokens)], len(answer.token_ids))
        for other in (again, nearby):
            own = max(own, float((whole - other).abs()[_reported(whole, answer)].max()))
        found = [
            abs(value - float(row[token]))
            for row, report in zip(whole, answer.logprobs or (), strict=True)
            for token, value in [(report.token_id, report.logprob), *report.top]
        ]
        difference = max(difference, float(torch.tensor(found).max()))  # NaN stays NaN
        least = max(least, float(whole.abs().max()) * torch.finfo(model.dtype).eps)
    return SameModel(difference, own, max(times * own, least, _LEAST.get(model.dtype, 0.0)))


def _reported(whole: Tensor, answer: Completion) -> Tensor:
    """A mask of ``whole``: the tokens that the answer says something of."""
    mask = torch.zeros_like(whole, dtype=torch.bool)
    for row, report in zip(mask, answer.logprobs or (), strict=True):
        row[[report.token_id, *(token for token, _ in report.top)]] = True
    return mask


def _logprobs(model: Any, tokens: Sequence[int], sizes: Sequence[int], last: int) -> Tensor:
    """Log-probabilities ``[last, vocab]`` after the last so many tokens, computed in pieces of these sizes."""
    keeper = keeper_of(model)
    cache, begin, rows = keeper.fresh(model.config), 0, []
    for size in sizes:
        rows.append(forward(model, tokens[begin : begin + size], begin, cache, every_logit=True)[-last:])
        begin += size
    return torch.cat(rows)[-last:].float().log_softmax(-1).cpu()
