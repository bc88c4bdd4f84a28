"""One request while it lives: its tokens, how far it is computed, its keys, and its block tables.

Owns the truth from which every batch is built. Never allocates or frees blocks (``residency`` does), never decides what
runs next (``scheduler`` does).
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from stowage.core.geometry import NULL_BLOCK, Group, Kind
from stowage.core.key import Chain, Media, group_keys
from stowage.engine.detokenizer import Detokenizer
from stowage.engine.sampler import Sampler, SamplingParams, TokenLogprob, logprobs_of
from stowage.tiers.protocol import Probe


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

    def extend(self, tokens: Items[int], end: int, media: Media = ()) -> None:
        """Take ``tokens`` up to ``end`` into account; ``media`` as in ``Chain.extend``, those that are new."""
        if end <= self._fed:
            return
        fresh = tokens[self._fed : end]
        digests = {size: chain.extend(fresh, media) for size, chain in self._chains.items()}
        for index, size in enumerate(self._sizes):
            self._keys[index] += group_keys(digests[size], index)
        self._fed = end

    def of(self, group: int) -> list[bytes]:
        """Keys of the complete chunks of ``group``, from chunk 0 on."""
        return self._keys[group]


@dataclass(slots=True)
class Times:
    """Seconds of the injected clock; 0 where it has not happened. ``admitted_s``: its prefix was looked up;
    ``started_s``: its prefix was in place.
    """

    arrived_s: float = 0.0
    admitted_s: float = 0.0
    started_s: float = 0.0
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
    waited_s: float = 0.0
    """Spent on answers, and on loads that did not bring the whole prefix, since it last ran."""
    probes: list[Probe] = field(default_factory=list)
    """Questions about its prompt that its admission waits for, ``probes_until_s`` at most."""
    probes_until_s: float = 0.0
    reused: dict[str, int] = field(default_factory=dict)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    own_from: int = sys.maxsize
    """From this position on its state is its own: others are not to reuse it, nor it theirs (``exactness``)."""
    unscored: int = sys.maxsize
    """The first prompt token whose log-probability is wanted and not known yet; beyond the prompt: none is."""
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

    def __post_init__(self) -> None:
        if self.params.prompt_logprobs is not None:
            self.prompt_logprobs = [None] * self.prompt_tokens
            self.unscored = max(1, self.params.prompt_logprobs_from)

    @property
    def scoring(self) -> bool:
        """Whether log-probabilities of the prompt are still to be found: then the logits of every token are needed."""
        return self.unscored < self.prompt_tokens

    @property
    def reusable_tokens(self) -> int:
        """Of how many tokens all but the last may come from a cache: what is to be scored must be computed."""
        return self.unscored if self.scoring else min(len(self.tokens), self.own_from + 1)

    @property
    def shared_tokens(self) -> int:
        """Of how many computed tokens the state may be reused by others."""
        return min(self.computed, self.own_from)

    def score(self, start: int, logits: Tensor) -> None:
        """Note the log-probabilities of the prompt tokens that follow the positions of ``logits`` ``[count, vocab]``,
        which begin at ``start``.
        """
        end = min(start + len(logits) + 1, self.prompt_tokens)
        if end <= self.unscored:
            return
        assert start < self.unscored, "a prompt token was passed over"
        assert self.params.prompt_logprobs is not None
        first = self.unscored - 1 - start
        targets = self.tokens[self.unscored : end]
        found = logprobs_of(logits[first : first + len(targets)], targets, self.params.prompt_logprobs)
        self.prompt_logprobs[self.unscored : end] = found
        self.unscored = end

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
