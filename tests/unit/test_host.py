"""The host arena: exactly the bytes of the slab classes, slots that do not overlap, an honest close."""

import mmap

import numpy as np
import pytest

from stowage.core.geometry import Geometry, Group, Kind, SlabClass, split_arena
from stowage.errors import ConfigError
from stowage.storage.host import HostArena

GEOMETRY = Geometry((Group(0, Kind.FULL, 16, 4, 100), Group(1, Kind.SLIDING, 16, 4, 3000, window=64)))


def test_every_slot_has_bytes_of_its_own() -> None:
    slabs = split_arena(GEOMETRY, 20 * 4096)
    arena = HostArena(slabs)
    assert arena.bytes == sum(slab.slots * slab.slot_bytes for slab in slabs) <= 20 * 4096
    sizes = [slab.slot_bytes for slab in slabs for _ in range(slab.slots)]
    for slot, size in enumerate(sizes):
        arena.slot_view(slot, size)[:] = bytes([slot + 1]) * size
    for slot, size in enumerate(sizes):
        assert bytes(arena.slot_view(slot, size)) == bytes([slot + 1]) * size
    assert np.array_equal(np.bincount(arena.numpy(), minlength=len(sizes) + 1)[1:], sizes)
    assert arena.close()


def test_views_in_a_batch_are_the_same_bytes() -> None:
    arena = HostArena([SlabClass(4096, (0,), 3, 0, 0)])
    arena.numpy()[:] = np.arange(3 * 4096) % 251
    views = arena.slot_views(np.array([2, 0]), np.array([10, 4096]))
    assert [len(view) for view in views] == [10, 4096] and not views[0].readonly
    assert views[0] == arena.slot_view(2, 10) and views[1] == arena.slot_view(0, 4096)


def test_a_payload_never_reaches_past_its_slot() -> None:
    arena = HostArena([SlabClass(4096, (0,), 2, 0, 0)])
    with pytest.raises(AssertionError):
        arena.slot_view(0, 4097)
    with pytest.raises(AssertionError):
        arena.slot_views(np.array([1]), np.array([4097]))


def test_close_waits_for_nobody_and_takes_memory_from_nobody() -> None:
    arena = HostArena([SlabClass(4096, (0,), 2, 0, 0)])
    view = arena.slot_view(1, 100)
    assert not arena.close(), "somebody still holds a view"
    view[:] = b"x" * 100
    assert not arena.close()
    with pytest.raises(AssertionError):
        arena.slot_view(0, 1)
    with pytest.raises(AssertionError):
        arena.numpy()
    other = HostArena([SlabClass(4096, (0,), 2, 0, 0)])
    assert other.close() and other.close()


def test_an_arena_without_slots_is_refused() -> None:
    with pytest.raises(ConfigError, match="no slot"):
        HostArena([SlabClass(4096, (0,), 0, 0, 0)])


def test_memory_that_the_machine_refuses_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> mmap.mmap:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("stowage.storage.host.mmap.mmap", refuse)
    with pytest.raises(ConfigError, match="smaller size"):
        HostArena([SlabClass(4096, (0,), 2, 0, 0)])


@pytest.mark.parametrize("shared", [False, True])
def test_an_arena_beyond_all_memory_is_refused_before_its_slots_are_listed(shared: bool) -> None:
    with pytest.raises(ConfigError, match=r"could not be mapped.*set host_memory"):
        HostArena([SlabClass(4096, (0,), 1 << 40, 0, 0)], shared=shared)
