"""Splits a step's work into forwards, and chooses the shape of each.

    OWN      as many rows as there are tokens
    STATIC   decode tokens in static inputs (``static_steps``): for CUDA graphs, or if a device's sums depend on shapes
    PIECES   several pieces of one prompt, each multiplied in the shape of a piece alone (``determinism.slices``)

One forward for everything if the family allows it; for recurrent families one forward for all decode tokens, and one
for each prefill run; exact prompts piece by piece. ``batch`` and ``static_steps`` make the tensors, ``runner``
computes.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from stowage.executor.batch import Work, is_decode, order


class ForwardShape(enum.Enum):
    """The shape of a forward; see the module."""

    OWN, STATIC, PIECES = enum.auto(), enum.auto(), enum.auto()


class Forward(NamedTuple):
    """One forward: its ``work`` and its shape."""

    work: Sequence[Work]
    shape: ForwardShape


@dataclass(slots=True)
class Forwards:
    """Cuts a step's work into forwards, for one model on one device.

    Args:
        ragged: whether tokens of several sequences may be one flattened forward.
        continues: whether a run may continue from a state; else it is computed token by token.
        exact: whether a token's bits must not depend on the batch.
        piece_tokens: exact prompts are cut at multiples of this into separate forwards; 0: anywhere.
        singles: with ``piece_tokens``: whether decode tokens of several sequences are one forward.
        rows: most tokens of such a forward; 0: any number.
        static: whether decode tokens are computed in static inputs.
        pieces_at_once: whether several pieces of a prompt may be one forward, as a trial has shown.
    """

    ragged: bool
    continues: bool
    exact: bool
    piece_tokens: int
    singles: bool
    rows: int
    static: bool
    pieces_at_once: bool = False

    def cut(self, work: Sequence[Work]) -> list[tuple[list[Work], Iterable[Forward]]]:
        """Groups of ``work``, each with its forwards, decode tokens first. What takes several is a group of its own."""
        return [
            (part, (self._forward(part),) if self._at_once(part) else self._in_turn(part[0]))
            for part in self._parts(order(work))
        ]

    def _parts(self, work: list[Work]) -> list[list[Work]]:
        if self.piece_tokens and not self.singles:
            return [[w] for w in work]
        if self.ragged and not self.piece_tokens:
            return [work]
        singles = [w for w in work if w.count == 1 and w.start > 0]
        most = self.rows or len(singles) or 1
        together = [singles[at : at + most] for at in range(0, len(singles), most)]
        return together + [[w] for w in work if w.count > 1 or w.start == 0]

    def _at_once(self, work: list[Work]) -> bool:
        if work[0].count == 1:
            return True
        if self.continues:
            return not self.piece_tokens or self._piece_end(work[0].start) >= work[0].start + work[0].count
        return work[0].start == 0 and not self.exact  # prefill at once, then token by token: different bits

    def _forward(self, work: Sequence[Work]) -> Forward:
        return Forward(work, ForwardShape.STATIC if self.static and is_decode(work) else ForwardShape.OWN)

    def _in_turn(self, work: Work) -> Iterator[Forward]:
        """A run of one sequence, piece by piece, or token by token if its model can continue from a state only so."""
        begin, stop, tokens = work.start, work.start + work.count, self.piece_tokens
        if self.pieces_at_once and not work.every_logit and begin % tokens == 0:
            whole = work.count // tokens
            if whole > 1:
                at = range(begin, begin + whole * tokens, tokens)
                yield Forward([replace(work, start=start, count=tokens) for start in at], ForwardShape.PIECES)
                begin += whole * tokens
        while begin < stop:
            end = min(self._piece_end(begin), stop) if self.continues else begin + 1
            yield self._forward([replace(work, start=begin, count=end - begin)])
            begin = end

    def _piece_end(self, token: int) -> int:
        return (token // self.piece_tokens + 1) * self.piece_tokens
