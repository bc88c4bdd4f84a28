"""Every hostile file of `hostile.py`: exact or absent, in bounded memory and work, and stored anew afterwards."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from stowage.core.geometry import PAGE_BYTES
from stowage.errors import FormatError
from stowage.storage.disk import recovery
from stowage.storage.disk.system import System
from stowage.storage.format import envelope, segment
from stowage.storage.format.segment import ENTRY_BYTES, SegmentName
from stowage.testing.faults import FaultyFileSystem
from tests.attacks.hostile import ANOTHER, HOSTILE, LIMIT, hostile
from tests.disk_client import NAMESPACE, Client
from tests.inline_worker_pool import InlineWorkerPool
from tests.tier_client import key

NAMES, LENGTHS = [key(n) for n in range(5)], [4096, 100, 8192, 4096, 6000]
MIB = 1 << 20
MEMORY_BYTES_MAX = 64 * MIB
"""Address space that opening, reading and storing may take besides: three times what the honest store takes."""
READS_MAX = 200
ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def memory_bounded(more_bytes: int) -> Iterator[None]:
    """Whoever maps or allocates so much more gets a MemoryError or an OSError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + more_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A good store, and a folder outside of it."""
    (tmp_path / "outside").mkdir()
    with Client(tmp_path / "c", LIMIT) as client:
        assert client.store(NAMES, LENGTHS).ok.all()
    return tmp_path / "c"


@pytest.mark.parametrize("make", HOSTILE.values(), ids=HOSTILE.keys())
def test_it_gets_nowhere(directory: Path, make: object) -> None:
    held = make(directory)  # type: ignore[operator]
    counting = FaultyFileSystem()
    system = System(files=counting, worker_pool=InlineWorkerPool)
    with memory_bounded(MEMORY_BYTES_MAX), Client(directory, LIMIT, readers=1, system=system) as client:
        client.load(NAMES, LENGTHS)  # asserts that what is found is exact
        assert counting.calls["preadv"] <= READS_MAX
        assert not client.stats()["read_errors"], "that is how memory that is not to be had would show"
        missing = [n for n, here in enumerate(client.hits(NAMES)) if not here]
        assert client.store([NAMES[n] for n in missing], [LENGTHS[n] for n in missing]).ok.all()
        assert client.load(NAMES, LENGTHS).ok.all()
        client.check()
    with Client(directory, LIMIT, readers=1, system=System(worker_pool=InlineWorkerPool)) as client:
        assert client.load(NAMES, LENGTHS).ok.all(), "for good"
    assert not list((directory.parent / "outside").iterdir())
    del held


def test_there_are_many_and_each_says_why() -> None:
    assert len(HOSTILE) >= 24
    with pytest.raises(AssertionError, match="why"):
        hostile(lambda directory: None)


def test_the_memory_bound_can_be_hit() -> None:
    with memory_bounded(MEMORY_BYTES_MAX), pytest.raises((MemoryError, OSError)):
        np.ones(2 * MEMORY_BYTES_MAX, np.uint8)


def test_a_reader_that_believed_the_file_would_be_caught(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same file, with the check on the trailer left out: the bound is hit, and that shows where the test looks."""
    HOSTILE["a_footer_of_two_to_the_63_bytes"](directory)
    trailer = segment.Trailer(3 * PAGE_BYTES, 1 << 40, bytes(16))
    monkeypatch.setattr(segment, "parse_trailer", lambda *_: trailer)
    with (
        memory_bounded(MEMORY_BYTES_MAX),
        Client(directory, LIMIT, readers=1, system=System(worker_pool=InlineWorkerPool)) as client,
    ):
        assert client.stats()["read_errors"]


# as many as there can be


class SealedInMemory:
    """What `seal` asks of a file."""

    def __init__(self, length: int) -> None:
        self.bytes = length
        self.written = 0

    def write(self, buffers: list[memoryview], offset: int) -> None:
        self.written += sum(buffer.nbytes for buffer in buffers)

    def truncate(self, length: int) -> None:
        self.bytes = length


def test_giving_up_batches_takes_no_square_of_their_number() -> None:
    """200,000 batches of one chunk, and no room for a footer: in square time this takes half an hour."""
    count = 200_000
    entries = np.zeros(count, segment._ENTRY)
    entries["offset"] = PAGE_BYTES * (2 + 2 * np.arange(count))
    end = PAGE_BYTES * (1 + 2 * count)
    file = SealedInMemory(end)
    assert recovery.seal(file, ANOTHER, np.split(entries, count), end)  # type: ignore[arg-type]
    kept = file.written // ENTRY_BYTES
    assert count * 0.95 < kept < count and file.bytes <= end


def torn(directory: Path, batches: int, chunks: int) -> Path:
    """A segment without a footer: so many batches of so many chunks, whose payloads are holes."""
    size = PAGE_BYTES + batches * (1 + chunks) * PAGE_BYTES
    path = directory / str(ANOTHER)
    with path.open("wb") as file:
        path.chmod(0o600)
        file.write(segment.pack_segment_header(ANOTHER, size, NAMESPACE))
        for number in range(batches):
            at = PAGE_BYTES + number * (1 + chunks) * PAGE_BYTES
            headers = [
                envelope.pack_fields(key((number, n)), NAMESPACE, 1, PAGE_BYTES) + bytes(16) for n in range(chunks)
            ]
            file.seek(at)
            file.write(segment.pack_batch_page(ANOTHER.id, at, headers, [PAGE_BYTES] * chunks))
        file.truncate(size + 64 * PAGE_BYTES)
    return path


def test_more_chunks_than_a_footer_can_list(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torn segment with more than it may hold is cut where its footer ends; it does not stop the engine."""
    monkeypatch.setattr(segment, "ENTRIES_MAX", 64)
    path = torn(directory, batches=3, chunks=31)
    with Client(directory, LIMIT) as client:
        assert client.stats()["repaired_segments"] == 1 and client.stats()["chunks"] == 5 + 2 * 31
        assert client.load(NAMES, LENGTHS).ok.all()
        client.check()
    assert path.stat().st_size == PAGE_BYTES * (1 + 2 * 32) + segment.footer_room(62)


def test_a_bad_sector_among_read_ahead_pages_costs_nothing(directory: Path) -> None:
    """Pages of short batches are read many at a time; where that fails, they are read one by one."""
    torn(directory, batches=40, chunks=1)
    files = FaultyFileSystem()
    real = files.preadv

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        if sum(buffer.nbytes for buffer in buffers) > 16 * PAGE_BYTES:
            raise OSError(5, "a bad sector")
        return real(fd, buffers, offset)

    files.preadv = preadv  # type: ignore[method-assign]
    with Client(directory, LIMIT, readers=1, system=System(files=files, worker_pool=InlineWorkerPool)) as client:
        assert client.stats()["chunks"] == 5 + 40 and client.stats()["read_errors"] == 0


OPEN_IN_A_CHILD = """
import re, sys, time
from pathlib import Path
from tests.disk_client import Client
limit = int(sys.argv[2])
began_s = time.monotonic()
with Client(Path(sys.argv[1]), limit) as client:
    # Not ru_maxrss, which begins with that of the process that made this one.
    (peak,) = re.findall("VmHWM:[^0-9]*([0-9]+)", Path("/proc/self/status").read_text())
    print(client.stats()["chunks"], time.monotonic() - began_s, peak)
"""


@pytest.mark.rare
@pytest.mark.slow
def test_the_largest_index_that_there_can_be(tmp_path: Path) -> None:
    """A sealed segment of 1,048,576 entries, all of them possible: a footer of 136 MiB, for one page of payload.

    Memory is bounded by the footer's own length (index and footer take about three times as much), and opening takes
    seconds. A limit below that length refuses the file.
    """
    directory = tmp_path / "c"
    Client(directory).close()
    name, count = SegmentName(1, b"largest!"), segment.ENTRIES_MAX
    entries = np.zeros(count, segment._ENTRY)
    entries["magic"], entries["version"], entries["mask"], entries["length"] = b"STWC", 1, 1, PAGE_BYTES
    entries["namespace"] = np.frombuffer(NAMESPACE, "V32")
    entries["key"] = np.frombuffer(os.urandom(32 * count), "V32")
    entries["offset"] = 2 * PAGE_BYTES
    header = envelope.pack_fields(key(0), NAMESPACE, 1, PAGE_BYTES) + bytes(16)
    with (directory / str(name)).open("wb") as file:
        file.write(segment.pack_segment_header(name, 1 << 28, NAMESPACE))
        file.write(segment.pack_batch_page(name.id, PAGE_BYTES, [header], [PAGE_BYTES]) + bytes(PAGE_BYTES))
        file.write(segment.pack_footer([entries], name.id, 3 * PAGE_BYTES))
    (directory / str(name)).chmod(0o600)
    length = (directory / str(name)).stat().st_size
    assert length > 136 * MIB
    for limit, expected in ((256 * MIB, count), (128 * MIB, 0)):
        command = [sys.executable, "-c", OPEN_IN_A_CHILD, str(directory), str(limit)]
        environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300)
        chunks, seconds, kib = done.stdout.split()
        assert int(chunks) == expected
        assert float(seconds) < 60, "minutes"
        assert int(kib) << 10 < 200 * MIB + 4 * length
    assert not list(directory.glob("*.seg")), "reclaimed: it is larger than the limit"


def test_damaged_headers_are_format_errors_only() -> None:
    """What parsers raise is one kind of error, whatever the bytes: whoever calls them catches that and nothing else."""
    for length in (0, 1, 127, 128, 129, PAGE_BYTES - 1, PAGE_BYTES + 1):
        for parse in (
            lambda data: segment.parse_segment_header(data, ANOTHER),
            lambda data: segment.parse_batch_page(data, ANOTHER.id, PAGE_BYTES, 1 << 20),
            lambda data: segment.parse_trailer(data, ANOTHER.id, 1 << 20),
        ):
            with pytest.raises(FormatError):
                parse(bytes(length))
