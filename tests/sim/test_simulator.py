"""The simulator itself: it replays, it reaches every fault and branch, and it finds bugs that are planted for it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from stowage.cache.fetches import Fetches
from stowage.cache.flow import Flow
from stowage.cache.ledger import Ledger
from stowage.cache.spill_queue import SpillQueue
from stowage.storage.disk import allocator, loader, reader
from stowage.storage.disk.index import Index
from stowage.testing.sim import Failure, simulate
from tests.sim.worlds import Plant, command, first_failure

SEEDS_TO_FIND = 1000
FOUND = Path(__file__).with_name("found_seeds.json")


def dropped_checksum(patch: pytest.MonkeyPatch) -> None:
    """Whatever was read counts as verified."""
    real = reader.Reader._read

    def read(self: reader.Reader, file: object, run: reader.Run, *rest: object) -> list[reader.Result]:
        results = real(self, file, run, *rest)  # type: ignore[arg-type]
        return [reader.Result.OK if result is reader.Result.CORRUPT else result for result in results]

    patch.setattr(reader.Reader, "_read", read)


def early_ready(patch: pytest.MonkeyPatch) -> None:
    """Reserved slots are served before their bytes are written."""
    real = Flow.reserve

    def reserve(self: Flow, group: int, keys: list[bytes], masks: np.ndarray) -> np.ndarray:
        slots = real(self, group, keys, masks)
        self.ledger.commit(slots[slots >= 0])
        return slots

    patch.setattr(Flow, "reserve", reserve)
    patch.setattr(Flow, "commit", lambda self, slots, now_s: None)
    patch.setattr(Flow, "abort", lambda self, slots: None)


def missed_pin_of_a_fetch(patch: pytest.MonkeyPatch) -> None:
    """What a fetch found in host may be evicted under it."""
    patch.setattr(Ledger, "pin", lambda self, slots: None)
    patch.setattr(Ledger, "unpin", lambda self, slots: None)


def limit_off_by_a_page(patch: pytest.MonkeyPatch) -> None:
    """One page less than needed is reclaimed."""
    real = allocator.SegmentAllocator._reclaim

    def reclaim(self: allocator.SegmentAllocator, entries: list, excess: int, *, partly: bool = False) -> bool:
        return real(self, entries, excess - 4096 if excess > 1 else excess, partly=partly)

    patch.setattr(allocator.SegmentAllocator, "_reclaim", reclaim)


def lost_wake_up_of_a_reader(patch: pytest.MonkeyPatch) -> None:
    real = loader.Loader.submit

    def submit(self: loader.Loader, transfer: object) -> bool:
        worker_pool, self._worker_pool = self._worker_pool, type("Deaf", (), {"wake": lambda *_: None})()
        try:
            return real(self, transfer)  # type: ignore[arg-type]
        finally:
            self._worker_pool = worker_pool

    patch.setattr(loader.Loader, "submit", submit)


def lost_wake_up_of_the_engine(patch: pytest.MonkeyPatch) -> None:
    from stowage.storage.disk.tier import DiskTier

    patch.setattr(DiskTier, "_finish", lambda self, outcome: self._outcomes.append(outcome))


def outcome_before_the_last_run(patch: pytest.MonkeyPatch) -> None:
    """A transfer is reported when its first run is done; the others still write into its buffers."""
    patch.setattr(loader.Loader, "_settled", lambda self, flight, chunks: self._report(flight))


def index_after_reclaim(patch: pytest.MonkeyPatch) -> None:
    """Rows of a segment that is gone are not forgotten."""
    patch.setattr(Index, "drop_segment", lambda self, segment: None)


def forgotten_holes(patch: pytest.MonkeyPatch) -> None:
    """A chunk that is stored with holes, because its first blocks were freed, is remembered as whole."""
    real = Ledger.reserve

    def reserve(self: Ledger, slab: int, keys: list[bytes], masks: np.ndarray) -> np.ndarray:
        whole = [(1 << int(mask).bit_length()) - 1 for mask in masks.tolist()]
        return real(self, slab, keys, np.array(whole, np.uint64))

    patch.setattr(Ledger, "reserve", reserve)


def fetch_without_deadline(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Fetches, "end_due", lambda self, now_s: 0)


def spill_that_is_not_pinned(patch: pytest.MonkeyPatch) -> None:
    """A slot may be given to another chunk while the disk still reads it."""
    real = Flow._spill

    def spill(self: Flow, tier: int, queue: SpillQueue, now_s: float) -> bool:
        pin, Ledger.pin = Ledger.pin, lambda self, slots: None  # type: ignore[method-assign]
        try:
            return real(self, tier, queue, now_s)
        finally:
            Ledger.pin = pin  # type: ignore[method-assign]

    patch.setattr(Flow, "_spill", spill)
    patch.setattr(Ledger, "unpin", lambda self, slots: None)


def leaked_segment(patch: pytest.MonkeyPatch) -> None:
    """A segment that could not be made whole keeps its descriptor, and its lock."""
    patch.setattr(allocator.SegmentAllocator, "_discard", lambda self, file, name: None)


PLANTS: list[Plant] = [
    dropped_checksum,
    early_ready,
    missed_pin_of_a_fetch,
    limit_off_by_a_page,
    lost_wake_up_of_a_reader,
    lost_wake_up_of_the_engine,
    outcome_before_the_last_run,
    index_after_reclaim,
    forgotten_holes,
    fetch_without_deadline,
    spill_that_is_not_pinned,
    leaked_segment,
]


def test_60_worlds_hold_every_promise() -> None:
    for seed in range(60):
        simulate(seed)


@pytest.mark.parametrize("found", json.loads(FOUND.read_text()), ids=lambda found: str(found["seed"]))
def test_seeds_that_once_failed_hold(found: dict) -> None:
    simulate(found["seed"])


def test_the_report_says_what_was_never_reached() -> None:
    report = command("--first", "3", "--seeds", "1", "--complete", expected=1)
    assert report["failures"] == [] and "fault read_eio" in report["never"] and "power_cut" in report["never"]
    assert command("--first", "3", "--seeds", "1")["happened"]["processes"] >= 3


def test_a_seed_names_a_run_whatever_the_hash_seed() -> None:
    runs = [command("--first", "7", "--seeds", "3", "--jobs", "1", PYTHONHASHSEED=number) for number in ("0", "1", "2")]
    for run in runs:
        del run["seconds"]
    assert runs[0] == runs[1] == runs[2]
    assert simulate(7).digest == simulate(7).digest != simulate(8).digest


def test_a_failure_says_how_to_replay_it(monkeypatch: pytest.MonkeyPatch) -> None:
    dropped_checksum(monkeypatch)
    failure = first_failure(simulate, SEEDS_TO_FIND)
    assert failure is not None
    assert f"--first {failure.seed} --seeds 1" in str(failure) and "other bytes" in str(failure)
    with pytest.raises(Failure) as again:
        simulate(failure.seed)
    assert str(again.value) == str(failure)


@pytest.mark.slow
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    failure = first_failure(simulate, SEEDS_TO_FIND)
    assert failure is not None, f"{plant.__name__} survived {SEEDS_TO_FIND} seeds"
