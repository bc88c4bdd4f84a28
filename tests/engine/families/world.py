"""A family's tiny model, and plain Transformers as what the engine's answers are held against.

Transformers computes with its ``eager`` attention: it is the definition of a model, and the only one that never leaves
out what a family adds to its scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from stowage.engine.request import Completion
from stowage.testing import tiny_models
from tests.engine.conftest import LOGPROB_BOUND

IN_DOUBLE = frozenset({"xlstm"})
"""Families that Transformers computes in float64 here: its float32 was off by 4.5e-4 from that, the engine by 5e-6."""


class World:
    """``model``, for engines, and a second one of the same bytes that no engine touches."""

    def __init__(self, family: str, context_tokens: int = 512, **overrides: Any) -> None:
        self.family = (tiny_models.TABLE | tiny_models.REFUSED)[family]
        size = tiny_models.TinySize(layers=self.family.layers, context_tokens=context_tokens)
        self.fresh = partial(tiny_models.build, family, size, **overrides)
        self.model, self.plain = self.fresh(), self.fresh()
        self.plain.set_attn_implementation("eager")
        if family in IN_DOUBLE:
            self.plain.double()

    def generate(self, prompt: list[int], new_tokens: int) -> list[int]:
        """Greedy tokens of plain ``generate()``."""
        ids = torch.tensor([prompt])
        options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": new_tokens}
        with torch.inference_mode():
            out = self.plain.generate(ids, attention_mask=torch.ones_like(ids), **options)
        return out[0, len(prompt) :].tolist()

    def check(self, prompt: list[int], completion: Completion) -> None:
        """Every token of ``completion`` is the likeliest after all before it, with Transformers' log-probability: what
        ``generate()`` would have drawn, in one forward.
        """
        tokens, count = completion.token_ids, len(completion.token_ids)
        ids = torch.tensor([prompt + tokens[:-1]])
        with torch.inference_mode():
            logits = self.plain(ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0, -count:].float()
        assert tokens == logits.argmax(-1).tolist()
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0].tolist()
        found = [report.logprob for report in completion.logprobs or []]
        assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < LOGPROB_BOUND

    def check_all(self, prompts: Sequence[list[int]], completions: Sequence[Completion]) -> None:
        for prompt, completion in zip(prompts, completions, strict=True):
            self.check(prompt, completion)
