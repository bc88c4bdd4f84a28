"""An overlapped load: compute a prefix from the front while tiers load it from the back, until the two meet.

    tokens   0 . . . . . . . computed ->            <- arrived . . . . . . . . end
             | on device or computed |   the gap   | pieces in host memory, pinned |

If loading takes about as long as computing, doing both at once takes about half as long. Pieces are fetched from the
last one towards the front, so neither side has to know how fast the other is; a load that fails or is late only means
that more is computed. (After Jin, Liu, Zhang, Mao, "Compute Or Load KV Cache? Why Not Both?", 2024, arXiv:2410.03065.)

Owns the pieces, their fetches, and how many tokens a step should compute, so that a step does not compute tokens that
arrive before it ends. Copies nothing and has no clock: the caller passes what is computed, and the time.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from stowage.cache.cost_model import CostModel, bytes_of_tiers
from stowage.cache.flow_types import Fetch, SourceArray
from stowage.core.geometry import BoolArray, IntArray, Kind, MaskArray
from stowage.core.groups import GroupStrategy

PIECES_MAX: Final = 8
"""A load has at most this many pieces; a piece is used only when all of it has arrived."""
_PATIENCE: Final = 1.5
"""A step may take at most this many times as long as the rest of the load; else waiting is better."""


class RowKeys(Protocol):
    """The keys of one prompt."""

    def of(self, group: int) -> list[bytes]:
        """The keys of its chunks."""


class ChunkFetcher(Protocol):
    """The part of ``TieredStore`` that is used here; a simulator has its own."""

    def sources(self, keys: list[bytes]) -> SourceArray:
        """Where a fetch would take each key from: -1 nowhere, 0 host, i + 1 tier i."""

    def fetch(self, wanted: Sequence[tuple[int, list[bytes]]], deadline_s: float) -> Fetch:
        """Load chunks into host memory and pin them there: (group, keys) pairs."""


@dataclass(slots=True)
class GroupChunks:
    """What one group of one row must load to resume: ``chunks``, with these ``keys``. ``on_device``: which of the
    needed blocks, from ``first_block`` on, the device has already.
    """

    row: int
    group: int
    first_block: int
    on_device: BoolArray
    chunks: Sequence[int]
    keys: list[bytes]


Fetched = tuple[GroupChunks, IntArray, MaskArray]
"""The chunks to fetch, and each one's slot and mask of valid blocks."""


class LoadState(enum.Enum):
    """OPEN: there is a gap, and pieces are in flight. MET: computing has reached what has arrived. OVER: a piece
    failed, or everything is computed.
    """

    OPEN = "open"
    MET = "met"
    OVER = "over"


@dataclass(slots=True)
class Piece:
    """Tokens from ``begin`` to the begin of the next piece. ``chunks[g]``, ``keys[g]``: the chunks of group g that are
    needed. ``nbytes``: their bytes in each tier below the host, when the load began.
    """

    begin: int
    chunks: list[list[int]]
    keys: list[list[bytes]]
    nbytes: dict[int, int]
    fetch: Fetch | None = None

    @property
    def here(self) -> bool:
        """Whether all of it has arrived."""
        fetch = self.fetch
        return fetch is not None and fetch.done and all((slots >= 0).all() for slots in fetch.slots)

    @property
    def failed(self) -> bool:
        """Whether some of it will not arrive."""
        return self.fetch is not None and self.fetch.done and not self.here


class OverlappedLoad:
    """Loads ``tokens`` of the prompt ``row``. ``step``: forwards end at multiples of it. ``pieces``: from the last one
    to the first; the first ``arrived`` of them have arrived.
    """

    def __init__(
        self,
        store: ChunkFetcher,
        strategies: Sequence[GroupStrategy],
        cost_model: CostModel,
        row: RowKeys,
        tokens: range,
        step: int,
        now_s: float,
    ) -> None:
        self._store = store
        self._strategies = strategies
        self._cost_model = cost_model
        self._step = step
        self._began_s = self._arrived_s = now_s
        self.end = tokens.stop
        self.pieces = self._cut(row, tokens)
        self.arrived = 0
        self.ask(tokens.start, now_s)

    @property
    def fetches(self) -> list[Fetch]:
        """All fetches so far; the caller releases them."""
        return [piece.fetch for piece in self.pieces if piece.fetch is not None]

    def _cut(self, row: RowKeys, tokens: range) -> list[Piece]:
        """Cut at chunk boundaries of all groups, so that no chunk is fetched twice."""
        groups = [strategy.group for strategy in self._strategies]
        grain = math.lcm(self._step, *(group.chunk_tokens for group in groups if group.kind is not Kind.RECURRENT))
        size = -(-len(tokens) // (PIECES_MAX * grain)) * grain
        begins = [*range(-(-self.end // grain) * grain - size, tokens.start, -size), tokens.start]
        return [self._piece(row, begin, stop) for begin, stop in zip(begins, [self.end, *begins], strict=False)]

    def _piece(self, row: RowKeys, begin: int, stop: int) -> Piece:
        """The chunks of these tokens that resuming at the end needs; a recurrent state belongs to the last piece."""
        chunks: list[list[int]] = []
        for strategy in self._strategies:
            size, needed = strategy.group.chunk_tokens, strategy.needed(self.end)
            if strategy.group.kind is Kind.RECURRENT:
                chunks.append([*needed] if stop == self.end else [])
            else:
                chunks.append([chunk for chunk in needed if (chunk + 1) * size > begin and chunk * size < stop])
        keys = [[row.of(group)[chunk] for chunk in wanted] for group, wanted in enumerate(chunks)]
        sources = [self._store.sources(wanted) for wanted in keys]
        return Piece(begin, chunks, keys, self._bytes_of(sources))

    def _bytes_of(self, sources: Sequence[SourceArray]) -> dict[int, int]:
        sizes = [strategy.group.bytes_per_chunk for strategy in self._strategies]
        return bytes_of_tiers(zip(sources, sizes, strict=True))

    # Under way

    def poll(self, computed: int, now_s: float) -> LoadState:
        """Check what has arrived, and fetch more. ``computed``: tokens of the prompt."""
        while self.arrived < len(self.pieces) and self.pieces[self.arrived].here:
            self.arrived += 1
            self._arrived_s = now_s
        if computed >= self.end or any(piece.failed for piece in self.pieces):
            return LoadState.OVER
        if self.gap(computed) == 0:
            return LoadState.MET
        self.ask(computed, now_s)
        return LoadState.OPEN

    def gap(self, computed: int) -> int:
        """Tokens that are neither computed nor loaded."""
        front = self.pieces[self.arrived - 1].begin if self.arrived else self.end
        return max(0, front - computed)

    def tokens(self, computed: int, count: int, now_s: float) -> int:
        """How many of the next ``count`` tokens a step should compute; 0: waiting for the load is faster."""
        gap = self.gap(computed)
        if self._cost_model.recompute_s(gap) is None:  # the measurements were dropped
            return min(count, gap)
        end = min(-(-self._meeting_point(computed, now_s) // self._step) * self._step, computed + gap)
        if self._cost_model.prefill_s(end - computed) > _PATIENCE * self._left_s(now_s):
            return 0
        return min(count, end - computed)

    def ask(self, computed: int, now_s: float) -> None:
        """Fetch the pieces up to the predicted meeting point and one more, since no fetch starts during a forward."""
        point = self._meeting_point(computed, now_s)
        for piece in self.pieces[self.arrived :]:
            if piece.fetch is None:
                piece.fetch = self._store.fetch([*enumerate(piece.keys)], now_s + self._cost_model.load_timeout_s)
            if piece.begin < point:
                break

    def _meeting_point(self, computed: int, now_s: float) -> int:
        """The token where computing and loading are predicted to meet."""
        gap, load_s = self.gap(computed), self._left_s(now_s)
        compute_s = self._cost_model.recompute_s(gap) or 0.0
        share = load_s / (load_s + compute_s) if load_s + compute_s else 1.0
        return computed + max(1, math.ceil(gap * share))

    def _left_s(self, now_s: float) -> float:
        """Predicted time to load the rest of the gap. Where it is overdue: as long again as it is late."""
        left = _sum(piece.nbytes for piece in self.pieces[self.arrived :])
        return abs(self._arrived_s + self._cost_model.load_s(left) - now_s)

    # Joining

    def fetched(self, computed: int) -> Iterator[Fetched]:
        """The chunks that have arrived, for a sequence with ``computed`` tokens."""
        here = [(piece, piece.fetch) for piece in reversed(self.pieces[: self.arrived]) if piece.fetch is not None]
        for index, strategy in enumerate(self._strategies):
            blocks = strategy.needed_blocks(self.end)
            device = computed // strategy.group.block_tokens if strategy.group.kind is not Kind.RECURRENT else 0
            chunks = [chunk for piece, _ in here for chunk in piece.chunks[index]]
            keys = [key for piece, _ in here for key in piece.keys[index]]
            if chunks:
                slots = np.concatenate([fetch.slots[index] for _, fetch in here])
                masks = np.concatenate([fetch.masks[index] for _, fetch in here])
                yield GroupChunks(0, index, blocks.start, np.array(blocks) < device, chunks, keys), slots, masks

    def main_source(self) -> int:
        """The tier that most loaded bytes came from: 0 is host memory, i + 1 tier i."""
        fetches = [piece.fetch for piece in self.pieces[: self.arrived]]
        below = _sum(self._bytes_of(fetch.sources) for fetch in fetches if fetch is not None)
        return max(below, key=lambda tier: below[tier], default=0)

    def learn(self, now_s: float) -> None:
        """Update the cost model. Arrivals during a forward are noticed only after it, so there are only bounds: what
        has arrived took at most until now, and if something is still in flight, not everything has arrived by now.
        """
        seconds = max(now_s - self._began_s, 1e-9)
        asked = _sum(piece.nbytes for piece in self.pieces if piece.fetch is not None)
        came = _sum(self._bytes_of(fetch.sources) for fetch in self.fetches)
        on_their_way = any(not fetch.done for fetch in self.fetches)
        for tier, count in asked.items():
            self._cost_model.bounded(tier, came.get(tier, 0) / seconds, count / seconds if on_their_way else math.inf)


def _sum(parts: Iterable[dict[int, int]]) -> dict[int, int]:
    """Bytes by tier, all together."""
    total = Counter[int]()
    for part in parts:
        total.update(part)
    return total
