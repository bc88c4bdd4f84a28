"""The bytes of vLLM's blocks, whatever their layout: found whole, moved whole, nothing beside them (cases C and D)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stowage.core.copy_plan import CopyPlan
from stowage.core.geometry import Geometry, Group, Kind, split_arena
from stowage.errors import TransferError, UnsupportedModelError
from stowage.plugins.vllm.division import Naming, divide
from stowage.plugins.vllm.memory import Copies, GroupBytes, SharedArena, group_bytes, runs_of
from stowage.storage.host import HostArena, map_arena

BLOCKS = 6
DTYPES = [torch.float32, torch.bfloat16, torch.uint8]


@st.composite
def caches(draw: st.DrawFn) -> torch.Tensor:
    """``[blocks * ratio, heads, tokens, dim]`` with its dimensions in any order in memory, and padding anywhere."""
    ratio = draw(st.sampled_from([1, 2]))
    shape = [BLOCKS * ratio, *draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))]
    order = [0, *draw(st.permutations(range(1, len(shape))))]
    if ratio == 1 and draw(st.booleans()):
        order = draw(st.permutations(range(len(shape))))
    room = [shape[d] + draw(st.integers(0, 2)) for d in order]
    if ratio > 1:
        room[0] = shape[0]
    memory = torch.zeros(room, dtype=draw(st.sampled_from(DTYPES)))
    tensor = memory.permute([order.index(d) for d in range(len(shape))])
    return tensor[tuple(slice(0, n) for n in shape)]


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor of the same layout, in memory of its own."""
    storage = tensor.untyped_storage().clone()
    return torch.empty(0, dtype=tensor.dtype).set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def fill(tensor: torch.Tensor, seed: int) -> None:
    """Bytes that differ from place to place."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    whole.random_(1, 100, generator=generator)


def block_bytes(tensor: torch.Tensor, block: int) -> list[int]:
    ratio = tensor.shape[0] // BLOCKS
    part = torch.tensor(tensor[block * ratio : (block + 1) * ratio].flatten().tolist(), dtype=tensor.dtype)
    return sorted(part.view(torch.uint8).tolist())


@given(tensor=caches())
def test_runs_are_the_bytes_of_the_block_each_once(tensor: torch.Tensor) -> None:
    fill(tensor, 1)
    runs = runs_of(tensor, BLOCKS)
    per_block = tensor.numel() * tensor.element_size() // BLOCKS
    assert sum(run.shape[1] for run in runs) == per_block
    for block in range(BLOCKS):
        places = [run.data_ptr() + block * run.stride(0) + i for run in runs for i in range(run.shape[1])]
        assert len(set(places)) == per_block, "a byte is in two runs"
        assert sorted(byte for run in runs for byte in run[block].tolist()) == block_bytes(tensor, block)


def held_bytes(group: GroupBytes) -> int:
    """Of a block, on one rank."""
    return sum(piece.nbytes for piece in group.pieces)


def place_of(groups: list[GroupBytes], host_bytes: int, per_chunk: int) -> tuple[HostArena, SharedArena]:
    """An arena for one group of so many ranks, each with layers of its own."""
    division = divide({(0, rank): [group.pieces] for rank, group in enumerate(groups)}, by_name=False)
    (block_bytes,) = division.bytes_per_block
    slabs = split_arena(Geometry((Group(0, Kind.FULL, 16, per_chunk, block_bytes, 0),)), host_bytes)
    arena = HostArena(slabs, shared=True)
    return arena, SharedArena(arena.path, arena.bytes, slabs, division.bytes_per_block, division.shares)


@given(data=st.data(), layers=st.integers(1, 3), ranks=st.integers(1, 3), per_chunk=st.integers(1, 3))
def test_what_was_stored_is_what_is_loaded_and_nothing_else_moves(
    data: st.DataObject, layers: int, ranks: int, per_chunk: int
) -> None:
    """Several ranks, each through a mapping of its own, share the arena; the parts of a chunk do not touch."""
    tensors = [data.draw(caches()) for _ in range(layers)]
    caches_of = []
    for rank in range(ranks):
        mine = {f"layer{i}": copy_of(tensor) for i, tensor in enumerate(tensors)}
        for i, tensor in enumerate(mine.values()):
            fill(tensor, 10 * rank + i)
        caches_of.append(mine)
    groups = [group_bytes(mine, mine, BLOCKS, Naming(rank, ranks)) for rank, mine in enumerate(caches_of)]
    size = held_bytes(groups[0])
    assert size == sum(tensor.numel() * tensor.element_size() for tensor in tensors) // BLOCKS
    arena, place = place_of(groups, 64 << 10, per_chunk)
    count = data.draw(st.integers(1, min(BLOCKS, arena.slots * per_chunk)))
    blocks = np.array(data.draw(st.permutations(range(BLOCKS)))[:count], dtype=np.int64)
    spots = data.draw(st.permutations(range(min(arena.slots, 8) * per_chunk)))[:count]
    slots, offsets = np.divmod(np.array(spots, dtype=np.int64), per_chunk)
    plan = CopyPlan(0, blocks, slots, offsets)
    before = [{name: tensor.clone() for name, tensor in mine.items()} for mine in caches_of]
    for rank, group in enumerate(groups):
        mapped = map_arena(place.path, place.nbytes)
        assert Copies([group], mapped, place, place.shares[0, rank]).store(plan) == count * size
    kept = [b for b in range(BLOCKS) if b not in blocks.tolist()]
    for mine in caches_of:
        for tensor in mine.values():
            tensor.zero_()
    for rank, group in enumerate(groups):
        mapped = map_arena(place.path, place.nbytes)
        assert Copies([group], mapped, place, place.shares[0, rank]).load(plan) == count * size
    for mine, old in zip(caches_of, before, strict=True):
        for name, tensor in mine.items():
            ratio = tensor.shape[0] // BLOCKS
            by_block, by_block_old = tensor.unflatten(0, (BLOCKS, ratio)), old[name].unflatten(0, (BLOCKS, ratio))
            assert torch.equal(by_block[blocks], by_block_old[blocks])
            assert not by_block[kept].any(), "a block was written that the plan does not name"
    del mapped
    arena.close()


def test_layers_that_share_a_tensor_count_once() -> None:
    """Case C: a size that is a sum already is not multiplied by the tensors again."""
    tensor = torch.zeros(BLOCKS, 2, 16, 8)
    twice = group_bytes({"a": tensor, "b": tensor}, ["a", "b"], BLOCKS, Naming())
    assert held_bytes(twice) == 2 * 16 * 8 * 4
    states = [torch.zeros(BLOCKS, 3), torch.zeros(BLOCKS, 5, dtype=torch.bfloat16)]
    assert held_bytes(group_bytes({"a": states}, ["a", "elsewhere"], BLOCKS, Naming())) == 3 * 4 + 5 * 2


def test_a_layout_that_scatters_or_has_no_blocks_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="not 6 blocks"):
        runs_of(torch.zeros(BLOCKS + 1, 4), BLOCKS, "model.layers.0")
    with pytest.raises(UnsupportedModelError, match="5000 offsets"):
        runs_of(torch.zeros(5000, BLOCKS, 2).permute(1, 0, 2)[:, :, :1], BLOCKS, "model.layers.0")
    assert runs_of(torch.zeros(0, 4), 0) == []


@pytest.mark.parametrize("blocks, slot, offset", [(BLOCKS, 0, 0), (-1, 0, 0), (0, 10**6, 0), (0, -1, 0), (0, 0, 2)])
def test_a_plan_that_reaches_outside_is_refused_before_anything_moves(blocks: int, slot: int, offset: int) -> None:
    group = group_bytes({"a": torch.zeros(BLOCKS, 1024)}, ["a"], BLOCKS, Naming())
    arena, place = place_of([group], 1 << 20, 2)
    plan = CopyPlan(0, *(np.array([value], dtype=np.int64) for value in (blocks, slot, offset)))
    copies = Copies([group], arena.numpy(), place, place.shares[0, 0])
    for move in (copies.store, copies.load):
        with pytest.raises(TransferError, match="outside"):
            move(plan)
    del copies
    arena.close()


def test_a_group_without_layers_on_a_rank_has_no_bytes() -> None:
    """Pipeline stages: a rank may hold none of a group's layers."""
    assert group_bytes({}, ["a"], BLOCKS, Naming()) == GroupBytes((), (), ())
