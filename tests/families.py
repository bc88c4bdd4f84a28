"""Families of models for tests that would try every one of them."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

ONE_OF_EACH = frozenset(
    "llama qwen3_moe deepseek_v3 gemma2 gemma3n gemma4 gpt_oss llama4 gpt2 bitnet longcat_flash "
    "mimo_v2_flash qwen3_next nemotron_h kimi_linear bamba falcon_h1 lfm2 zamba2 mamba2 "
    "jamba zaya deepseek_v32 deepseek_v4 falcon minimax recurrent_gemma rwkv xlstm doge".split()
)
"""One for each way to compute, and for each reason to run on the fallback executor."""
MOST_UNLIKE = tuple(
    "llama qwen3_moe deepseek_v3 gemma2 gemma4 gpt_oss llama4 gpt2 qwen3_next nemotron_h lfm2 rwkv".split()
)
"""A few of them, for what takes long: the others compute more like one of these."""


def all_of(names: Iterable[str], *marks: pytest.MarkDecorator, of: frozenset[str] = ONE_OF_EACH) -> list[object]:
    """Parameters: those of `of` as they are, the others for `make families`, with these marks too."""
    more = [pytest.mark.every_family, *marks]
    return [name if name in of else pytest.param(name, marks=more) for name in names]
