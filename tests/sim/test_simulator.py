"""The simulator itself: it replays, it reaches every fault and branch, and it finds bugs that are planted for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stowage.cache.fetches import Fetches
from stowage.cache.flow import Flow
from stowage.cache.keymap import After
from stowage.cache.ledger import Ledger
from stowage.storage.disk import allocator, loader, reader
from stowage.storage.disk.bundle import LoadFlight
from stowage.storage.disk.index import Index
from stowage.testing.sim import simulate
from stowage.testing.sim.__main__ import main
from tests.sim.worlds import Planted, assert_no_hash_seed_matters, command

SEEDS_TO_FIND = 1000
FOUND = Path(__file__).with_name("found_seeds.json")


def dropped_checksum(patch: pytest.MonkeyPatch) -> None:
    """Whatever was read counts as verified."""
    real = reader.Reader._verify

    def verify(self: reader.Reader, fetched: reader.Fetched) -> list[reader.Result]:
        return [reader.Result.OK if result is reader.Result.CORRUPT else result for result in real(self, fetched)]

    patch.setattr(reader.Reader, "_verify", verify)


def early_ready(patch: pytest.MonkeyPatch) -> None:
    """Reserved slots are served before their bytes are written."""
    real = Flow.reserve

    def reserve(self: Flow, group: int, keys: list[bytes], masks: np.ndarray, after: After = None) -> np.ndarray:
        slots = real(self, group, keys, masks, after)
        self.ledger.commit(slots[slots >= 0])
        return slots

    patch.setattr(Flow, "reserve", reserve)
    patch.setattr(Flow, "commit", lambda self, slots, now_s: None)
    patch.setattr(Flow, "abort", lambda self, slots: None)


def missed_pin_of_a_fetch(patch: pytest.MonkeyPatch) -> None:
    """What a fetch found in host may be evicted under it."""
    patch.setattr(Ledger, "pin", lambda self, slots: None)
    patch.setattr(Ledger, "unpin", lambda self, slots, used=True: None)


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

    patch.setattr(DiskTier, "_report", lambda self, outcome: self._outcomes.append(outcome))


def outcome_before_the_last_run(patch: pytest.MonkeyPatch) -> None:
    """A transfer is reported when its first run is done; the others still write into its buffers."""
    reported = set()

    def settled(self: loader.Loader, flight: LoadFlight, chunks: int) -> None:
        if flight not in reported:
            reported.add(flight)
            self._report(flight)

    patch.setattr(loader.Loader, "_chunks_done", settled)


def index_after_reclaim(patch: pytest.MonkeyPatch) -> None:
    """Rows of a segment that is gone are not forgotten."""
    patch.setattr(Index, "drop_segment", lambda self, segment: 0)


def forgotten_holes(patch: pytest.MonkeyPatch) -> None:
    """A chunk that is stored with holes, because its first blocks were freed, is remembered as whole."""
    real = Ledger.reserve

    def reserve(self: Ledger, slab: int, keys: list[bytes], masks: np.ndarray, after: After = None) -> np.ndarray:
        whole = [(1 << int(mask).bit_length()) - 1 for mask in masks.tolist()]
        return real(self, slab, keys, np.array(whole, np.uint64), after)

    patch.setattr(Ledger, "reserve", reserve)


def fetch_without_deadline(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Fetches, "end_due", lambda self, now_s: 0)


def spill_that_is_not_pinned(patch: pytest.MonkeyPatch) -> None:
    """A slot may be given to another chunk while the disk still reads it."""
    begin, end = Flow._spill, Flow._spilled

    def spill(self: Flow, *args: Any) -> bool:
        with pytest.MonkeyPatch.context() as meanwhile:
            meanwhile.setattr(Ledger, "pin", lambda self, slots: None)
            return begin(self, *args)

    def spilled(self: Flow, *args: Any) -> None:
        with pytest.MonkeyPatch.context() as meanwhile:
            meanwhile.setattr(Ledger, "unpin", lambda self, slots, used=True: None)
            end(self, *args)

    patch.setattr(Flow, "_spill", spill)
    patch.setattr(Flow, "_spilled", spilled)


def leaked_segment(patch: pytest.MonkeyPatch) -> None:
    """A segment that could not be made whole keeps its descriptor, and its lock."""
    patch.setattr(allocator.SegmentAllocator, "_discard", lambda self, file, name: None)


PLANTS = [
    Planted(dropped_checksum, 54, "came back with other bytes"),
    Planted(early_ready, 8, "came back with other bytes"),
    Planted(missed_pin_of_a_fetch, 0, "a pin is held by nobody"),
    Planted(limit_off_by_a_page, 0, "bytes in a directory whose limit is"),
    Planted(lost_wake_up_of_a_reader, 7, "every reader sleeps"),
    Planted(lost_wake_up_of_the_engine, 0, "the engine sleeps"),
    Planted(outcome_before_the_last_run, 47, "filled by a read whose transfer had been reported"),
    Planted(index_after_reclaim, 0, "chunks of an unknown segment"),
    Planted(forgotten_holes, 34, "came back with other bytes"),
    Planted(fetch_without_deadline, 138, "did not end by its deadline"),
    Planted(spill_that_is_not_pinned, 0, "a pin is held by nobody, or a holder has no pin"),
    Planted(leaked_segment, 4, "descriptors are still open"),
]


def test_some_worlds_hold_every_promise() -> None:
    """`make test` runs hundreds besides."""
    for seed in range(12):
        simulate(seed)


@pytest.mark.parametrize("found", json.loads(FOUND.read_text()), ids=lambda found: str(found["seed"]))
def test_seeds_that_once_failed_hold(found: dict) -> None:
    simulate(found["seed"])


def test_the_report_says_what_was_never_reached(capsys: pytest.CaptureFixture[str]) -> None:
    report = command("--first", "3", "--seeds", "1", "--complete", expected=1)
    assert report["failures"] == [] and "fault read_eio" in report["never"] and "power_cut" in report["never"]
    assert main(["--first", "3", "--seeds", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["happened"]["processes"] >= 3


def test_a_seed_names_a_run_whatever_the_hash_seed() -> None:
    assert_no_hash_seed_matters(engine=False)
    assert simulate(7).digest == simulate(7).digest != simulate(8).digest


def test_a_failure_says_how_to_replay_it(monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTS[0].is_replayed(simulate, SEEDS_TO_FIND, monkeypatch, command="sim")


@pytest.mark.slow
@pytest.mark.parametrize("planted", PLANTS, ids=lambda planted: planted.plant.__name__)
def test_a_planted_bug_is_found(planted: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    planted.is_found(simulate, SEEDS_TO_FIND, monkeypatch)
