"""How a block is divided between ranks: every piece has one place and one writer, whoever holds it."""

from __future__ import annotations

import random

import pytest

from stowage.plugins.vllm.division import Heads, Naming, Piece, Rank, divide


def held(stages: int, ranks: int, kv_heads: int, layers: int, *, each_head: bool) -> dict[Rank, list[list[Piece]]]:
    """One group of layers with heads; every third layer's are not known."""
    found = {}
    for stage in range(stages):
        for rank in range(ranks):
            count = max(1, kv_heads // ranks)
            first = rank * kv_heads // ranks
            known = {f"layer {at}": Heads(first, first + count, kv_heads, apart=True) for at in range(layers) if at % 3}
            naming = Naming(rank, ranks, known, each_head)
            mine = [f"layer {at}" for at in range(layers) if at % stages == stage]
            pieces = [
                Piece(name, 64 * count // max(1, len(naming.single(layer))), "")
                for layer in mine
                for name in naming.single(layer) or [naming.whole(layer)]
            ]
            found[stage, rank] = [pieces]
    return found


@pytest.mark.parametrize("each_head", [False, True])
@pytest.mark.parametrize(("stages", "ranks", "kv_heads"), [(1, 1, 4), (1, 4, 4), (1, 4, 2), (2, 4, 1), (2, 2, 8)])
def test_pieces_fill_a_block_and_have_one_writer_each(stages: int, ranks: int, kv_heads: int, each_head: bool) -> None:
    ranks_hold = held(stages, ranks, kv_heads, 7, each_head=each_head)
    division = divide(ranks_hold, by_name=each_head)
    begins: dict[str, int] = {}
    writers: dict[str, int] = {}
    for rank, shares in division.shares.items():
        for piece, begin, stores in zip(ranks_hold[rank][0], shares[0].offsets, shares[0].stores, strict=True):
            assert begins.setdefault(piece.name, int(begin)) == begin, "one place for all that hold it"
            writers[piece.name] = writers.get(piece.name, 0) + int(stores)
    assert set(writers.values()) == {1}
    at = 0
    for piece in division.pieces[0]:
        assert begins[piece.name] == at
        at += piece.nbytes
    assert at == division.bytes_per_block[0] <= division.bytes_held[0]
    assert division.bytes_held[0] == sum(piece.nbytes for pieces in ranks_hold.values() for piece in pieces[0])


def test_a_block_of_heads_is_the_same_at_every_division() -> None:
    def pieces(stages: int, ranks: int) -> list[Piece]:
        known = divide(held(stages, ranks, 4, 6, each_head=True), by_name=True).pieces[0]
        return [piece for piece in known if " rank " not in piece.name]

    assert pieces(1, 1) == pieces(1, 2) == pieces(2, 4) == pieces(3, 1)
    names = [piece.name for piece in pieces(1, 1)]
    assert len(names) == len(set(names)) == 16


def test_pieces_of_one_name_that_differ_are_not_shared() -> None:
    """Sizes or layouts that differ cannot be the same bytes, whatever they are called."""
    same, other = Piece("a", 64, "x"), Piece("a", 64, "y")
    division = divide({(0, 0): [[same]], (0, 1): [[other]]}, by_name=False)
    assert division.bytes_per_block == division.bytes_held == (128,)
    assert all(shares[0].stores.all() and (shares[0].twins == -1).all() for shares in division.shares.values())


def test_ranks_take_turns() -> None:
    """What four ranks hold alike, each stores a quarter of; a rank alone stores all of its own."""
    chance = random.Random(0)
    layers = [Piece(f"layer {at}", 64, "") for at in range(16)]
    own = {rank: Piece(f"of {rank}", 8 * chance.randrange(1, 9), "") for rank in range(4)}
    division = divide({(0, rank): [[*layers, own[rank]]] for rank in range(4)}, by_name=False)
    for rank in range(4):
        share = division.shares[0, rank][0]
        assert share.stores.tolist().count(True) == 5 and share.stores[-1]
        assert share.twins.tolist() == [0] * 16 + [-1]
