"""Fuses linear layers that read the same rows into one call of the kernels: threads are woken once for them, and where
inputs are rounded to 8 bits, that is done once.

    linear q, linear k, linear v   ->   one linear of three layers
    linear gate, silu, linear up   ->   one linear of two layers, silu

In a program every operation writes to memory of its own, so rows that one reads do not change until the next Python
call. The results are bit-identical: the kernels sum every output by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from stowage.executor import kernels
from stowage.executor.replay.programs.encoding import LINEAR, Operation

_LAYERS, _COMMON_END = 1, 9
"""Of an operation's words: how many layers, and where those of each begin."""


def fused(lowered: Sequence[list[Operation] | None]) -> list[list[Operation] | None]:
    """The operations of each call of a step (``None``: stays a Python call), with the linear layers of the same rows
    moved into the first of them.
    """
    found: list[list[Operation] | None] = []
    first: dict[tuple[object, ...], tuple[list[Operation], int]] = {}
    for done in lowered:
        if done is None:
            first.clear()
            found.append(None)
            continue
        own: list[Operation] = []
        for operation in done:
            words = operation.words
            if words[0] != LINEAR:
                own.append(operation)
                continue
            begin, *rest = words[2:_COMMON_END]
            key = (id(begin.buffer), begin.offset, *rest) if not isinstance(begin, int) else (begin, *rest)
            others, at = first.get(key, (own, len(own)))
            if at < len(others) and _layers(others[at]) + _layers(operation) <= kernels.TOGETHER:
                others[at] = _joined(others[at], operation)
            else:
                first[key] = own, len(own)
                own.append(operation)
        found.append(own)
    return found


def _layers(operation: Operation) -> int:
    layers = operation.words[_LAYERS]
    assert isinstance(layers, int), "an address is in its place"
    return layers


def _joined(one: Operation, other: Operation) -> Operation:
    layers = _layers(one) + _layers(other)
    return Operation((LINEAR, layers, *one.words[2:], *other.words[_COMMON_END:]))
