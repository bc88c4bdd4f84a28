"""What a simulated process sees of a simulated disk: `FileSystem` and `Descriptors`, with the faults of its profile."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable
from pathlib import Path

from greenlet import GreenletExit

from stowage.core.geometry import PAGE_BYTES, round_up
from stowage.storage.disk.files import Status, is_aligned
from stowage.testing.sim.disk import HUNG_S, OWN_BYTES, SECTOR_BYTES, SLOW_S, Handle, Inode, SimDisk
from stowage.testing.sim.loop import Process


class SimFiles:
    """Implements FileSystem and Descriptors for one process on a `SimDisk`."""

    def __init__(self, disk: SimDisk, process: Process) -> None:
        self._disk = disk
        self._process = process
        self._loop = disk.loop
        self._fault_profile = disk.fault_profile
        self._handles: dict[int, Handle] = {}
        self.may_fill: Callable[[memoryview], bool] = lambda buffer: True
        """Whether a read may write there now."""
        self.overwritten = False
        """One wrote elsewhere."""

    def release_all(self) -> None:
        """The process is gone: the kernel closes what it had open."""
        for handle in self._handles.values():
            if handle.inode.locked_by == handle.number:
                handle.inode.locked_by = 0
        self._handles.clear()

    def open_files(self) -> int:
        """Descriptors that the process has open."""
        return len(self._handles)

    # Faults

    def _enter(self) -> None:
        """Every operation takes a moment; the dead do nothing."""
        if not self._process.alive:
            raise GreenletExit
        self._loop.sleep(self._loop.chance.random() * 2e-4)

    def _enter_quickly(self) -> None:
        """The same for what the kernel answers from memory: others run meanwhile only now and then."""
        if not self._process.alive:
            raise GreenletExit
        if self._loop.chance.random() < 0.2:
            self._loop.sleep(self._loop.chance.random() * 1e-5)

    def _fail(self, fault: str, number: int) -> None:
        if self._fault_profile.strikes(fault):
            self._loop.log(fault)
            raise OSError(number, os.strerror(number))

    def _stall(self, kind: str) -> None:
        for fault, (least, most) in ((f"{kind}_slow", SLOW_S), (f"{kind}_hung", HUNG_S)):
            if self._fault_profile.strikes(fault):
                self._loop.log(fault)
                stall_s = self._loop.chance.uniform(least, most)
                self._process.stalled_until_s = max(self._process.stalled_until_s, self._loop.now_s + stall_s)
                self._loop.sleep(stall_s)
        task = self._loop.current
        if task is not None and not task.is_main and self._fault_profile.strikes(f"{kind}_never"):
            self._loop.log(f"{kind}_never")
            self._process.hangs = True
            self._loop.sleep(math.inf)

    # FileSystem

    def open(self, name: str, flags: int, dir_fd: int) -> int:
        self._enter()
        self._fail("open_eio", errno.EIO)
        self._fail("open_emfile", errno.EMFILE)
        direct = bool(flags & getattr(os, "O_DIRECT", 0))
        if direct and not self._disk.takes_direct:
            raise OSError(errno.EINVAL, "no direct I/O here")
        inode = self._disk.names.get(name)
        if inode is None:
            if not flags & os.O_CREAT:
                raise FileNotFoundError(errno.ENOENT, "no such file")
            inode = self._disk.create(name)
        elif flags & os.O_CREAT and flags & os.O_EXCL:
            raise FileExistsError(errno.EEXIST, "file exists")
        number = self._disk.next_handle()
        self._handles[number] = Handle(number, inode, direct)
        return number

    def preadv(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        self._enter()
        handle = self._aligned(fd, buffers, offset)
        self._stall("read")
        self._fail("read_eio", errno.EIO)
        wanted = sum(buffer.nbytes for buffer in buffers)
        data = self._seen(handle.inode, offset, wanted)
        if data and self._fault_profile.strikes("read_short"):
            unit = SECTOR_BYTES if handle.direct else 1
            data = data[: self._loop.chance.randrange(len(data) // unit + 1) * unit] or data[:unit]
        if data and self._fault_profile.strikes("read_rot"):
            flipped = bytearray(data)
            bit = self._loop.chance.randrange(8 * len(data))
            flipped[bit // 8] ^= 1 << bit % 8
            data = bytes(flipped)
        self._scatter(data, buffers)
        return len(data)

    def _scatter(self, data: bytes, buffers: list[memoryview]) -> None:
        """The device fills memory piece by piece, and others run in between."""
        at = 0
        for number, buffer in enumerate(buffers):
            if number and self._loop.chance.random() < 0.2:
                self._enter_quickly()
            part = data[at : at + buffer.nbytes]
            if not self.may_fill(buffer):
                self.overwritten = True
            buffer[: len(part)] = part
            at += len(part)

    def _seen(self, inode: Inode, offset: int, length: int) -> bytes:
        """The bytes there; or those of another offset, or of an earlier time."""
        if self._fault_profile.strikes("read_misdirected"):
            others = [other for other in self._disk.names.values() if len(other.data) >= PAGE_BYTES]
            if others:
                inode = self._loop.chance.choice(others)
                offset = PAGE_BYTES * self._loop.chance.randrange(len(inode.data) // PAGE_BYTES)
        data = bytes(inode.data[offset : offset + length])
        if data and inode.history and self._fault_profile.strikes("read_stale"):
            stale = bytearray(data)
            for page in range(offset // PAGE_BYTES, round_up(offset + len(data)) // PAGE_BYTES):
                old = inode.history.get(page)
                if old:
                    begin = page * PAGE_BYTES - offset
                    stale[max(0, begin) : max(0, begin) + len(old)] = old
            data = bytes(stale[: len(data)])
        return data

    def pwritev(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        self._enter()
        handle = self._aligned(fd, buffers, offset)
        self._stall("write")
        self._fail("write_eio", errno.EIO)
        self._fail("write_enospc", errno.ENOSPC)
        data = b"".join(buffers)
        if self._fault_profile.strikes("write_short"):
            unit = PAGE_BYTES if handle.direct else 1
            data = data[: self._loop.chance.randrange(len(data) // unit + 1) * unit] or data[:unit]
        if self._fault_profile.strikes("write_torn"):
            cut = SECTOR_BYTES * self._loop.chance.randrange(len(data) // SECTOR_BYTES + 1)
            self._disk.write(handle.inode, offset, data[:cut])
            raise OSError(errno.EIO, "torn")
        if self._fault_profile.strikes("write_lost"):
            return len(data)
        inode, at = handle.inode, offset
        if self._fault_profile.strikes("write_misdirected"):
            inode, at = self._elsewhere(inode, at, len(data))
        self._put(inode, at, data)
        if self._fault_profile.strikes("stored_rot"):
            self._disk.rot()
        return len(data)

    def _put(self, inode: Inode, offset: int, data: bytes) -> None:
        """Page by page; others run in between, and a crash leaves what was written so far."""
        for at in range(0, len(data), 4 * PAGE_BYTES):
            if at and self._loop.chance.random() < 0.2:
                self._enter_quickly()
            self._disk.write(inode, offset + at, data[at : at + 4 * PAGE_BYTES])

    def _elsewhere(self, inode: Inode, offset: int, length: int) -> tuple[Inode, int]:
        """An offset that holds other data; where files end, nothing is written."""
        files = [other for other in self._disk.names.values() if len(other.data) >= length]
        if not files:
            return inode, offset
        other = self._loop.chance.choice(files)
        return other, PAGE_BYTES * self._loop.chance.randrange((len(other.data) - length) // PAGE_BYTES + 1)

    def allocate(self, fd: int, length: int) -> None:
        self._enter()
        inode = self._handle(fd).inode
        self._fail("allocate_enospc", errno.ENOSPC)
        if not self._disk.room_for(length - len(inode.data)):
            raise OSError(errno.ENOSPC, "the disk is full")
        if length > len(inode.data):
            self._disk.resize(inode, length)

    def truncate(self, fd: int, length: int) -> None:
        self._enter()
        self._fail("truncate_eio", errno.EIO)
        self._disk.resize(self._handle(fd).inode, length)

    def unlink(self, name: str, dir_fd: int) -> None:
        self._enter()
        self._fail("unlink_eio", errno.EIO)
        if name not in self._disk.names:
            raise FileNotFoundError(errno.ENOENT, "no such file")
        self._disk.unlink(name)

    # Descriptors

    def open_directory(self, path: Path) -> int:
        return 3

    def close(self, fd: int) -> None:
        handle = self._handles.pop(fd, None)
        if handle is not None and handle.inode.locked_by == handle.number:
            handle.inode.locked_by = 0

    def status(self, fd: int, name: str | None = None) -> Status:
        self._enter_quickly()
        if name is None and fd == 3:
            return Status(False, 2, os.geteuid(), OWN_BYTES, OWN_BYTES, 1)
        if name is None:
            inode = self._handle(fd).inode
        elif name in self._disk.names:
            inode = self._disk.names[name]
        else:
            raise FileNotFoundError(errno.ENOENT, "no such file")
        return self._status(inode)

    def _status(self, inode: Inode) -> Status:
        allocated = self._disk.allocated_bytes(inode)
        return Status(True, inode.links, os.geteuid(), len(inode.data), allocated, inode.number)

    def capacity(self, dir_fd: int) -> int:
        return self._disk.capacity_bytes

    def listing(self, dir_fd: int) -> list[tuple[str, Status]]:
        self._enter()
        self._fail("listing_eio", errno.EIO)
        found = [(name, self._status(inode)) for name, inode in self._disk.names.items()]
        self._loop.chance.shuffle(found)
        return found

    def lock(self, fd: int) -> bool:
        self._enter_quickly()
        handle = self._handle(fd)
        if handle.inode.locked_by not in (0, handle.number):
            return False
        handle.inode.locked_by = handle.number
        return True

    def make_buffered(self, fd: int) -> None:
        self._handle(fd).direct = False

    # Checks

    def _handle(self, fd: int) -> Handle:
        assert fd in self._handles, "an operation on a descriptor that is closed"
        return self._handles[fd]

    def _aligned(self, fd: int, buffers: list[memoryview], offset: int) -> Handle:
        """Direct I/O wants whole pages everywhere; a real kernel would say EINVAL."""
        handle = self._handle(fd)
        if handle.direct:
            assert offset % PAGE_BYTES == 0, "a direct operation at an odd offset"
            assert all(buffer.nbytes % SECTOR_BYTES == 0 and is_aligned(buffer) for buffer in buffers), (
                "a direct operation on memory that does not lie on pages"
            )
        return handle
