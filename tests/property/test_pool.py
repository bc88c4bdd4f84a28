"""The device pool against a model of it: blocks are given out once, found only while they hold what their name says,
and never lost.
"""

from __future__ import annotations

import ctypes
import sys

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from stowage.core.geometry import NULL_BLOCK, Group, Kind
from stowage.executor.block_pool import BlockPool
from stowage.models.layout import BlockLayout, Layer, LayerTensor

BLOCKS, PER_CHUNK = 9, 3


def layout() -> BlockLayout:
    """Two layers of 2 heads of 4 numbers, 2 tokens to the block."""
    tensor = LayerTensor((2, 4), torch.float32)
    layers = tuple(Layer(i, Kind.FULL, 0, (tensor, tensor)) for i in (3, 5))
    group = Group(0, Kind.FULL, 2, PER_CHUNK, 256, layers=(3, 5))
    return BlockLayout(group, layers, {3: (0, 64), 5: (128, 192)})


class PoolMachine(RuleBasedStateMachine):
    """Every allocated run writes a mark of its own into its blocks; whoever finds a chunk must find its marks."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(layout(), BLOCKS, torch.device("cpu"))
        self.marks: dict[bytes, dict[int, int]] = {}
        self.mark = 0

    @rule(target=held, count=st.integers(1, PER_CHUNK), key=st.sampled_from([b"a", b"b", b"c", b"d", b"e"]))
    def allocate_and_name(self, count: int, key: bytes) -> object:
        available = self.pool.available
        blocks = self.pool.allocate(count)
        assert (blocks is None) == (count > available)
        if blocks is None:
            return multiple()
        assert not self.pool.storage[blocks].any(), "blocks are zeroed"
        self.mark += 1
        self.pool.storage[blocks] = self.mark % 250 + 1
        before = dict(enumerate(self.pool.find(key)))
        self.pool.name(key, blocks + [NULL_BLOCK] * (PER_CHUNK - count))
        marks = self.marks.setdefault(key, {})
        for offset in range(count):
            if before[offset] == NULL_BLOCK:
                marks[offset] = self.mark % 250 + 1
        return blocks

    @rule()
    def touch_ahead(self) -> None:
        before = self.pool.storage.clone()
        self.pool.touch_ahead()
        assert torch.equal(self.pool.storage, before)

    @rule(blocks=consumes(held))
    def release(self, blocks: list[int]) -> None:
        self.pool.release(blocks)

    @rule(target=held, key=st.sampled_from([b"a", b"b", b"c", b"d", b"e"]))
    def retain_what_is_found(self, key: bytes) -> object:
        found = [block for block in self.pool.find(key) if block != NULL_BLOCK]
        self.pool.retain(found)
        return found if found else multiple()

    @rule()
    def drop(self) -> None:
        self.pool.drop_cache()
        assert not self.pool.lookup([b"a", b"b", b"c", b"d", b"e"]).any()

    @invariant()
    def what_is_found_is_what_was_named(self) -> None:
        self.pool.check()
        for key, marks in self.marks.items():
            blocks = self.pool.find(key)
            mask = int(self.pool.lookup([key])[0])
            assert mask == sum(1 << offset for offset, block in enumerate(blocks) if block != NULL_BLOCK)
            for offset, block in enumerate(blocks):
                assert block == NULL_BLOCK or (self.pool.storage[block] == marks[offset]).all()


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_views_cover_the_block_and_do_not_overlap() -> None:
    """Writing through every layer's views fills the block, each byte once."""
    pool = BlockPool(layout(), 4, torch.device("cpu"))
    for number, (_, views) in enumerate(sorted(pool.views.items())):
        for place, view in enumerate(views):
            assert view.shape == (5, 2, 2, 4)
            view[2] = number * 2 + place + 1
    words = pool.storage[2].view(torch.float32).numpy()
    assert np.array_equal(words, np.repeat([1, 2, 3, 4], 16))
    assert not pool.storage[[0, 1, 3, 4]].any()


def resident_bytes(memory: torch.Tensor) -> int:
    """How much of ``memory``, which begins on a page, the system has given."""
    told = (ctypes.c_ubyte * (memory.numel() // 4096))()
    begin, nbytes = ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(len(told) * 4096)
    assert not ctypes.CDLL(None).mincore(begin, nbytes, told)
    return 4096 * sum(page & 1 for page in told)


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux which pages are in memory")
def test_the_memory_of_blocks_that_come_next_is_had_before_they_are_given_out() -> None:
    mib, pool = 1 << 20, BlockPool(layout(), 100 << 12, torch.device("cpu"))  # 100 MiB in blocks of 256 bytes
    assert resident_bytes(pool.storage) <= 2 * mib
    while pool.touch_ahead():
        pass
    assert 64 * mib <= resident_bytes(pool.storage) <= 68 * mib
    given = pool.allocate(8 << 12) or []
    assert len(given) == 8 << 12 and pool.touch_ahead(), "as much again comes after these"
    while pool.touch_ahead():
        pass
    assert 72 * mib <= resident_bytes(pool.storage) <= 76 * mib
    pool.release(given)
    assert pool.allocate(1) == given[:1] and not pool.touch_ahead(), "a block that was there before"
    assert pool.allocate(pool.available) and not pool.touch_ahead(), "nothing comes after the last one"
