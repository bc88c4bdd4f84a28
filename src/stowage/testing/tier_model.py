"""What a tier may answer, given what was asked of it so far; and the memory that is lent to it, with tripwires.

`TierModel` remembers every store of every key. No two stores share bytes, so any answer can be traced to the store that
it came from, or to none. It only ever forbids: absence is an answer that it may rule out for chunks that must be kept
(`certain`), nothing else depends on timing. Time is counted in events.

`TransferBuffers` is the memory of one transfer: guard pages around each buffer, a poison that is written over the
buffers when the transfer was reported, and a picture of what must not have changed. Used by `conformance`.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stowage.core.geometry import PAGE_BYTES, round_up

GUARD: Final = 0xC7
UNWRITTEN: Final = 0xB1
POISON: Final = 0xEE
SHIFT_BYTES: Final = 24
MASK_MAX: Final = (1 << 64) - 1
NEVER: Final = 1 << 62
"""Later than every event."""


def key_of(number: int) -> bytes:
    """The key that a test calls by that number."""
    return hashlib.sha256(b"conformance %d" % number).digest()


def content_of(number: int, serial: int, length: int) -> bytes:
    """What store `serial` puts under key `number`: bytes that no other store has. Every second one is noise, the others
    are numbers that a tier may pack.
    """
    content = hashlib.shake_128(b"%d %d" % (number, serial)).digest(length)
    if serial % 2:
        numbers = bytearray(content)
        numbers[1::2] = bytes(0x3C + byte % 8 // 2 for byte in content[1::2])
        content = bytes(numbers)
    return content


@dataclass(slots=True, eq=False)
class Version:
    """One store of one key. `reported`, `replaced`, `discarded`: when that happened, if it did."""

    number: int
    serial: int
    mask: int
    length: int
    began: int
    reported: int = NEVER
    replaced: int = NEVER
    discarded: int = NEVER
    ok: bool = False

    @property
    def content(self) -> bytes:
        return content_of(self.number, self.serial, self.length)

    def __str__(self) -> str:
        return f"store {self.serial} of key {self.number}"


@dataclass(slots=True)
class TierModel:
    """`keeps_bytes`: as long as no more payload than that was stored, whatever was stored is there."""

    keeps_bytes: int
    now: int = 0
    stored_bytes: int = 0
    versions: dict[int, list[Version]] = field(default_factory=dict)
    _serial: int = 0
    _disturbed: dict[int, int] = field(default_factory=dict)
    _odd_loads: Counter[int] = field(default_factory=Counter)

    def _tick(self) -> int:
        self.now += 1
        return self.now

    def next_mask(self, number: int, bits: int) -> int:
        """A mask that gains blocks over all that is kept under the key; 0 if there is none left to gain."""
        before = 0
        for version in self.versions.get(number, ()):
            if version.discarded == NEVER:
                before |= version.mask
        lowest_free = ~before & (before + 1) & MASK_MAX
        mask = before | bits or lowest_free
        return mask if mask != before else (before | lowest_free if lowest_free else 0)

    def begin_store(self, number: int, mask: int, length: int) -> Version:
        self._serial += 1
        version = Version(number, self._serial, mask, length, self._tick())
        self.versions.setdefault(number, []).append(version)
        self.stored_bytes += length
        return version

    def end_store(self, version: Version, ok: bool) -> None:
        """The store was reported. One that succeeded replaces all that were reported before it began."""
        version.reported, version.ok = self._tick(), ok
        for other in self.versions[version.number]:
            if ok and other.reported < version.began:
                other.replaced = min(other.replaced, self.now)

    def discard(self, numbers: Sequence[int]) -> None:
        """What is being stored meanwhile may come after all."""
        self._tick()
        for number in numbers:
            self._disturbed[number] = self.now
            for version in self.versions.get(number, ()):
                if version.reported != NEVER:
                    version.discarded = min(version.discarded, self.now)

    def begin_odd_load(self, number: int) -> None:
        """A load of another length, after which a tier may forget the chunk."""
        self._odd_loads[number] += 1

    def end_odd_load(self, number: int) -> None:
        self._odd_loads[number] -= 1
        self._disturbed[number] = self._tick()

    def reopen(self) -> None:
        """The tier was closed and opened again: it may remember what was discarded, and nothing was replaced anew."""
        self._tick()
        for versions in self.versions.values():
            for version in versions:
                version.discarded = NEVER

    def loadable(self, number: int, since: int) -> list[Version]:
        """Whose bytes a load that began at `since` may bring now."""
        return [version for version in self.versions.get(number, ()) if version.replaced > since]

    def masks(self, number: int) -> set[int]:
        """What a look-up may answer besides 0."""
        return {v.mask for v in self.versions.get(number, ()) if v.replaced == NEVER and v.discarded == NEVER}

    def certain(self, number: int) -> Version | None:
        """The store that must be found and loaded now, if there is one."""
        versions = self.versions.get(number)
        if not versions or self.stored_bytes > self.keeps_bytes:
            return None
        last = versions[-1]
        alone = all(other.reported < last.began for other in versions[:-1])
        quiet = self._disturbed.get(number, 0) < last.began and not self._odd_loads[number]
        return last if last.ok and alone and quiet else None

    def explain(self, data: bytes, number: int) -> str:
        """Where wrong bytes came from, for whoever wrote the tier."""
        if data == bytes([UNWRITTEN]) * len(data):
            return "nothing was written to the buffer"
        if data.find(bytes([POISON]) * min(16, len(data))) >= 0:
            return (
                "they are what the caller wrote over a buffer after its transfer was reported: "
                "the tier read a store's buffer too late"
            )
        best: Version | None = None
        for version in (version for versions in self.versions.values() for version in versions):
            content = version.content
            if content == data:
                if version.number != number:
                    return f"they are those of {version}"
                return f"they are those of {version}, which a later store had replaced before this load began"
            if content[:16] == data[:16]:
                best = version
        if best is None:
            return "no store put there anything like it"
        same = next((at for at, (a, b) in enumerate(zip(best.content, data, strict=False)) if a != b), len(data))
        return f"only the first {min(same, best.length)} bytes are those of {best} (which had {best.length})"


class TransferBuffers:
    """The buffers of one transfer. `shifted`: they do not begin on a page."""

    def __init__(self, lengths: Sequence[int], shifted: bool) -> None:
        self._spans: list[slice] = []
        at = PAGE_BYTES + (SHIFT_BYTES if shifted else 0)
        for length in lengths:
            self._spans.append(slice(at, at + length))
            at += round_up(length + SHIFT_BYTES) + PAGE_BYTES
        raw = np.full(at + PAGE_BYTES, GUARD, np.uint8)
        start = -raw.ctypes.data % PAGE_BYTES
        self._memory: NDArray[np.uint8] = raw[start : start + at]
        self.fill([bytes([UNWRITTEN]) * length for length in lengths])
        self.buffers = [self._memory.data[span] for span in self._spans]

    def fill(self, contents: Sequence[bytes]) -> None:
        """Writes the buffers, and remembers all of the memory as it must stay."""
        for span, content in zip(self._spans, contents, strict=True):
            self._memory[span] = np.frombuffer(content, np.uint8)
        self._picture = self._memory.copy()

    def poison(self) -> None:
        """The transfer was reported: the buffers are the caller's again."""
        self.fill([bytes([POISON]) * (span.stop - span.start) for span in self._spans])

    def damage(self, buffers_too: bool) -> str:
        """What changed that must not have; nothing: an empty text. Unless `buffers_too`, only around the buffers."""
        if buffers_too and np.array_equal(self._memory, self._picture):
            return ""
        changed = self._memory != self._picture
        for number, span in enumerate(self._spans):
            if buffers_too and changed[span].any():
                return f"byte {int(changed[span].argmax())} of buffer {number}"
            changed[span] = False
        if not changed.any():
            return ""
        at = int(changed.argmax())
        near = min(range(len(self._spans)), key=lambda n: min(abs(at - p) for p in self._ends(n)))
        first, last = self._ends(near)
        where = f"{at - last} bytes after the end" if at > last else f"{first - at} bytes before the beginning"
        return f"a byte {where} of buffer {near}"

    def _ends(self, number: int) -> tuple[int, int]:
        """The first and the last byte of a buffer."""
        return self._spans[number].start, self._spans[number].stop - 1
