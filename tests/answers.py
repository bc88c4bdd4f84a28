"""What an engine answered, as values that are equal only where every bit is.

assert bits(offloaded.generate(prompts, params)) == bits(roomy.generate(prompts, params))
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from stowage.engine.request import Completion


def bits(completions: Iterable[Completion]) -> list[Any]:
    """See ``answer_bits``."""
    return [answer_bits(completion) for completion in completions]


def answer_bits(completion: Completion) -> Any:
    """An answer's tokens, and their log-probabilities with those of the likeliest others."""
    return completion.token_ids, completion.logprobs
