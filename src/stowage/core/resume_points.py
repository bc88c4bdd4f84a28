"""Resume points: the boundaries of a prompt for which windows and recurrent states are kept.

Full attention needs all chunks before a boundary, so with all of them any boundary can be resumed. A window is needed
only where a prompt resumes, and a state only exactly there. Kept for all boundaries they would take most of a hybrid's
memory, so they are kept for points, whose distance grows with the position (`least` 128, `share` 2):

    tokens     0   128  256  384  512       768       1024                1536                2048 ...
    points         |    |    |    |         |         |                   |                   |
    distance   128                256                 512                                     1024

They are also kept where a later prompt is likely to resume: from a prompt's end on (`tail`), and where it was seen to
diverge from another (`junction`). A prompt that diverges from a stored one between two points recomputes from the point
before: less than 1 / (share + 1) of what the two share, or less than `least`. It keeps what a resume at its own
junction needs, for the next such prompt.

Points are absolute positions that depend on nothing else, so prompts with a common prefix share them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from stowage.core.geometry import BoolArray, IntArray, Kind
from stowage.core.groups.base import GroupStrategy

NOWHERE: Final = 1 << 62
"""The point after the last one."""
_TEMPLATE_TOKENS: Final = 16
"""What a chat template may append to a prompt, such as the marks that an answer begins, and that reasoning begins."""


def tail_of(length: int, chunk_tokens: int) -> int:
    """The position from which on everything of a prompt is kept: the last multiple of `chunk_tokens` (a chunk of all
    groups) that leaves the prompt's last token, and what a template may have appended, after it.

    The appended tokens are not part of the next turn of a conversation, and a chunk is found whole or not at all: so
    the next turn resumes there, or later where the answer is part of that turn.
    """
    return max(0, length - 1 - _TEMPLATE_TOKENS) // chunk_tokens * chunk_tokens


@dataclass(frozen=True, slots=True)
class Points:
    """The rule that says which positions of a prompt are resume points. `least`: the shortest distance in tokens, a
    multiple of the chunks of all groups; 1: every boundary is a point; 0: none is. `share`: the distance at p is the
    largest `least * 2**n` that is at most p / share; 0: always `least`.
    """

    least: int
    share: int = 0

    def __post_init__(self) -> None:
        assert self.least >= 0 and self.share >= 0, (self.least, self.share)

    @property
    def everywhere(self) -> bool:
        """Whether every boundary is a point."""
        return self.least == 1

    def distances(self, positions: IntArray) -> IntArray:
        """How far apart points are at these positions."""
        if not self.share:
            return np.full_like(positions, self.least)
        _, exponents = np.frexp(np.maximum(positions // (self.share * self.least), 1))
        return self.least << (exponents.astype(np.int64) - 1)

    def following(self, positions: IntArray) -> IntArray:
        """The first point at or after each position, or NOWHERE."""
        if not self.least:
            return np.full_like(positions, NOWHERE)
        distances = self.distances(positions)
        return -(-positions // distances) * distances

    def crossed(self, begin: int, end: int) -> bool:
        """Whether there is a point after `begin`, and not after `end`."""
        return int(self.following(np.array([begin + 1], dtype=np.int64))[0]) <= end

    def kept(
        self, strategy: GroupStrategy, chunks: range, tail: int = NOWHERE, junction: int = 0, end: int = NOWHERE
    ) -> BoolArray:
        """Which of these chunks a resume at some point needs, or at `junction`, or at a boundary from `tail` to `end`.

        `tail` and `junction` are multiples of block_tokens. Of a recurrent group: the states at exactly these
        positions. Of other groups all is kept from `tail` on, though a window of one token needs nothing there.
        """
        numbers = np.arange(chunks.start, chunks.stop, dtype=np.int64)
        if self.everywhere or strategy.group.kind is Kind.FULL or not len(numbers):
            return np.ones(len(numbers), dtype=np.bool_)
        size = strategy.group.chunk_tokens
        assert self.least % size == 0, (self.least, size)
        # Of the points after a chunk's first token the nearest reads farthest back, and reads up to its own position.
        points, of_chunk = np.unique(self.following(numbers * size + 1), return_inverse=True)
        reads = [strategy.needed(point) if point != NOWHERE else range(0) for point in points.tolist()]
        starts = np.array([chunks.start for chunks in reads], dtype=np.int64)[of_chunk]
        stops = np.array([chunks.stop for chunks in reads], dtype=np.int64)[of_chunk]
        parted = strategy.needed(junction)
        kept: BoolArray = (starts <= numbers) & (numbers < stops)
        kept |= (parted.start <= numbers) & (numbers < parted.stop)
        if tail != NOWHERE:
            kept |= (numbers >= strategy.needed(tail).start) & (numbers < end // size)
        return kept
