"""Blocks of one sequence that are pinned in host memory, and how they are released.

``preemption`` holds those of preempted sequences, ``long_context`` those that running sequences have offloaded.
Complete chunks that the host has already are pinned in place, without a copy; all others get private slots, outside the
cache.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from stowage.cache.flow_types import Fetch
from stowage.cache.store import TieredStore
from stowage.core.geometry import ALIGNMENT_BYTES, Group


@dataclass(slots=True, eq=False)
class SwappedBlocks:
    """Blocks of one group: the sequence's ``blocks[i]`` is in ``slots[i]`` at ``offsets[i]``: ``addresses[i]``
    of ``BlockTable.offloaded``. ``private``: slots outside the cache; the others are ``pinned``.
    """

    group: int
    blocks: NDArray[np.int64]
    slots: NDArray[np.int64]
    offsets: NDArray[np.int64]
    addresses: NDArray[np.int64]
    private: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    pinned: Fetch | None = None


def addresses_of(
    store: TieredStore, group: Group, slots: NDArray[np.int64], offsets: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Offsets of blocks in the arena, in units of ``ALIGNMENT_BYTES``."""
    slab = next(slab for slab in store.slabs if group.index in slab.groups)
    begins = slab.offset_bytes + (slots - slab.first_slot) * slab.slot_bytes + offsets * group.bytes_per_block
    addresses, rest = np.divmod(begins, ALIGNMENT_BYTES)
    assert not rest.any(), "a block does not begin where tensors do"
    return addresses


def release_swapped(store: TieredStore | None, held: Iterable[SwappedBlocks]) -> None:
    """Unpin and free what ``held`` holds."""
    for one in held:
        assert store is not None
        if len(one.private):
            store.drop_private(one.private)
        if one.pinned is not None:
            store.release(one.pinned)
