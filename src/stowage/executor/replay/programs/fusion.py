"""Linear layers that read the same rows, as one call of the kernels: all threads are woken once for them, and where
inputs are rounded to 8 bits, it is done once.

    linear q, linear k, linear v   ->   one linear of three layers
    linear gate, silu, linear up   ->   one linear of two layers, silu

Owns which ones these are. In a program every operation makes memory of its own, so rows that one reads stay as they are
until the next call of Python. The bits are the same: the kernels sum every output by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from stowage.executor import kernels
from stowage.executor.replay.programs.words import LINEAR, Operation

_LAYERS, _COMMON_END = 1, 9
"""Of an operation's words: how many layers, and where those of each begin."""


def fused(taken: Sequence[list[Operation] | None]) -> list[list[Operation] | None]:
    """The operations of each call of a step (``None``: Python's), where the first layer of the same rows does what
    others did.
    """
    found: list[list[Operation] | None] = []
    first: dict[tuple[object, ...], tuple[list[Operation], int]] = {}
    for done in taken:
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
