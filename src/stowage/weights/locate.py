"""Where the bytes of a parameter lie in the checkpoint, in the form in which loading left them.

Transformers renames, stacks and fuses what it loads. Instead of knowing how, this looks: a parameter that still lies in
the mapped file says itself where; of any other, the bytes are compared with the tensors of the checkpoint, laid end to
end. What is found was compared to the last byte.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from stowage.native.memory import address_of
from stowage.weights.checkpoint import Checkpoint, Segment

_HEAD_BYTES = 64
"""Enough to tell tensors apart; shorter ones are not looked for."""
_COMPARED_BYTES = 4 << 20


class Locator:
    """Finds bytes in ``checkpoint``."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._heads: dict[bytes, list[tuple[str, Segment]]] | None = None
        self._mappings: list[tuple[int, int, int, int]] = []
        self._held: list[NDArray[np.uint8]] = []
        """Of each of those mappings a tensor, which keeps it where it is: so it need not be asked for again."""

    def find(self, name: str, raw: NDArray[np.uint8]) -> list[Segment] | None:
        """The segments whose bytes, end to end, are ``raw`` (uint8, one dimension); ``None`` if there are none.

        ``name`` of the parameter decides between tensors with the same bytes: those of its own layer.
        """
        address = address_of(raw)
        mapped = self._checkpoint.mapped_at(address, raw.nbytes, self._mappings)
        if mapped is None:
            around = [
                one for one in self._checkpoint.mappings() if one[0] <= address and address + raw.nbytes <= one[1]
            ]
            mapped = self._checkpoint.mapped_at(address, raw.nbytes, around)
            if mapped is not None:
                self._mappings += around
                self._held.append(raw)
        return [mapped] if mapped is not None else self._matched(name, raw)

    def _matched(self, name: str, raw: NDArray[np.uint8]) -> list[Segment] | None:
        heads = self._heads if self._heads is not None else self._read_heads()
        found: list[Segment] = []
        at = 0
        while at < raw.nbytes:
            candidates = heads.get(raw[at : at + _HEAD_BYTES].tobytes(), [])
            fitting = [c for c in candidates if c[1].length <= raw.nbytes - at]
            fitting.sort(key=lambda c: (_alike(c[0], name), c[1].length), reverse=True)
            match = next((s for _, s in fitting if _same(s, raw[at : at + s.length])), None)
            if match is None:
                return None
            found.append(match)
            at += match.length
        return _joined(found)

    def _read_heads(self) -> dict[bytes, list[tuple[str, Segment]]]:
        heads = defaultdict(list)
        for name, segment in self._checkpoint.tensors.items():
            if segment.length >= _HEAD_BYTES:
                heads[segment.file.pread(_HEAD_BYTES, segment.offset)].append((name, segment))
        self._heads = dict(heads)
        return self._heads


def _alike(one: str, other: str) -> int:
    """How many characters at the beginning are equal."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _same(segment: Segment, raw: NDArray[np.uint8]) -> bool:
    at = 0
    while at < segment.length:
        read = segment.file.pread(min(_COMPARED_BYTES, segment.length - at), segment.offset + at)
        if not read or not np.array_equal(np.frombuffer(read, np.uint8), raw[at : at + len(read)]):
            return False
        at += len(read)
    return True


def _joined(segments: list[Segment]) -> list[Segment]:
    """Neighbours as one."""
    joined = segments[:1]
    for segment in segments[1:]:
        last = joined[-1]
        if last.file is segment.file and last.offset + last.length == segment.offset:
            joined[-1] = Segment(last.file, last.offset, last.length + segment.length)
        else:
            joined.append(segment)
    return joined
