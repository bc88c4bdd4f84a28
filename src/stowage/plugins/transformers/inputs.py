"""Checks the tokens that a caller gives, and how many of them may be stored or restored.

``generate()`` takes pad tokens for padding when it is given no attention mask (unless padding is also the end of text):
it masks them and counts positions without them. So what comes after one is not named by tokens alone, and is neither
stored nor restored, unless the caller says with an attention mask of ones that every token counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stowage.errors import RequestError
from stowage.models.loading import eos_ids

Tokens = Tensor | Sequence[int] | Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Rows:
    """The tokens of one call, ``tokens[row]``, of one length. The first ``plain`` certainly count as they are."""

    tokens: list[list[int]]
    plain: int

    @property
    def length(self) -> int:
        return len(self.tokens[0])

    @property
    def count(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class Padding:
    """The token that ``generate()`` pads with, and whether it would take that token in a prompt for padding."""

    token: int | None
    inferred: bool


def padding_of(model: Any) -> Padding:
    """As ``generate()`` has it: without a pad token it pads with the end of text, and infers nothing."""
    settings, config = getattr(model, "generation_config", None), model.config
    token = getattr(settings, "pad_token_id", None)
    if token is None:
        token = getattr(config, "pad_token_id", None)
    ends = eos_ids(model)
    if token is None:
        return Padding(min(ends, default=None), False)
    return Padding(int(token), int(token) not in ends)


def rows_of(ids: Any, attention_mask: Tensor | None, padding: Padding, *, prompt: bool = True) -> Rows:
    """Token ids ``[tokens]`` or ``[rows, tokens]``, as a tensor or lists; what ``generate()`` returns, too.

    ``prompt``: they are about to be computed, so padding at their beginning is a mistake to be told about; of what was
    computed already nothing counts then. Raises ``RequestError`` for rows of unequal length, padding on the left, an
    attention mask with zeros.
    """
    tokens = _listed(getattr(ids, "sequences", ids))
    length = len(tokens[0])
    if not length or any(len(row) != length for row in tokens):
        raise RequestError("the rows of input_ids are empty, or of unequal lengths: prompts of one length go together.")
    if any(min(row) < 0 or max(row) >= 1 << 32 for row in tokens):
        raise RequestError("token ids are numbers from 0 to 2**32 - 1; input_ids has others.")
    if attention_mask is not None:
        if not isinstance(attention_mask, Tensor):
            raise RequestError(f"the attention mask is a tensor, not {type(attention_mask).__name__}.")
        if not bool(attention_mask.bool().all()):
            raise RequestError(
                "the attention mask has zeros: padded batches are not supported. Give prompts one by one, or batches "
                "of prompts of equal length."
            )
        return Rows(tokens, length)
    first = [row.index(padding.token) if padding.token in row else length for row in tokens]
    if prompt and min(first) == 0:
        raise RequestError(
            f"a prompt begins with the pad token {padding.token}: padding on the left is not supported. If it is a "
            "token like any other, say so with attention_mask=torch.ones_like(input_ids), here and to generate()."
        )
    return Rows(tokens, min(first) if padding.inferred or min(first) == 0 else length)


def _listed(ids: Any) -> list[list[int]]:
    if isinstance(ids, Tensor):
        if ids.dim() not in (1, 2) or ids.dtype.is_floating_point or ids.dtype is torch.bool:
            raise RequestError(f"token ids are integers of shape [tokens] or [rows, tokens], not {tuple(ids.shape)}.")
        listed: list[list[int]] = (ids if ids.dim() == 2 else ids[None]).tolist()
    elif isinstance(ids, list | tuple):
        listed = [list(row) for row in ids] if ids and isinstance(ids[0], list | tuple) else [list(ids)]
    else:
        raise RequestError(
            f"token ids are a tensor or a list, not {type(ids).__name__}; of a tokenizer's output give its input_ids."
        )
    if not listed or not all(isinstance(token, int) and token >= 0 for row in listed for token in row):
        raise RequestError("token ids are whole numbers of 0 or more, and there is at least one.")
    return listed
