"""``StowageStorage`` as SGLang's controllers use it, beside SGLang's own file backend."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.threads import together

pytest.importorskip("sglang.srt.mem_cache.hicache_storage", reason="make sglang installs it")

from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

from stowage.errors import BudgetError, ConfigError
from stowage.plugins.sglang import StowageStorage
from tests.sglang.backends import LIMIT, Make, config, hashes, indices
from tests.sglang.pools import PAGE, Pool


@pytest.mark.parametrize("kind", ["file", "stowage"])
def test_single_values(kind: str, make: Make) -> None:
    """Stored, found, read to the bit; what was never stored is absent; a second store of a key changes nothing."""
    storage = make(kind)
    first, second, never = hashes(3)
    value, other = torch.randn(1152), torch.randn(1152)
    assert not storage.exists(first)
    assert storage.set(first, value) and storage.batch_set([second], [other])
    assert storage.set(first, other), "it is there: nothing to do"
    assert storage.exists(first) and not storage.exists(never)
    target = torch.zeros(1152)
    assert storage.get(first, target) is target
    assert torch.equal(target, value)
    targets = [torch.zeros(1152) for _ in range(3)]
    came = storage.batch_get([first, never, second], targets)
    assert came[1] is None
    assert torch.equal(came[0], value) and torch.equal(came[2], other)
    assert storage.batch_exists([first, second, never, first]) == 2
    assert storage.clear()
    assert not storage.exists(first) and storage.get(first, target) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_pages_come_back_to_other_places(dtype: torch.dtype, make: Make) -> None:
    """Through the host pool's pages, after a restart, in another order; only those that were asked for are touched."""
    pool = Pool(dtype=dtype)
    pool.fill()
    storage, keys = make(pool=pool), hashes(20)
    assert storage.batch_set_v1(keys, indices(20)) == [True] * 20
    storage.close()
    target = Pool(dtype=dtype)
    storage = make(pool=target)
    assert storage.batch_exists(keys) == 20
    missing = hashes(1, seed=9)
    assert storage.batch_get_v1([keys[7], *missing, keys[3]], indices(3, first=30)) == [True, False, True]
    for page, source in ((30, 7), (32, 3)):
        assert torch.equal(target.get_data_page(page * PAGE), pool.get_data_page(source * PAGE))
    target.buffer[:, 30 * PAGE : 31 * PAGE] = 0
    target.buffer[:, 32 * PAGE : 33 * PAGE] = 0
    assert not target.buffer.any(), "nothing else was written"


def test_a_page_that_was_changed_on_disk_is_a_miss(make: Make, tmp_path: Path) -> None:
    """Found by its name, read, not verified: not in the pool, and not found again until it is stored anew."""
    pool = Pool()
    pool.fill()
    storage, keys = make(pool=pool), hashes(8)
    assert all(storage.batch_set_v1(keys, indices(8)))
    storage.close()
    marks = [pool.get_data_page(page * PAGE).view(torch.uint8).numpy().tobytes()[:64] for page in (2, 5)]
    for path in (tmp_path / "disk").rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            for mark in marks:
                at = data.find(mark)
                if at >= 0:
                    data = data[: at + 9] + bytes([data[at + 9] ^ 1]) + data[at + 10 :]
            path.write_bytes(data)
    target = Pool()
    storage = make(pool=target)
    expected = [page not in (2, 5) for page in range(8)]
    assert storage.batch_get_v1(keys, indices(8)) == expected
    for page in range(8):
        there = target.get_data_page(page * PAGE)
        assert torch.equal(there, pool.get_data_page(page * PAGE)) if expected[page] else not there.any()
    assert storage.batch_exists(keys) == 2
    assert storage.stats()["disk.corrupt"] >= 2
    storage.register_mem_pool_host(pool)
    assert all(storage.batch_set_v1(keys, indices(8)))
    assert storage.batch_exists(keys) == 8


def random_sets(storage: Any, kv: Pool, others: dict[str, Pool], seed: int) -> None:
    """The same pages of each pool for the same seed."""
    chance = random.Random(seed)
    keys = hashes(12)
    until = chance.randrange(13)
    storage.batch_set(keys[:until], [kv.get_data_page(at * PAGE) for at in range(until)])
    for name, pool in others.items():
        some = [at for at in range(12) if chance.random() < 0.7]
        first = [torch.arange(at * pool.page_size, (at + 1) * pool.page_size) for at in some]
        if some:
            storage.batch_set_v2([PoolTransfer(PoolName(name), torch.cat(first), keys=[keys[at] for at in some])])


def test_what_pools_can_go_on_from_is_what_the_file_backend_says(make: Make) -> None:
    """Attention, an indexer that needs every page, states and windows that need the last ones: any mixture of holes."""
    others = {"mamba": Pool(page=1), "swa": Pool(), "indexer": Pool(width=16)}
    kv = Pool()
    for pool in (kv, *others.values()):
        pool.fill()
    asked = [
        PoolTransfer(PoolName.INDEXER, hit_policy=PoolHitPolicy.ALL_PAGES),
        PoolTransfer(PoolName.MAMBA, hit_policy=PoolHitPolicy.TRAILING_PAGES, keys=["x"]),
        PoolTransfer(PoolName.SWA, hit_policy=PoolHitPolicy.TRAILING_PAGES, keys=["x", "x", "x"]),
    ]
    seen = set()
    for seed in range(12):
        models = {"model_name": f"m{seed}", "pool": kv, "pools": others}
        ours, theirs = make(**models), make("file", **models)
        for storage in (ours, theirs):
            random_sets(storage, kv, others, seed)
        some = random.Random(seed).sample(asked, seed % 4)
        mine, other = ours.batch_exists_v2(hashes(12), some), theirs.batch_exists_v2(hashes(12), some)
        assert (mine.kv_hit_pages, mine.restorable_prefix_pages) == (other.kv_hit_pages, other.restorable_prefix_pages)
        if other.kv_hit_pages:
            assert mine.extra_pool_hit_pages == other.extra_pool_hit_pages
        seen.add(other.kv_hit_pages)
        ours.close()
    assert len(seen) > 4, "many lengths"


def test_pools_of_a_hybrid_come_back(make: Make) -> None:
    """Pools whose pages have other lengths and tokens, each by the same hash; a pool that nobody registered is none."""
    kv, states = Pool(), Pool(page=1, width=512, dtype=torch.float32)
    kv.fill(1)
    states.fill(2)
    keys = hashes(6)
    storage = make(pool=kv, pools={"mamba": states})
    wanted = [
        PoolTransfer(PoolName.KV, indices(6), keys=keys),
        PoolTransfer(PoolName.MAMBA, torch.tensor([40]), keys=[keys[-1]]),
    ]
    assert storage.batch_set_v2(wanted) == {PoolName.KV: [True] * 6, PoolName.MAMBA: [True]}
    storage.close()
    kv_again, states_again = Pool(), Pool(page=1, width=512, dtype=torch.float32)
    storage = make(pool=kv_again, pools={"mamba": states_again})
    wanted[1].host_indices = torch.tensor([7])
    assert storage.batch_get_v2(wanted) == {PoolName.KV: [True] * 6, PoolName.MAMBA: [True]}
    assert torch.equal(kv_again.buffer[:, : 6 * PAGE], kv.buffer[:, : 6 * PAGE])
    assert torch.equal(states_again.get_data_page(7), states.get_data_page(40))
    strange = PoolTransfer(PoolName.SWA, indices(1), keys=keys[:1])
    late = PoolTransfer(PoolName.DRAFT, indices(1), keys=keys[:1])
    storage.register_mem_host_pool_v2(Pool(), PoolName.DRAFT)
    for move in (storage.batch_get_v2, storage.batch_set_v2):
        assert move([strange, late]) == {PoolName.SWA: [False], PoolName.DRAFT: [False]}
    short = PoolTransfer(PoolName.KV, indices(1)[:-1], keys=keys[:1])
    assert storage.batch_get_v2([short]) == {PoolName.KV: [False]}


def test_the_limit_holds(make: Make, tmp_path: Path) -> None:
    """Whatever is written; the newest is found."""
    pool = Pool(tokens=64, width=4096)
    pool.fill()
    storage = make(pool=pool, extra={"disk": f"{tmp_path / 'disk'}:8MiB"})
    for number in range(12):  # 16 pages of 96 KiB each time
        assert all(storage.batch_set_v1(hashes(16, seed=number), indices(16)))
        used = sum(path.stat().st_blocks * 512 for path in (tmp_path / "disk").rglob("*") if path.is_file())
        assert used <= 8 << 20
    assert storage.batch_exists(hashes(16, seed=11)) == 16
    assert storage.batch_exists(hashes(16, seed=0)) == 0


def test_several_threads(make: Make) -> None:
    """SGLang prefetches and writes from threads of its own."""
    pool = Pool(tokens=1024)
    pool.fill()
    storage, errors = make(pool=pool), []

    def work(seed: int) -> None:
        try:
            keys, at = hashes(16, seed), indices(16, first=seed * 16)
            assert all(storage.batch_set_v1(keys, at)) and storage.batch_exists(keys) == 16
            assert all(storage.batch_get_v1(keys, indices(16, first=128 + seed * 16)))
        except Exception as error:  # noqa: BLE001 whatever it is
            errors.append(error)

    together(partial(work, seed) for seed in range(8))
    assert not errors
    half = 128 * PAGE
    assert torch.equal(pool.buffer[:, :half], pool.buffer[:, half:])


def test_a_tier_that_hangs_is_given_up(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A late read reaches nobody: not the pool, and no later batch."""
    pool = Pool()
    pool.fill()
    storage, keys = make(pool=pool), hashes(4)
    assert all(storage.batch_set_v1(keys, indices(4)))
    tiers = storage._tiers
    tiers._timeout_s = 0.2
    guarded = tiers._guarded[0]
    real, held = guarded.begin, []
    monkeypatch.setattr(guarded, "begin", lambda transfer, load: held.append(transfer) or True)
    before = pool.buffer.clone()
    assert storage.batch_get_v1(keys, indices(4, first=10)) == [False] * 4
    assert torch.equal(pool.buffer, before) and tiers.counts["timeouts"] == 1
    monkeypatch.undo()
    real(held[0], load=True)
    assert storage.batch_get_v1(keys, indices(4, first=20)) == [True] * 4
    assert torch.equal(pool.buffer[:, : 20 * PAGE], before[:, : 20 * PAGE])


def test_settings_that_cannot_work(make: Make, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to store in"):
        make(extra={})
    with pytest.raises(ConfigError, match="Did you mean 'disk'"):
        make(extra={"disc": "/tmp/x:1GiB"})
    with pytest.raises(BudgetError, match="The least that works"):
        make(extra={"disk": f"{tmp_path / 'small'}:17KiB"})
    storage = StowageStorage(config({"disk": f"{tmp_path / 'disk'}:{LIMIT}"}))
    with pytest.raises(ConfigError, match="no host pool"):
        storage.on_host_pools_registered()


def test_a_bug_costs_hits_and_not_the_engine(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, keys = make(), hashes(2)
    assert all(storage.batch_set_v1(keys, indices(2)))

    def broken(*_: Any) -> None:
        raise ZeroDivisionError("a bug")

    with monkeypatch.context() as patched:
        patched.setattr(type(storage._tiers), "load", broken)
        patched.setattr(type(storage._tiers), "present", broken)
        assert storage.batch_get_v1(keys, indices(2)) == [False, False]
        assert storage.batch_exists(keys) == 0 and storage.get(keys[0]) is None
    assert storage.faults == 3
    storage.faults = 0
    assert storage.batch_exists(keys) == 2


WRITER = """
import json, sys
sys.path[:0] = json.loads(sys.argv[1])
from tests.sglang import conftest
from pathlib import Path
from tests.sglang.backends import StowageStorage, attach, config, hashes, indices
from tests.sglang.pools import Pool
pool = Pool(tokens=1024)
pool.fill()
storage = attach(StowageStorage(config({"disk": sys.argv[2]})), pool)
print("ready", flush=True)
for number in range(10_000):
    assert all(storage.batch_set_v1(hashes(16, number), indices(16)))
    print(number, flush=True)
"""


def test_what_was_written_before_a_kill_is_found(make: Make, tmp_path: Path) -> None:
    """Killed while it writes: every batch that it was told of is there, and right."""
    disk = f"{tmp_path / 'disk'}:{LIMIT}"
    paths = json.dumps([path for path in sys.path if path])
    command = [sys.executable, "-c", WRITER, paths, disk]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
        for _ in range(20):
            number = int(writer.stdout.readline())
        os.kill(writer.pid, signal.SIGKILL)
    pool, target = Pool(tokens=1024), Pool(tokens=1024)
    pool.fill()
    storage = make(pool=target)
    assert storage.batch_exists(hashes(16, number)) == 16
    assert all(storage.batch_get_v1(hashes(16, number), indices(16)))
    assert torch.equal(target.buffer[:, : 16 * PAGE], pool.buffer[:, : 16 * PAGE])
