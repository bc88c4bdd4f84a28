"""The engine's state of one request: parameters, tokens, progress, keys and block tables.

Never allocates or frees blocks (``kv_manager`` does), never decides what runs next (``scheduler`` does).
"""

from __future__ import annotations

import enum
import sys
from dataclasses import dataclass, field

from torch import Tensor

from stowage.cache.prefix_planner import PrefixRequest
from stowage.core.geometry import Group, Kind
from stowage.core.key import SequenceKeys
from stowage.engine.detokenizer import Detokenizer
from stowage.engine.sampling import Sampler, TokenLogprob, logprobs_of
from stowage.engine.sampling_params import SamplingParams
from stowage.engine.swap.host_blocks import SwappedBlocks
from stowage.executor.batch import Work
from stowage.executor.hooks import SeenHooks
from stowage.executor.sequence_state import SequenceState


class Phase(enum.Enum):
    """Where a sequence stands. WAITING and PREEMPTED hold no device blocks."""

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


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


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence(SequenceState):
    """One request, as the engine computes it."""

    params: SamplingParams
    keys: SequenceKeys
    sampler: Sampler
    text: Detokenizer
    new_tokens_max: int
    phase: Phase = Phase.WAITING
    stored: list[int] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)
    prefix: PrefixRequest = field(default_factory=PrefixRequest)
    reused: dict[str, int] = field(default_factory=dict)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    own_from: int = sys.maxsize
    """From this position on its KV is not shared with other sequences, in either direction (``exactness``)."""
    unscored: int = sys.maxsize
    """The first prompt token whose log-probability is still to be computed; beyond the prompt: none is."""
    times: Times = field(default_factory=Times)
    preemptions: int = 0
    exact: bool = False
    hooks: SeenHooks | None = None
    """Those on the model that its keys speak of. Once there are others, nothing more is shared."""
    known_tokens: int = 0
    """How many tokens were shared when hooks were looked at last."""
    held: list[SwappedBlocks] = field(default_factory=list)
    """Its blocks in host memory, of which ``tables`` has the addresses while it runs."""

    @property
    def new_tokens(self) -> list[int]:
        return self.tokens[self.prompt_tokens :]

    @property
    def length_max(self) -> int:
        """Tokens that the sequence can come to; the last one sampled is never computed."""
        return self.prompt_tokens + self.new_tokens_max - 1

    def __post_init__(self) -> None:
        if self.params.prompt_logprobs is not None:
            self.prompt_logprobs = [None] * self.prompt_tokens
            self.unscored = max(1, self.params.prompt_logprobs_from)

    @property
    def scoring(self) -> bool:
        """Whether prompt log-probabilities are still to be computed, which need the logits of every token."""
        return self.unscored < self.prompt_tokens

    @property
    def reusable_tokens(self) -> int:
        """How many tokens, less the last, may come from a cache. Tokens to be scored must be computed."""
        return min(self.unscored if self.scoring else len(self.tokens), self.own_from + 1)

    @property
    def shared_tokens(self) -> int:
        """How many computed tokens other sequences may reuse."""
        return min(self.computed, self.own_from)

    def extend_keys(self) -> None:
        """Compute the keys of chunks that are complete and may be shared. Call after each step."""
        self._heed_hooks()
        self.keys.extend(self.tokens, self.shared_tokens)

    def _heed_hooks(self) -> None:
        """Once there are others than ``keys`` speak of, nothing is shared of what was computed since the last call."""
        if self.hooks is not None and self.hooks.are_others:
            self.own_from = min(self.own_from, self.known_tokens)
        self.known_tokens = self.shared_tokens

    def score(self, start: int, logits: Tensor) -> None:
        """Record log-probabilities of the prompt tokens after positions ``start``... from ``logits [count, vocab]``."""
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
        """Reset progress to zero; all tokens stay, generated ones included. They are computed with today's hooks."""
        self.computed = self.known_tokens = 0
        self._heed_hooks()
        self.stored = [0] * len(self.tables)
        self.freed = [0] * len(self.tables)


def snapshot_positions(sequence: Sequence, grid: int) -> tuple[int, int]:
    """The last two snapshot positions of the prompt: one where the same prompt can resume (at least one token must be
    left to compute), one where a longer prompt can.
    """
    return (sequence.prompt_tokens - 1) // grid * grid, sequence.prompt_tokens // grid * grid


def recurrent_cuts(sequence: Sequence, group: Group, snapshot_tokens: int) -> int:
    """The next position at which computing must stop so that a snapshot of recurrent state can be taken, at a multiple
    of ``snapshot_tokens`` or one of the ``snapshot_positions``; the sequence's end when none is due.
    """
    assert group.kind is Kind.RECURRENT
    start = sequence.computed
    stops = [start // snapshot_tokens * snapshot_tokens + snapshot_tokens]
    stops += snapshot_positions(sequence, group.block_tokens)
    return min((stop for stop in stops if stop > start), default=len(sequence.tokens))


def sequence_of(work: Work) -> Sequence:
    """The engine's own sequence behind what the executor was given."""
    assert isinstance(work.sequence, Sequence)
    return work.sequence
