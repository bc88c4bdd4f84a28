"""Every tier that is shipped passes the conformance suite, and so does the example in the documentation."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.examples.dict_tier import DictTier
from stowage.storage.disk import DiskTier
from stowage.storage.format.protection import Method, Protection, SecretKey
from stowage.storage.packed_memory import PackedMemoryTier
from stowage.testing import TierConformance
from tests.depth import few_or_all

KIB = 1 << 10
MIB = 1 << 20
NAMESPACE = bytes(range(32))


@pytest.mark.exhaustive
@pytest.mark.slow
class TestDictTier(TierConformance):
    """docs/examples/dict_tier.py, with room for everything."""

    keeps_bytes = 1 * MIB
    examples = few_or_all(20, 80)

    def make_tier(self, directory: Path) -> DictTier:
        return DictTier(1 * MIB)


@pytest.mark.exhaustive
class TestSmallDictTier(TierConformance):
    """It evicts, also within one transfer."""

    keeps_bytes = 40 * KIB
    examples = few_or_all(8, 30)

    def make_tier(self, directory: Path) -> DictTier:
        return DictTier(40 * KIB)


@pytest.mark.exhaustive
@pytest.mark.slow
class TestPackedMemoryTier(TierConformance):
    """The packed part of host memory, with room for everything, even if nothing packs."""

    keeps_bytes = 4 * MIB
    examples = few_or_all(20, 80)

    def make_tier(self, directory: Path) -> PackedMemoryTier:
        return PackedMemoryTier(4 * MIB + 64 * KIB)


@pytest.mark.exhaustive
class TestSmallPackedMemoryTier(TierConformance):
    """It goes round all the time, also within one transfer, and moves what was loaded."""

    examples = few_or_all(15, 60)

    def make_tier(self, directory: Path) -> PackedMemoryTier:
        return PackedMemoryTier(48 * KIB + 100)


@pytest.mark.exhaustive
@pytest.mark.slow
class TestDiskTier(TierConformance):
    """With room for everything: nothing that was stored is lost, closed and opened again."""

    keeps_bytes = 8 * MIB
    persistent = True
    examples = few_or_all(20, 80)

    def make_tier(self, directory: Path) -> DiskTier:
        return DiskTier(directory, 64 * MIB, NAMESPACE, readers=2, refresh_s=0.01)


@pytest.mark.exhaustive
@pytest.mark.slow
class TestSmallDiskTier(TierConformance):
    """Three segments, four chunks each: they are reclaimed, and hot chunks rewritten, all the time."""

    persistent = True
    examples = few_or_all(20, 80)

    def make_tier(self, directory: Path) -> DiskTier:
        return DiskTier(directory, 400 * KIB, NAMESPACE, readers=2, segment_bytes=128 * KIB, refresh_s=0.01)


@pytest.mark.exhaustive
@pytest.mark.slow
class TestTinyDiskTier(TierConformance):
    """Whole pages, which go straight to the disk, and segments that are full after a few of them: most stores go on
    into the next one, into which chunks that were hit are copied at the same time.
    """

    persistent = True
    lengths = (8 * KIB, 16 * KIB)
    examples = few_or_all(30, 120)
    steps = 60

    def make_tier(self, directory: Path) -> DiskTier:
        return DiskTier(directory, 300 * KIB, NAMESPACE, readers=2, segment_bytes=96 * KIB, refresh_s=1e9)


@pytest.mark.exhaustive
@pytest.mark.slow
class TestPackedDiskTier(TierConformance):
    """Small segments, packed wherever that saves a page, read back by tiers of either kind."""

    persistent = True
    lengths = (5000, 8 * KIB, 20_480)
    examples = few_or_all(15, 60)
    opened = 0

    def make_tier(self, directory: Path) -> DiskTier:
        type(self).opened += 1
        compression = "on" if self.opened % 3 else "off"
        return DiskTier(
            directory, 400 * KIB, NAMESPACE, readers=2, segment_bytes=128 * KIB, refresh_s=0.01, compression=compression
        )


@pytest.mark.exhaustive
@pytest.mark.slow
class TestEncryptedDiskTier(TierConformance):
    """Everything passes through the staging memory."""

    keeps_bytes = 8 * MIB
    persistent = True
    examples = few_or_all(8, 25)

    def make_tier(self, directory: Path) -> DiskTier:
        protection = Protection(Method.AES_256_GCM, [SecretKey(bytes(range(32)))])
        return DiskTier(directory, 64 * MIB, NAMESPACE, readers=2, refresh_s=0.01, protection=protection)


@pytest.mark.exhaustive
@pytest.mark.slow
class TestBufferedDiskTier(TierConformance):
    """Without direct I/O, and with a queue that is soon full."""

    persistent = True
    examples = few_or_all(8, 25)

    def make_tier(self, directory: Path) -> DiskTier:
        return DiskTier(directory, 64 * MIB, NAMESPACE, readers=1, direct=False, transfers_max=2)
