"""Stores that are opened thousands of times: real files, no threads, through the page cache (O_DIRECT would send every
flipped bit to the disk and back; the bytes that arrive are the same).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stowage.storage.disk.system import System
from tests.disk_client import NAMESPACE, Client
from tests.inline_worker_pool import InlineWorkerPool

LIMIT = 8 << 20


def opened(directory: Path, limit_bytes: int = LIMIT, *, namespace: bytes = NAMESPACE, **options: Any) -> Client:
    system = System(worker_pool=InlineWorkerPool)
    return Client(directory, limit_bytes, namespace=namespace, readers=1, direct=False, system=system, **options)


def noticed(stats: dict[str, Any]) -> int:
    """How often the tier counted that something it had stored was not as it should be."""
    names = ("corrupt", "mismatched", "vanished", "damaged_segments", "repaired_segments", "removed_leftovers")
    return sum(stats[name] for name in names)


def repair_by_storing(client: Client, keys: list[bytes], lengths: list[int]) -> None:
    """What is absent is stored again, and found and exact from then on."""
    missing = [n for n, here in enumerate(client.hits(keys)) if not here]
    assert client.store([keys[n] for n in missing], [lengths[n] for n in missing]).ok.all()
    assert client.load(keys, lengths).ok.all()
    client.check()
