"""One request while it lives: its tokens, how far it is computed, its keys, and its block tables.

Owns the truth from which every batch is built. Never allocates or frees blocks (``residency`` does), never decides what
runs next (``scheduler`` does).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stowage.core.geometry import NULL_BLOCK, Group, Kind
from stowage.core.key import Chain, group_keys
from stowage.engine.detokenizer import Detokenizer
from stowage.engine.sampler import Sampler, SamplingParams, TokenLogprob


class Phase(enum.Enum):
    """Where a sequence stands. WAITING and PREEMPTED hold no device blocks."""

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class BlockTable:
    """Device block of each of a sequence's blocks, ``NULL_BLOCK`` where it has none; grows in place."""

    __slots__ = ("_blocks", "_length")

    def __init__(self) -> None:
        self._blocks = np.full(16, NULL_BLOCK, dtype=np.int64)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    @property
    def blocks(self) -> NDArray[np.int64]:
        """A view, valid until the table grows."""
        return self._blocks[: self._length]

    def append(self, blocks: Items[int]) -> None:
        end = self._length + len(blocks)
        if end > len(self._blocks):
            grown = np.full(max(end, 2 * len(self._blocks)), NULL_BLOCK, dtype=np.int64)
            grown[: self._length] = self.blocks
            self._blocks = grown
        self._blocks[self._length : end] = blocks
        self._length = end

    def take(self, first: int, end: int) -> list[int]:
        """Make the blocks ``[first, end)`` holes and return those that were held."""
        part = self.blocks[first:end]
        held: list[int] = part[part != NULL_BLOCK].tolist()
        part[:] = NULL_BLOCK
        return held

    def clear(self) -> list[int]:
        """Empty the table and return the blocks that it held."""
        held = self.take(0, self._length)
        self._length = 0
        return held


class SequenceKeys:
    """Content keys of a sequence's chunks, one chain per chunk size, extended as tokens become known."""

    def __init__(self, namespace: bytes, groups: Items[Group]) -> None:
        sizes = {group.chunk_tokens for group in groups}
        self._chains = {size: Chain(namespace, size) for size in sizes}
        self._sizes = [group.chunk_tokens for group in groups]
        self._keys: list[list[bytes]] = [[] for _ in groups]
        self._fed = 0

    def extend(self, tokens: list[int], end: int) -> None:
        """Take ``tokens`` up to ``end`` into account."""
        if end <= self._fed:
            return
        fresh = tokens[self._fed : end]
        digests = {size: chain.extend(fresh) for size, chain in self._chains.items()}
        for index, size in enumerate(self._sizes):
            self._keys[index] += group_keys(digests[size], index)
        self._fed = end

    def of(self, group: int) -> list[bytes]:
        """Keys of the complete chunks of ``group``, from chunk 0 on."""
        return self._keys[group]


@dataclass(slots=True)
class Times:
    """Seconds of the injected clock; 0 where it has not happened."""

    arrived_s: float = 0.0
    first_token_s: float = 0.0
    finished_s: float = 0.0


@dataclass(slots=True, eq=False)
class Sequence:
    """One request. ``computed`` tokens have their keys, values or state in the block tables."""

    id: int
    tokens: list[int]
    params: SamplingParams
    keys: SequenceKeys
    tables: list[BlockTable]
    sampler: Sampler
    text: Detokenizer
    prompt_tokens: int
    new_tokens_max: int
    phase: Phase = Phase.WAITING
    computed: int = 0
    stored: list[int] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)
    refused: set[bytes] = field(default_factory=set)
    reused: dict[str, int] = field(default_factory=dict)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[float | None] = field(default_factory=list)
    times: Times = field(default_factory=Times)
    preemptions: int = 0

    def table(self, group: int) -> NDArray[np.int64]:
        return self.tables[group].blocks

    @property
    def new_tokens(self) -> list[int]:
        return self.tokens[self.prompt_tokens :]

    @property
    def length_max(self) -> int:
        """Tokens that the sequence can come to; the last one drawn is never computed."""
        return self.prompt_tokens + self.new_tokens_max - 1

    def record_prompt_logprobs(self, start: int, logits: Tensor) -> None:
        """Note the log-probability of each prompt token that follows a position of ``logits`` ``[count, vocab]``, which
        begin at ``start``.
        """
        if not self.prompt_logprobs:
            self.prompt_logprobs = [None] * self.prompt_tokens
        end = min(start + len(logits), self.prompt_tokens - 1)
        if end > start:
            targets = torch.tensor(self.tokens[start + 1 : end + 1])
            found = logits[: end - start].log_softmax(-1).gather(-1, targets[:, None])[:, 0]
            self.prompt_logprobs[start + 1 : end + 1] = found.tolist()

    def restart(self) -> None:
        """Forget all that was computed; the tokens stay, the generated ones included."""
        self.computed = 0
        self.stored = [0] * len(self.tables)
        self.freed = [0] * len(self.tables)


def snapshot_places(sequence: Sequence, grid: int) -> tuple[int, int]:
    """The last two places before the prompt's end at which a later prompt can resume: one for the same prompt again (at
    least one token must be left to compute), one for a prompt that goes on from it.
    """
    return (sequence.prompt_tokens - 1) // grid * grid, sequence.prompt_tokens // grid * grid


def recurrent_cuts(sequence: Sequence, group: Group, snapshot_tokens: int) -> int:
    """The next position at which computing must stop so that a snapshot of recurrent state can be taken, at a multiple
    of ``snapshot_tokens`` or one of the ``snapshot_places``; the sequence's end when none is due.
    """
    assert group.kind is Kind.RECURRENT
    start = sequence.computed
    stops = [start // snapshot_tokens * snapshot_tokens + snapshot_tokens]
    stops += snapshot_places(sequence, group.block_tokens)
    return min((stop for stop in stops if stop > start), default=len(sequence.tokens))
