"""Attention of single tokens over padded block tables, where nothing depends on a length that the host knows.

Owns what a recorded decode step reads: shapes are fixed, and how much of a table is seen follows from tensors on the
device. ``attend`` is torch's version, for any device: it gathers the whole table, so the table should be no wider than
it has to be. A kernel that reads lengths on the device has the same signature (``Attend``) and takes its place.

    table of one sequence    | b7 | b2 | b9 | 0 | 0 |        bases: the position of the first key of b7
    keys                      s s s s s s s s s - - -         positions: the query's; later keys are not seen
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from stowage.core.geometry import Kind
from stowage.executor.attention_scores import Scores
from stowage.executor.attention_scores import attend as dense
from stowage.models.layout import visible

Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Kind, int, Scores], Tensor]
"""``attend`` below, or a kernel."""


@dataclass(frozen=True, slots=True)
class PagedKernel:
    """A kernel that may take the place of ``attend`` on some device, once ``paged_trial`` has tried it.

    ``piece_keys``: with fewer keys the kernel takes them in one piece. ``errors``: what its compiler and launcher
    raise. ``of_length``: ``attend`` for sequences of up to so many tokens, which sums a
    sequence's keys in one order whatever the longest of a step has; for steps of one number of sequences.
    """

    attend: Attend
    piece_keys: int
    errors: tuple[type[Exception], ...] = ()
    of_length: Callable[[int], Attend] | None = None


@dataclass(frozen=True, slots=True)
class Tables:
    """What a group's single queries read: ``blocks`` ``[sequences, blocks]``, filled up with the padding block;
    ``bases`` and ``positions`` ``[sequences]``: of a table's first key, and of the query. All int64, on the device.
    """

    blocks: Tensor
    bases: Tensor
    positions: Tensor
    kind: Kind
    window: int
    attend: Attend

    def read(self, query: Tensor, keys: Tensor, values: Tensor, scores: Scores) -> Tensor:
        """``attend`` over these tables."""
        tables = self.blocks, self.bases, self.positions
        return self.attend(query, keys, values, *tables, self.kind, self.window, scores)


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    blocks: Tensor,
    bases: Tensor,
    positions: Tensor,
    kind: Kind,
    window: int,
    scores: Scores,
) -> Tensor:
    """Attention ``[sequences, heads, value_dim]`` of one query per sequence.

    ``query`` is ``[sequences, heads, dim]``, ``keys`` and ``values`` ``[rows, block_tokens, kv_heads, dim]``; the rest
    as in ``Tables``. ``values`` may be the first columns of ``keys``. What is gathered and not seen must be finite:
    blocks are zeroed before they are given out.
    """
    count, heads, width = query.shape
    read_keys = _rows(keys, blocks)
    # columns that are no values ride along: of equal widths torch's fused kernel takes care
    read_values = read_keys if values.data_ptr() == keys.data_ptr() else _rows(values, blocks)
    key_positions = bases[:, None] + torch.arange(read_keys.shape[2], device=query.device)
    bias = torch.zeros(key_positions.shape, dtype=query.dtype, device=query.device)
    bias.masked_fill_(~visible(kind, window, positions[:, None], key_positions), float("-inf"))
    folded = query.reshape(count, read_keys.shape[1], heads // read_keys.shape[1], width)
    mixed = dense(folded, read_keys, read_values, bias[:, None, None], scores)
    return mixed[..., : values.shape[3]].reshape(count, heads, -1)


def _rows(view: Tensor, blocks: Tensor) -> Tensor:
    """``[sequences, kv_heads, keys, dim]`` of ``view`` ``[rows, block_tokens, kv_heads, dim]``."""
    return view[blocks].flatten(1, 2).transpose(1, 2)
