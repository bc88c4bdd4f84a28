"""A disk, its file system and the kernel's page cache, in memory, with every fault of docs/security.md.

Files are bytes in pages. What was written lately can be lost by a power cut, page by page, whole or in part; a process
that is killed loses nothing that the kernel took. Every operation takes simulated time, and other tasks run meanwhile.

The disk checks the promise of the byte limit itself: after every change of a size the sum over all files must not
exceed `limit_bytes`, unless somebody lowered the limit and nobody has reclaimed yet (see `grace`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from stowage.core.geometry import PAGE_BYTES, round_up
from stowage.storage.disk.allocator import metadata_bytes
from stowage.testing.sim.fault_profile import FaultProfile
from stowage.testing.sim.loop import Loop

SECTOR_BYTES: Final = 512
WRITE_BACK_S: Final = 5.0
"""How long written pages may be lost by a power cut."""
SLOW_S: Final = (0.2, 8.0)
HUNG_S: Final = (20.0, 90.0)
OWN_BYTES: Final = 4096
"""The directory's own blocks."""


@dataclass(slots=True, eq=False)
class Inode:
    """One file. `before` holds, for pages written lately: when, and what a power cut may bring back."""

    number: int
    data: bytearray = field(default_factory=bytearray)
    links: int = 1
    locked_by: int = 0
    before: dict[int, tuple[float, bytes]] = field(default_factory=dict)
    history: dict[int, bytes] = field(default_factory=dict)
    made_s: float = 0.0


@dataclass(slots=True)
class Handle:
    """An open file of one process."""

    number: int
    inode: Inode
    direct: bool


class SimDisk:
    """One directory on one disk, shared by the processes of a world."""

    def __init__(self, loop: Loop, fault_profile: FaultProfile, limit_bytes: int, capacity_bytes: int) -> None:
        self.loop = loop
        self.fault_profile = fault_profile
        self.limit_bytes = limit_bytes
        self.capacity_bytes = capacity_bytes
        self.grace = False
        self.extra_bytes = loop.chance.choice((0, 4096, metadata_bytes(0)))
        """Blocks that the file system adds to a file; at most what the tier leaves free for them."""
        self.takes_direct = loop.chance.random() < 0.9
        self.names: dict[str, Inode] = {}
        self.violation = ""
        """The first broken promise. Not an exception: that would end up in the tier, which is built to live on."""
        self._numbers = iter(range(2, 1 << 60))
        self._handles = iter(range(10, 1 << 60))
        self._unlinked: list[tuple[float, str, Inode, bytes]] = []

    def next_handle(self) -> int:
        """A descriptor that nobody had before."""
        return next(self._handles)

    # Sizes

    def used_bytes(self) -> int:
        """What the limit is about: all files and the directory itself."""
        return OWN_BYTES + sum(map(self.allocated_bytes, self.names.values()))

    def allocated_bytes(self, inode: Inode) -> int:
        """What the file takes: its length, and blocks of the file system's own."""
        return len(inode.data) + self.extra_bytes if inode.data else 0

    def changed_size(self) -> None:
        """To be called after every change of a size."""
        used = self.used_bytes()
        if used > self.limit_bytes and not self.grace and not self.violation:
            self.violation = f"{used} bytes in a directory whose limit is {self.limit_bytes}"

    def room_for(self, more_bytes: int) -> bool:
        """Whether the file system has that many bytes left (somebody else may fill it)."""
        return self.used_bytes() + more_bytes <= self.capacity_bytes

    # Files

    def create(self, name: str) -> Inode:
        inode = Inode(next(self._numbers), made_s=self.loop.now_s)
        self.names[name] = inode
        return inode

    def unlink(self, name: str) -> None:
        inode = self.names.pop(name)
        inode.links = 0
        self._unlinked.append((self.loop.now_s, name, inode, bytes(inode.data)))

    def write(self, inode: Inode, offset: int, data: bytes) -> None:
        """Put bytes where they belong, and remember what was there."""
        if offset + len(data) > len(inode.data):
            self.resize(inode, offset + len(data))
        for page in range(offset // PAGE_BYTES, round_up(offset + len(data)) // PAGE_BYTES):
            old = bytes(inode.data[page * PAGE_BYTES : (page + 1) * PAGE_BYTES])
            inode.history[page] = old
            if page not in inode.before or self.loop.now_s - inode.before[page][0] > WRITE_BACK_S:
                inode.before[page] = (self.loop.now_s, old)
        inode.data[offset : offset + len(data)] = data

    def resize(self, inode: Inode, length: int) -> None:
        if length < len(inode.data):
            if length == 0 and inode.links:
                self._remember_truncated(inode)
            del inode.data[length:]
        else:
            inode.data.extend(bytes(length - len(inode.data)))
        self.changed_size()

    def _remember_truncated(self, inode: Inode) -> None:
        for name, known in self.names.items():
            if known is inode:
                self._unlinked.append((self.loop.now_s, name, inode, bytes(inode.data)))

    def rot(self) -> None:
        """Flip a bit of what is stored, anywhere."""
        files = [inode for inode in self.names.values() if inode.data]
        if files:
            inode = self.loop.chance.choice(files)
            bit = self.loop.chance.randrange(8 * len(inode.data))
            inode.data[bit // 8] ^= 1 << bit % 8

    # Crashes

    def power_cut(self) -> None:
        """What was written lately is lost, kept or torn, page by page; young files vanish, dead ones may come back."""
        chance, now_s = self.loop.chance, self.loop.now_s
        for name, inode in list(self.names.items()):
            inode.locked_by = 0
            if now_s - inode.made_s < WRITE_BACK_S and chance.random() < 0.3:
                del self.names[name]
                continue
            for page, (at_s, old) in inode.before.items():
                if now_s - at_s <= WRITE_BACK_S and chance.random() < 0.5:
                    self._lose(inode, page, old)
            inode.before.clear()
        for at_s, name, inode, data in self._unlinked:
            if now_s - at_s <= WRITE_BACK_S and chance.random() < 0.5 and name not in self.names:
                self.names[name] = Inode(inode.number, bytearray(data), made_s=inode.made_s)
        self._unlinked.clear()

    def _lose(self, inode: Inode, page: int, old: bytes) -> None:
        start = page * PAGE_BYTES
        end = min(start + PAGE_BYTES, len(inode.data))
        if end <= start:
            return
        if self.loop.chance.random() < 0.3:  # torn: the first sectors arrived
            start = min(end, start + SECTOR_BYTES * self.loop.chance.randrange(1, 8))
        kept = old[start % PAGE_BYTES : end - page * PAGE_BYTES]
        inode.data[start:end] = kept + bytes(end - start - len(kept))
