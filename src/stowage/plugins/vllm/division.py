"""How a block is divided between ranks: pieces by layer and head, each stored once however many ranks hold it.

Owns the names of pieces, which say what they are: equal names are equal bytes. With tensor parallelism that is so of an
MLA latent, which every rank has, and of KV heads that are fewer than the ranks. Where heads can be told apart and users
ask for it, each head is a piece, and a block is the same at every division of the model.

    piece               rank 0    rank 1              bytes of the block
    layer 0, head 0     holds     holds, the same     stored by rank 0, loaded by both
    layer 1, head 0     holds     holds, the same     stored by rank 1, loaded by both
    layer 2, unknown    of rank 0                     stored and loaded by rank 0
    layer 2, unknown              of rank 1           stored and loaded by rank 1
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from stowage.core.geometry import BoolArray, IntArray

Rank = tuple[int, int]
"""Pipeline rank and tensor rank."""


@dataclass(frozen=True)
class Heads:
    """The KV heads of a layer that a rank holds: ``first`` up to ``stop`` of ``total``. An MLA latent counts as one.
    ``apart``: its attention backend keeps each head's bytes for itself.
    """

    first: int
    stop: int
    total: int
    apart: bool = False


@dataclass(frozen=True)
class Naming:
    """How tensor rank ``rank`` of ``ranks`` names its pieces. ``heads``: by layer, where they are known; what other
    layers keep is the rank's own. ``each_head``: is a piece, where a layer has its heads apart. ``backends``: by layer.
    """

    rank: int = 0
    ranks: int = 1
    heads: Mapping[str, Heads] = field(default_factory=dict)
    each_head: bool = False
    backends: Mapping[str, str] = field(default_factory=dict)

    def whole(self, layer: str) -> str:
        """Of all that this rank keeps of a layer."""
        heads = self.heads.get(layer)
        if heads is None:
            return f"{layer} rank {self.rank} of {self.ranks}"
        return f"{layer} heads {heads.first:05} to {heads.stop:05} of {heads.total}"

    def single(self, layer: str) -> list[str]:
        """Of each head that this rank keeps of a layer; empty where heads are no pieces."""
        heads = self.heads.get(layer)
        if heads is None or not (self.each_head and heads.apart):
            return []
        return [f"{layer} head {head:05} of {heads.total}" for head in range(heads.first, heads.stop)]


@dataclass(frozen=True)
class Piece:
    """A part of each block of a group. ``name``: the same on two ranks that hold the same bytes. ``layout``: text that
    differs when the order or meaning of the bytes does.
    """

    name: str
    nbytes: int
    layout: str

    @property
    def is_of_one_size(self) -> bool:
        """Whether it is all that a rank keeps of a layer: with another number of ranks there is none of this name."""
        return " rank " in self.name or " heads " in self.name


@dataclass(frozen=True, eq=False)
class Share:
    """The pieces of a group that one rank has; arrays by its pieces. ``offsets``: in bytes, where each begins in a
    stored block; ``stores``: whether this rank stores it; ``twins``: a number for those that the same several ranks
    hold, -1 for those that no other has.
    """

    offsets: IntArray
    stores: BoolArray
    twins: IntArray


@dataclass(frozen=True, eq=False)
class Division:
    """By group: ``pieces`` of a stored block in their order, ``bytes_per_block``, their sum, and ``bytes_held``, of all
    ranks together. ``shares``: by rank and group.
    """

    pieces: tuple[tuple[Piece, ...], ...]
    bytes_per_block: tuple[int, ...]
    bytes_held: tuple[int, ...]
    shares: dict[Rank, tuple[Share, ...]]


def divide(held: Mapping[Rank, Sequence[Sequence[Piece]]], *, by_name: bool) -> Division:
    """Where pieces lie in a block, and which rank stores each. ``held``: by rank and group. ``by_name``: in an order
    that no number of ranks changes; else each rank's side by side. What several ranks hold they store by turns.
    """
    groups = len(next(iter(held.values())))
    divided = [_divide({rank: held[rank][group] for rank in sorted(held)}, by_name) for group in range(groups)]
    pieces = tuple(found for found, _ in divided)
    return Division(
        pieces,
        tuple(sum(piece.nbytes for piece in found) for found in pieces),
        tuple(sum(piece.nbytes for rank in held for piece in held[rank][group]) for group in range(groups)),
        {rank: tuple(shares[rank] for _, shares in divided) for rank in held},
    )


def _divide(held: Mapping[Rank, Sequence[Piece]], by_name: bool) -> tuple[tuple[Piece, ...], dict[Rank, Share]]:
    held = _unlike_apart(held)
    holders: dict[str, list[Rank]] = {}
    by_names: dict[str, Piece] = {}
    for rank, pieces in held.items():
        for piece in pieces:
            holders.setdefault(piece.name, []).append(rank)
            by_names[piece.name] = piece
    order = sorted(by_names) if by_name else list(by_names)
    begins = dict(zip(order, np.cumsum([0, *(by_names[name].nbytes for name in order)]).tolist(), strict=False))
    turns: Counter[tuple[Rank, ...]] = Counter()
    twins: dict[tuple[Rank, ...], int] = {}
    writer: dict[str, Rank] = {}
    for name in order:
        those = tuple(holders[name])
        writer[name] = those[turns[those] % len(those)]
        turns[those] += 1
        if len(those) > 1:
            twins.setdefault(those, len(twins))
    return tuple(by_names[name] for name in order), {
        rank: Share(
            np.array([begins[piece.name] for piece in pieces], dtype=np.int64),
            np.array([writer[piece.name] == rank for piece in pieces], dtype=np.bool_),
            np.array([twins.get(tuple(holders[piece.name]), -1) for piece in pieces], dtype=np.int64),
        )
        for rank, pieces in held.items()
    }


def _unlike_apart(held: Mapping[Rank, Sequence[Piece]]) -> dict[Rank, list[Piece]]:
    """Pieces of one name that differ in size or layout cannot be the same bytes: each is its rank's own."""
    seen: dict[str, set[Piece]] = {}
    for pieces in held.values():
        for piece in pieces:
            seen.setdefault(piece.name, set()).add(piece)
    return {
        rank: [
            piece if len(seen[piece.name]) == 1 else Piece(f"{piece.name} on {rank}", piece.nbytes, piece.layout)
            for piece in pieces
        ]
        for rank, pieces in held.items()
    }
