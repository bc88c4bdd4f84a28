"""One request while it lives: its tokens, how far it is computed, its keys, and its block tables.

Owns the truth from which every batch is built. Never allocates or frees blocks (``residency`` does), never decides what
runs next (``scheduler`` does).
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from stowage.core.geometry import NULL_BLOCK, Group, Kind
from stowage.core.key import Chain, Media, group_keys
from stowage.engine.detokenizer import Detokenizer
from stowage.engine.sampler import Sampler, SamplingParams, TokenLogprob, logprobs_of
from stowage.tiers.protocol import Probe

if TYPE_CHECKING:
    from stowage.engine.holding import Held
    from stowage.engine.pool import BlockPool


AWAY = -2
"""What stands in ``BlockTable.places`` for the first place of host memory; the kernels have it too."""


class Phase(enum.Enum):
    """Where a sequence stands. WAITING and PREEMPTED hold no device blocks."""

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class BlockTable:
    """Where each of a sequence's blocks lies: on the device, or away from it in host memory; grows in place.

    ``blocks`` has the device blocks, ``NULL_BLOCK`` where there is none; ``away`` the place in host memory of those
    that the device does not have, in units of ``TENSOR_ALIGNMENT_BYTES``, ``NULL_BLOCK`` where there is none.
    """

    __slots__ = ("_away", "_blocks", "_length", "is_away")

    def __init__(self) -> None:
        self._blocks = np.full(16, NULL_BLOCK, dtype=np.int64)
        self._away = np.full(16, NULL_BLOCK, dtype=np.int64)
        self._length = 0
        self.is_away = False
        """Whether some block is away."""

    def __len__(self) -> int:
        return self._length

    @property
    def blocks(self) -> NDArray[np.int64]:
        """A view, valid until the table grows."""
        return self._blocks[: self._length]

    @property
    def away(self) -> NDArray[np.int64]:
        """A view, valid until the table grows."""
        return self._away[: self._length]

    @property
    def places(self) -> NDArray[np.int64]:
        """Where each block is read: a device block, ``AWAY`` minus the place of one that is away, or ``NULL_BLOCK``."""
        if not self.is_away:
            return self.blocks
        return np.where(self.away != NULL_BLOCK, AWAY - self.away, self.blocks)

    def append(self, blocks: Items[int]) -> None:
        end = self._length + len(blocks)
        if end > len(self._blocks):
            self._blocks = self._grown(self._blocks, end)
            self._away = self._grown(self._away, end)
        self._blocks[self._length : end] = blocks
        self._length = end

    def _grown(self, array: NDArray[np.int64], least: int) -> NDArray[np.int64]:
        grown = np.full(max(least, 2 * len(array)), NULL_BLOCK, dtype=np.int64)
        grown[: self._length] = array[: self._length]
        return grown

    def take(self, first: int, end: int) -> list[int]:
        """Make the blocks ``[first, end)`` holes on the device and return those that were held."""
        part = self.blocks[first:end]
        held: list[int] = part[part != NULL_BLOCK].tolist()
        part[:] = NULL_BLOCK
        return held

    def send_away(self, indices: NDArray[np.int64], places: NDArray[np.int64]) -> list[int]:
        """The blocks ``indices`` are read at ``places`` from now on; those that were held on the device."""
        assert (self.away[indices] == NULL_BLOCK).all(), "a block is sent away twice"
        part = self.blocks[indices]
        self._blocks[indices] = NULL_BLOCK
        self._away[indices] = places
        self.is_away |= len(indices) > 0
        return [block for block in part.tolist() if block != NULL_BLOCK]

    def clear(self) -> list[int]:
        """Empty the table and return the device blocks that it held."""
        held = self.take(0, self._length)
        self._away[: self._length] = NULL_BLOCK
        self._length = 0
        self.is_away = False
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
    held: list[Held] = field(default_factory=list)
    """Its blocks in host memory, of which ``tables`` has the places while it runs."""

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

    def extend_keys(self) -> None:
        """Name the chunks that others may reuse, as far as it is computed."""
        self.keys.extend(self.tokens, self.shared_tokens)

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


def sequence_on_trial(id: int, tokens: list[int], groups: Items[Group]) -> Sequence:
    """One that nobody asked for, without blocks: to find out what a model does."""
    params = SamplingParams()
    return Sequence(
        id=id,
        tokens=tokens,
        params=params,
        keys=SequenceKeys(bytes(32), groups),
        tables=[BlockTable() for _ in groups],
        sampler=Sampler(params),
        text=Detokenizer(None, tokens, ()),
        prompt_tokens=len(tokens),
        new_tokens_max=1,
    )


def take_blocks(sequence: Sequence, pools: Items[BlockPool], end: int) -> None:
    """Give ``sequence`` every block of its tokens up to ``end`` that it has not yet. There must be room."""
    for pool, table in zip(pools, sequence.tables, strict=True):
        blocks = 1 if pool.group.kind is Kind.RECURRENT else -(-end // pool.group.block_tokens)
        taken = pool.allocate(max(0, blocks - len(table)))
        assert taken is not None, "a trial counted its room wrong"
        table.append(taken)
