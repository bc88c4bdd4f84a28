"""The disk tier on real files: what was stored is loaded, exactly, also after a restart; anything else is absent."""

from __future__ import annotations

from pathlib import Path

import pytest

from stowage.storage.disk.system import System
from stowage.storage.protocol import Described, Waitable
from stowage.testing.faults import FaultyFileSystem
from tests.disk_client import Client, descriptors, segments
from tests.tier_client import keys_of

MIB = 1 << 20


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("length", [1, 100, 4095, 4096, 4097, 70_000, 5 * MIB + 123])
def test_what_was_stored_is_loaded(tmp_path: Path, length: int, direct: bool) -> None:
    names = keys_of(*range(3 if length > MIB else 70))
    masks = [n + 1 for n in range(len(names))]
    with Client(tmp_path / "c", direct=direct) as client:
        assert not any(client.hits(names))
        assert client.store(names, [length] * len(names), masks).ok.all()
        assert client.tier.lookup(names).tolist() == masks
        outcome = client.load(names, [length] * len(names))
        assert outcome.ok.all() and outcome.masks.tolist() == masks and outcome.error == ""
        assert client.stats()["direct"] == direct, "the file system under the tests should take direct I/O"
        client.check()


def test_a_mixed_transfer_fails_per_chunk(tmp_path: Path) -> None:
    with Client(tmp_path / "c") as client:
        stored = keys_of(*range(40))
        client.store(stored, [8192] * 40)
        wanted = [name for pair in zip(stored, keys_of(*"x" * 40), strict=True) for name in pair]
        outcome = client.load(wanted[::-1], [8192] * 80)
        assert outcome.ok.tolist() == [False, True] * 40
        assert "40 of 80 chunks absent" in outcome.error


def test_a_chunk_of_another_length_is_a_miss_and_repaired(tmp_path: Path) -> None:
    with Client(tmp_path / "c") as client:
        client.store(keys_of(1), [8192])
        assert not client.load(keys_of(1), [4096]).ok.any()
        assert client.stats()["mismatched"] == 1 and client.hits(keys_of(1)) == [False]
        client.store(keys_of(1), [4096])
        assert client.load(keys_of(1), [4096]).ok.all()


def test_the_newest_store_of_a_key_wins_also_after_a_restart(tmp_path: Path) -> None:
    for _ in range(2):
        with Client(tmp_path / "c", segment_bytes=MIB) as client:
            for n in range(30):  # several segments
                client.store(keys_of("same", n), [100_000] * 2, [n + 1, 1])
        with Client(tmp_path / "c") as client:
            assert client.tier.lookup(keys_of("same")).tolist() == [30]
            assert client.load(keys_of("same"), [100_000]).masks.tolist() == [30]
            client.check()


def test_a_prefix_is_read_in_few_calls(tmp_path: Path) -> None:
    files = FaultyFileSystem()
    names = keys_of(*range(200))
    with Client(tmp_path / "c", system=System(files=files), readers=4) as client:
        client.store(names, [65536] * 200)
        files.calls.clear()
        assert client.load(names, [65536] * 200).ok.all()
        assert files.calls["preadv"] <= 6, "12.5 MiB, over four readers"


def test_restart_finds_everything_and_leaves_nothing_open(tmp_path: Path) -> None:
    names = keys_of(*range(100))
    with Client(tmp_path / "c", segment_bytes=MIB) as client:
        client.store(names, [50_000] * 100)
        client.check()
    assert not list(descriptors(tmp_path))
    files = FaultyFileSystem()
    with Client(tmp_path / "c", system=System(files=files)) as client:
        assert files.calls["preadv"] <= 4 * len(segments(tmp_path / "c")), "opened from the footers only"
        assert client.load(names, [50_000] * 100).ok.all()
        client.check()


def test_discarded_keys_are_absent_until_stored_again(tmp_path: Path) -> None:
    with Client(tmp_path / "c") as client:
        client.store(keys_of(1, 2), [10, 10])
        client.tier.discard(keys_of(1, 3))
        assert client.hits(keys_of(1, 2)) == [False, True]
        client.store(keys_of(1), [10])
        assert client.load(keys_of(1, 2), [10, 10]).ok.all()


def test_empty_payloads_and_masks_are_refused(tmp_path: Path) -> None:
    with Client(tmp_path / "c") as client:
        assert client.store(keys_of(1, 2, 3), [10, 0, 10], [0, 1, 1]).ok.tolist() == [False, False, True]
        assert client.load(keys_of(1, 2, 3), [10, 0, 10]).ok.tolist() == [False, False, True]
        assert client.outcome(client.begin("load", client.transfer([], []))).ok.shape == (0,)
        assert client.outcome(client.begin("store", client.transfer([], []))).ok.shape == (0,)


def test_it_is_what_the_store_expects(tmp_path: Path) -> None:
    with Client(tmp_path / "c") as client:
        assert isinstance(client.tier, Waitable) and isinstance(client.tier, Described)
        assert client.tier.name == "disk"
        client.store(keys_of(1), [100], [2**64 - 1])
        stats = client.stats()
        assert (stats["chunks"], stats["segments"], stats["writes"], stats["write_bytes"]) == (1, 1, 1, 100)
        assert client.load(keys_of(1), [100]).masks.tolist() == [2**64 - 1]
