"""Directories with chunks that are numbered, to damage and to scrub."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from stowage.storage.disk.scrub import Report, scrub
from stowage.storage.format.protection import Protection
from tests.disk_client import Client, segments, used_bytes
from tests.tier_client import key

SEGMENT = 256 << 10
LENGTHS = (100, 4096, 5000, 20_000)


def length_of(number: int) -> int:
    return LENGTHS[number % len(LENGTHS)]


@dataclass(frozen=True)
class Place:
    """Where a chunk lies."""

    path: Path
    offset: int
    length: int


@dataclass(frozen=True)
class Cache:
    """A directory with chunks in it, numbered."""

    directory: Path
    places: dict[int, Place]
    protection: Protection | None = None

    def flip(self, *numbers: int) -> None:
        """One bit each."""
        for number in numbers:
            place = self.places[number]
            with place.path.open("r+b") as file:
                at = place.offset + number * 7919 % place.length
                file.seek(at)
                byte = file.read(1)[0]
                file.seek(at)
                file.write(bytes([byte ^ 1 << number % 8]))

    def scrub(self, **options: object) -> Report:
        before = used_bytes(self.directory)
        report = scrub(self.directory, **options)  # type: ignore[arg-type]
        assert used_bytes(self.directory) <= before, "it never needs room"
        assert report.bad == report.removed + report.vanished + report.left
        return report

    def image(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in segments(self.directory)}

    def found(self) -> set[int]:
        """What a tier that is opened now loads, exactly. Fails if it comes across a bad chunk, or needs a repair."""
        with Client(self.directory, protection=self.protection) as client:
            numbers = sorted(self.places)
            outcome = client.load([key(n) for n in numbers], [self.places[n].length for n in numbers])
            stats = client.stats()
            assert (stats["corrupt"], stats["read_errors"], stats["repaired_segments"]) == (0, 0, 0)
            client.check()
        return {number for number, ok in zip(numbers, outcome.ok.tolist(), strict=True) if ok}

    def loaded(self) -> set[int]:
        """What a tier that is opened now loads, whatever else it comes across."""
        with Client(self.directory, protection=self.protection) as client:
            numbers = sorted(self.places)
            outcome = client.load([key(n) for n in numbers], [self.places[n].length for n in numbers])
        return {number for number, ok in zip(numbers, outcome.ok.tolist(), strict=True) if ok}


def fill(directory: Path, count: int = 200, protection: Protection | None = None) -> Cache:
    """Chunks 0 to `count`, in batches of several lengths, over several segments."""
    with Client(directory, segment_bytes=SEGMENT, protection=protection) as client:
        for start in range(0, count, 12):
            numbers = range(start, min(start + 12, count))
            assert client.store([key(n) for n in numbers], [length_of(n) for n in numbers]).ok.all()
        places = {n: place_of(client, n) for n in range(count)}
        assert len({place.path for place in places.values()}) > 2
    return Cache(directory, places, protection)


def place_of(client: Client, number: int) -> Place:
    found = client.tier._index.find([key(number)])
    name = client.tier._catalog.name_of(int(found.segments[0]))
    return Place(client.directory / str(name), int(found.offsets[0]), int(found.lengths[0]))


def copy_of(cache: Cache, directory: Path) -> Cache:
    shutil.copytree(cache.directory, directory)
    places = {n: Place(directory / place.path.name, place.offset, place.length) for n, place in cache.places.items()}
    return Cache(directory, places, cache.protection)
