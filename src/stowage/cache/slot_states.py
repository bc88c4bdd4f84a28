"""The states of a slot in host memory, and when a chunk may replace another one of the same key."""

from __future__ import annotations

import enum

import numpy as np

from stowage.core.geometry import BoolArray, MaskArray


class State(enum.IntEnum):
    """What a slot holds."""

    FREE = 0
    RESERVED = 1
    FILLING = 2
    READY = 3
    STALE = 4
    PRIVATE = 5


# The states as array values: an enum's attribute costs as much as a small array operation.
FREE, RESERVED, FILLING, READY, STALE, PRIVATE = (np.uint8(state) for state in State)
ONLY_READY = bytes((State.READY,))
IN_FLIGHT = bytes((State.RESERVED, State.FILLING))


def adds_blocks(masks: MaskArray, held: MaskArray) -> BoolArray:
    """Which chunks are worth storing over what is held already: those whose valid blocks are a strict superset."""
    more: BoolArray = ((masks & ~held) != 0) & ((held & ~masks) == 0)
    return more
