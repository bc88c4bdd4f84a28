"""Bytes that several ranks hold alike are stored once, and chunks that name heads serve another number of ranks: vLLM's
engine core over ranks that check every byte they read (see ``ranks``). Each test runs in a process of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.vllm.child import FULL, HYBRID, KEPT, MLA, Run
from tests.vllm.oracle import prompt


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kinds", "kv_heads", "division", "copies"),
    [
        (MLA, 4, (1, 4), 4),
        (MLA, 4, (2, 2), 2),
        (FULL, 1, (1, 4), 4),
        (FULL, 2, (1, 4), 2),
        (HYBRID, 2, (1, 4), 2),
        (FULL, 4, (1, 4), 1),
        (["full"] * 2 + ["mla"] * 2, 4, (1, 2), None),
    ],
)
def test_what_ranks_hold_alike_is_stored_once(
    kinds: list[str], kv_heads: int, division: tuple[int, int], copies: int | None, run: Run
) -> None:
    """Every rank gets all its bytes back, and the ranks share the work of storing them."""
    run(stored_once, kinds, kv_heads, division, copies)


def stored_once(
    directory: Path, kinds: list[str], kv_heads: int, division: tuple[int, int], copies: int | None
) -> None:
    from tests.vllm.pipeline import Engine

    engine = Engine(directory, kinds, division=division, kv_heads=kv_heads)
    tokens = prompt(400)
    assert engine.ask("cold", tokens) == 0
    engine.assert_comes_back(tokens)
    held = [
        sum(piece.nbytes for group in rank.connector._worker.part().pieces for piece in group) for rank in engine.ranks
    ]
    stored = sum(group.bytes_per_block for group in engine.side._groups)
    if copies is None:
        assert max(held) < stored < sum(held)
    else:
        assert stored * copies == sum(held)
    writers = [rank for rank in engine.ranks if any(share.stores.any() for share in _shares(engine, rank))]
    assert len(writers) == len(engine.ranks), "each stores a part"
    engine.assert_idle(200)
    engine.close()


def _shares(engine: Any, rank: Any) -> Sequence[Any]:
    shares: Sequence[Any] = engine.side._shared.shares[rank.rank]
    return shares


@pytest.mark.slow
def test_each_rank_its_own_when_asked_for(run: Run) -> None:
    run(its_own)


def its_own(directory: Path) -> None:
    from tests.vllm.pipeline import Engine

    engine = Engine(directory, MLA, division=(1, 2), deduplicate_ranks=False)
    once = Engine(directory, MLA, division=(1, 2))
    assert [group.bytes_per_block for group in engine.side._groups] == [
        2 * group.bytes_per_block for group in once.side._groups
    ]
    tokens = prompt(400)
    engine.ask("cold", tokens)
    engine.forget()
    assert engine.ask("again", tokens) == KEPT
    for one in (engine, once):
        one.assert_idle(200)
        one.close()


@pytest.mark.slow
def test_ranks_that_differ_are_noticed_before_anything_is_found(run: Run) -> None:
    """Should a model hold other latents on each rank, no request ever loads one."""
    run(differ)


def differ(directory: Path) -> None:
    from tests.vllm import ranks
    from tests.vllm.pipeline import Engine

    engine = Engine(directory, MLA, division=(1, 2))
    written = ranks._written
    ranks._written = lambda links, seed, nbytes: written(links, seed + 7 * engine.executor.running, nbytes)
    tokens = prompt(400)
    engine.ask("cold", tokens)
    engine.forget()
    assert engine.ask("again", tokens) == 0
    assert engine.side.counts["stores_failed"] > 0 and engine.side.counts["faults"] == 1
    assert engine.ask("later", prompt(300, seed=3)) == 0
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_a_rank_that_fails_to_store_its_part(number: int, run: Run) -> None:
    """The other's part alone is never found; computed again, both are."""
    run(fails, number)


def fails(directory: Path, number: int) -> None:
    from tests.vllm.pipeline import Engine, broken

    def refuse() -> None:
        raise OSError("a copy that the test broke")

    engine = Engine(directory, MLA, division=(1, 2))
    engine.ask("first", prompt(150, seed=9))
    tokens = prompt(400)
    with broken(engine.ranks[number], store=refuse):
        engine.ask("cold", tokens)
    engine.forget()
    assert engine.ask("computed", tokens) == 0
    engine.forget()
    with broken(engine.ranks[number], load=refuse):
        engine.ask("refused", tokens)
    engine.forget()
    assert engine.ask("again", tokens) == KEPT
    engine.assert_idle(200)
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kinds", "kv_heads", "writer", "readers"),
    [
        (FULL, 4, (1, 2), [(1, 1), (1, 4), (2, 1), (2, 2), (1, 2)]),
        (FULL, 2, (1, 4), [(1, 1), (1, 2), (2, 2)]),
        (MLA, 4, (2, 2), [(1, 1), (1, 4)]),
        (HYBRID, 4, (1, 1), [(1, 2), (1, 4)]),
    ],
)
def test_chunks_serve_another_number_of_ranks(
    kinds: list[str], kv_heads: int, writer: tuple[int, int], readers: list[tuple[int, int]], run: Run
) -> None:
    """Written by one engine to a disk, loaded by engines that divide the model otherwise."""
    run(across, kinds, kv_heads, writer, readers)


def across(
    directory: Path, kinds: list[str], kv_heads: int, writer: tuple[int, int], readers: list[tuple[int, int]]
) -> None:
    from tests.vllm.pipeline import Engine

    def engine(division: tuple[int, int], any_size: bool = True) -> Engine:
        disk = directory / "disk"
        return Engine(directory, kinds, division=division, kv_heads=kv_heads, disk=disk, any_parallel_size=any_size)

    tokens = prompt(400)
    first = engine(writer)
    assert first.ask("cold", tokens) == 0
    first.close()
    for division in readers:
        other = engine(division)
        assert other.ask(f"at {division}", tokens) == KEPT and not other.wrong()
        assert all(rank.read for rank in other.ranks)
        other.assert_idle(200)
        other.close()
    apart = engine(readers[0], any_size=False)
    assert apart.ask("of its own", tokens) == 0, "unless asked for, another division is another name"
    apart.close()


@pytest.mark.slow
def test_damage_and_layouts_that_show_no_heads(run: Run) -> None:
    run(damaged)


def damaged(directory: Path) -> None:
    """A chunk that another division has written and a disk has damaged is computed. Where a backend's layout is not
    known, engines share with those of the same division alone.
    """
    from tests.vllm.pipeline import Engine
    from tests.vllm.ranks import Ranks

    tokens, disk = prompt(400), directory / "disk"

    def engine(tensor: int) -> Engine:
        return Engine(directory, FULL, division=(1, tensor), disk=disk, any_parallel_size=True)

    first = engine(2)
    first.ask("cold", tokens)
    first.close()
    for segment in disk.rglob("*"):
        if segment.is_file() and segment.stat().st_size > 100_000:
            with segment.open("r+b") as file:
                for at in range(20_000, segment.stat().st_size, 20_000):
                    file.seek(at)
                    file.write(b"\xa5" * 64)
    second = engine(1)
    assert second.ask("damaged", tokens) == 0
    second.close()
    Ranks.backend = "SOMEBODY_ELSES"
    opaque = engine(2)
    opaque.ask("opaque", tokens)
    opaque.close()
    for tensor, found in ((2, KEPT), (1, 0)):
        again = engine(tensor)
        assert again.ask(f"at {tensor}", tokens) == found
        again.close()


def _naming(fields: dict[str, Any], ranks: int, rank: int, heads: int, **more: Any) -> dict[str, Any]:
    """Heads by layer of a model with these settings, whose ranks hold so many."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from stowage.plugins.vllm.layer_heads import naming

    spec = FullAttentionSpec(block_size=16, num_kv_heads=heads, head_size=8, dtype=torch.float32)
    model = SimpleNamespace(
        get_total_num_kv_heads=lambda: fields["num_key_value_heads"],
        hf_text_config=SimpleNamespace(to_dict=lambda: fields),
    )
    config = SimpleNamespace(
        model_config=model,
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
        compilation_config=SimpleNamespace(static_forward_context={}),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        speculative_config=None,
    )
    groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=["a"])]
    cache = SimpleNamespace(kv_cache_groups=groups)
    return dict(naming(config, cache, rank, shared=more.get("shared", True), each_head=False).heads)


def test_heads_are_named_only_where_the_division_is_certain() -> None:
    plain = {"num_key_value_heads": 4}
    assert [(_naming(plain, 2, rank, 2)["a"].first, _naming(plain, 2, rank, 2)["a"].stop) for rank in (0, 1)] == [
        (0, 2),
        (2, 4),
    ]
    assert [_naming(plain, 8, rank, 1)["a"].first for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert not _naming(plain, 2, 0, 2, shared=False)
    assert not _naming(plain, 2, 0, 4), "vLLM holds another number than the settings say"
    assert not _naming({"num_key_value_heads": 6}, 4, 0, 1), "an uneven division"
    for layers_differ in (
        {"num_global_key_value_heads": 2},
        {"swa": {"num_key_value_heads": [4, 8]}},
        {"block_configs": [{"attention": {"n_heads_in_group": 8}}]},
    ):
        assert not _naming(plain | layers_differ, 2, 0, 2)
