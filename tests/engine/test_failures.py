"""What goes wrong below the engine costs time, never an answer: failed copies, bad disks, hung reads, full disks,
killed processes.
"""

from __future__ import annotations

import errno
import functools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from stowage.cache import opening
from stowage.core.geometry import Kind
from stowage.errors import StowageError, TransferError
from stowage.storage.disk import DiskTier
from stowage.storage.disk.files import RealFileSystem
from stowage.storage.disk.system import System
from stowage.testing.faults import FaultyFileSystem
from tests.engine.conftest import assert_same, greedy, leave_only_disk, random_prompt
from tests.forked import exit_code_of_a_child
from tests.nursery import QUICKLY

PROMPT = random_prompt(500)
FAMILIES = ("llama", "gemma3", "nemotron_h")


class FailingTransfer:
    """Passes copies of ``engine`` on until told to fail."""

    def __init__(self, engine, *failing):
        self.real, self.failing = engine._kv_manager.transfer, set(failing)
        engine._kv_manager.transfer = self

    def store(self, plan, storage):
        if "store" in self.failing:
            raise TransferError("injected")
        self.real.store(plan, storage)

    def load(self, plan, storage):
        if "load" in self.failing:
            storage[plan.blocks] = 255  # half-done copies leave anything behind
            raise TransferError("injected")
        self.real.load(plan, storage)

    def close(self):
        self.real.close()


@pytest.fixture
def disk_faults(monkeypatch):
    faults = FaultyFileSystem()
    monkeypatch.setattr(opening, "DiskTier", functools.partial(DiskTier, system=System(files=faults)))
    yield faults
    faults.heal()


def with_disk(engines, family, tmp_path, **memory):
    limits = {"host_memory": "32MiB", "disk": f"{tmp_path / 'cache'}:64MiB", "snapshot_tokens": 128}
    return engines(family, **(limits | memory))


def ask(engine, references, family, prompt=PROMPT):
    (completion,) = engine.generate([prompt], greedy(8))
    assert_same(completion, references(family).answer(prompt, 8))
    return completion.reused_tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_failed_copy_to_host(family, engines, references):
    """F2: nothing was stored, nothing is found, and later stores work."""
    engine = engines(family, host_memory="32MiB", snapshot_tokens=128)
    transfer = FailingTransfer(engine, "store")
    ask(engine, references, family)
    assert engine.stats()["engine"]["copies_failed"] > 0
    transfer.failing = set()
    engine.drop_device_cache()
    assert sum(ask(engine, references, family).values()) == 0
    engine.drop_device_cache()
    assert ask(engine, references, family)["host"] > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_failed_copy_to_device(family, engines, references):
    """F2: a recompute, and the blocks of the failed copy are not found by anybody."""
    engine = engines(family, host_memory="32MiB", snapshot_tokens=128)
    transfer = FailingTransfer(engine)
    ask(engine, references, family)
    engine.drop_device_cache()
    transfer.failing = {"load"}
    assert sum(ask(engine, references, family).values()) == 0
    transfer.failing = set()
    assert ask(engine, references, family)["device"] > 0
    engine.check()


@pytest.mark.parametrize("family", FAMILIES)
def test_flipped_bits_on_disk(family, engines, references, tmp_path):
    """F1: corrupt chunks are misses, counted, and repaired by the next store."""
    engine = with_disk(engines, family, tmp_path)
    ask(engine, references, family)
    leave_only_disk(engine)
    for path in (tmp_path / "cache").rglob("*"):
        if path.is_file() and path.stat().st_size > 8192:
            data = bytearray(path.read_bytes())
            for place in range(9000, len(data), 4096):
                data[place] ^= 0x10
            path.write_bytes(data)
    assert ask(engine, references, family)["disk"] == 0
    assert engine.stats()["store"]["disk.corrupt"] > 0
    leave_only_disk(engine)
    assert ask(engine, references, family)["disk"] > 0


def test_loaded_prefix_is_kept(engines, references, tmp_path, monkeypatch):
    """F2: when one chunk in the middle fails, what lies before it is used and only the rest is computed."""
    engine = with_disk(engines, "llama", tmp_path)
    ask(engine, references, "llama")
    leave_only_disk(engine)
    tier = engine.store.tiers[0]
    real_load = tier.load

    def load_all_but_the_fifth(transfer):
        bad = transfer.keys[4]
        real_load(transfer)
        real_poll = tier.poll

        def poll():
            outcomes = real_poll()
            for outcome in outcomes:
                if outcome.id == transfer.id:
                    outcome.ok[transfer.keys.index(bad)] = False
            return outcomes

        monkeypatch.setattr(tier, "poll", poll)

    monkeypatch.setattr(tier, "load", load_all_but_the_fifth)
    reused = ask(engine, references, "llama")
    assert reused["disk"] + reused["host"] == 4 * 64


@pytest.mark.parametrize("operation", ["preadv", "open"])
def test_unreadable_disk(operation, engines, references, tmp_path, disk_faults):
    engine = with_disk(engines, "llama", tmp_path)
    ask(engine, references, "llama")
    leave_only_disk(engine)
    disk_faults.fail(operation, errno.EIO)
    ask(engine, references, "llama")
    disk_faults.heal()
    ask(engine, references, "llama")
    engine.check()


def test_full_disk_costs_hits_not_requests(engines, references, tmp_path, disk_faults):
    """F4."""
    disk_faults.fail("pwritev", errno.ENOSPC)
    disk_faults.fail("allocate", errno.ENOSPC)
    engine = with_disk(engines, "gemma3", tmp_path)
    for seed in range(4):
        ask(engine, references, "gemma3", random_prompt(300, seed=seed))
    engine.flush(5)
    engine.drop_device_cache()
    engine.drop_host()
    assert ask(engine, references, "gemma3", random_prompt(300, seed=0))["disk"] == 0


def test_tier_that_takes_no_loads(engines, references, tmp_path, monkeypatch):
    """A tier may know chunks and refuse to load them (its queue is full): they are computed, and asked for no more."""
    engine = with_disk(engines, "llama", tmp_path)
    ask(engine, references, "llama")
    leave_only_disk(engine)
    tier = engine.store.tiers[0]
    asked = []
    monkeypatch.setattr(tier._loader, "submit", lambda transfer: asked.append(transfer))
    request = engine.submit(PROMPT, greedy(8))
    assert request.wait(60), "it was asked again and again"
    assert_same(request.result(), references("llama").answer(PROMPT, 8))
    assert sum(request.result().reused_tokens.values()) == 0
    assert len(asked) == 1
    monkeypatch.undo()
    engine.drop_device_cache()
    engine.drop_host()
    assert ask(engine, references, "llama")["disk"] > 0, "a refusal says nothing about the chunks"


def test_hung_read_costs_its_deadline(engines, references, tmp_path, disk_faults):
    """F6: the request gives up on the read and computes; the engine goes on, also while the read still hangs."""
    engine = with_disk(engines, "llama", tmp_path, load_timeout_s=0.5)
    ask(engine, references, "llama")
    leave_only_disk(engine)
    engine.forget_costs()  # the time-out alone decides
    hang = disk_faults.hang("preadv", times=1000)
    references("llama").answer(PROMPT, 8)
    began_s = time.monotonic()
    reused = ask(engine, references, "llama")
    elapsed_s = time.monotonic() - began_s
    assert hang.reached.is_set()
    assert sum(reused.values()) == 0
    assert 0.4 < elapsed_s < 20
    ask(engine, references, "llama", random_prompt(200, seed=4))
    hang.release()
    engine.check()


class SnapshotsHang(RealFileSystem):
    """Reads into a buffer of one of these sizes do not come back before they are released."""

    def __init__(self):
        self.sizes, self.reads, self.released = set(), 0, threading.Event()

    def preadv(self, fd, buffers, offset):
        if any(buffer.nbytes in self.sizes for buffer in buffers):
            self.reads += 1
            self.released.wait(60)
        return super().preadv(fd, buffers, offset)


def test_a_request_waits_for_one_deadline_only(engines, references, tmp_path, monkeypatch):
    """F6: the snapshot of its longest prefix does not come, and there are shorter ones: it does not wait for each."""
    files = SnapshotsHang()
    monkeypatch.setattr(opening, "DiskTier", functools.partial(DiskTier, system=System(files=files)))
    engine = with_disk(engines, "nemotron_h", tmp_path, load_timeout_s=0.3, max_num_batched_tokens=128)
    ask(engine, references, "nemotron_h")
    leave_only_disk(engine)
    engine.forget_costs()  # the time-out alone decides
    (group,) = [group for group in engine.parts.layout.groups if group.kind is Kind.RECURRENT]
    files.sizes = {group.bytes_per_chunk, -(-group.bytes_per_chunk // 4096) * 4096}
    assert sum(ask(engine, references, "nemotron_h").values()) == 0
    assert files.reads == 1 and engine.stats()["store"]["fetch_timeouts"] == 1
    files.released.set()


def test_a_prefix_that_arrives_when_the_room_is_gone(engines, references, tmp_path, disk_faults):
    """Others began while it was loading, and left too little: it used to leave the device and come back for ever."""
    memory = {"kv_cache_memory": "512KiB", "block_size": 8, "chunk_blocks": 2}
    engine = with_disk(engines, "llama", tmp_path, **memory)
    prompt, others = PROMPT[:200], [random_prompt(170, seed=seed) for seed in (1, 2)]
    ask(engine, references, "llama", prompt[:70])
    leave_only_disk(engine)
    engine.forget_costs()  # it waits for the disk as long as the test wants it to
    hang = disk_faults.hang("preadv")
    late = engine.submit(prompt, greedy(8))
    assert hang.reached.wait(10)
    begun = [threading.Event() for _ in others]
    early = [engine.submit(o, greedy(50), lambda _, e=event: e.set()) for o, event in zip(others, begun, strict=True)]
    assert all(event.wait(60) for event in begun)
    hang.release()
    assert late.wait(60), "the engine goes round in circles"
    assert_same(late.result(), references("llama").answer(prompt, 8))
    assert late.result().reused_tokens["disk"] == 64
    for other, request in zip(others, early, strict=True):
        assert request.wait(60)
        assert_same(request.result(), references("llama").answer(other, 50))


def test_one_flight_per_chunk(engines, references, tmp_path, disk_faults):
    """F7: four requests for the same prefix on disk read it once."""
    engine = with_disk(engines, "llama", tmp_path)
    ask(engine, references, "llama")
    leave_only_disk(engine)
    before = engine.stats()["store"]["disk.read_bytes"]
    prompts = [PROMPT[:450] + random_prompt(20, seed=i) for i in range(4)]
    for prompt, completion in zip(prompts, engine.generate(prompts, greedy(4)), strict=True):
        assert_same(completion, references("llama").answer(prompt, 4))
        assert sum(completion.reused_tokens.values()) >= 384
    group = engine.parts.layout.groups[0]
    read = engine.stats()["store"]["disk.read_bytes"] - before
    assert read <= 7 * (group.bytes_per_chunk + 4096) * 1.5


_VICTIM = """
import sys
from stowage.config.memory import Memory
from stowage.engine.engine import Engine
from tests.engine.conftest import greedy, random_prompt
engine = Engine(sys.argv[1], Memory(kv_cache_memory="8MiB", host_memory="32MiB", disk=sys.argv[2] + ":64MiB"))
engine.generate([random_prompt(500)], greedy(2))
engine.flush()
print("stored", flush=True)
while True:
    engine.generate([random_prompt(300, seed=i) for i in range(4)], greedy(20))
"""


@pytest.mark.slow
def test_killed_process_leaves_nothing_but_its_store(engines, references, checkpoints, tmp_path):
    """F5: after ``kill -9`` a restart finds what was stored, and there is nothing in shared memory."""
    before = set(Path("/dev/shm").iterdir()) if Path("/dev/shm").is_dir() else set()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(["src", "."])}
    command = [sys.executable, "-c", QUICKLY + _VICTIM, str(checkpoints("llama")), str(tmp_path / "cache")]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as victim:
        assert victim.stdout is not None and victim.stdout.readline().strip() == "stored"
        time.sleep(0.3)
        victim.send_signal(signal.SIGKILL)
    engine = with_disk(engines, "llama", tmp_path)
    assert ask(engine, references, "llama")["disk"] >= 384
    after = set(Path("/dev/shm").iterdir()) if Path("/dev/shm").is_dir() else set()
    assert after <= before


def test_two_engines_share_one_directory(engines, references, tmp_path):
    first = with_disk(engines, "gemma3", tmp_path)
    second = with_disk(engines, "gemma3", tmp_path)
    ask(first, references, "gemma3")
    assert first.flush()
    deadline_s = time.monotonic() + 20
    while second.store.sources([]) is not None and time.monotonic() < deadline_s:
        second.drop_device_cache()
        second.drop_host()
        if ask(second, references, "gemma3")["disk"] > 0:
            break
        time.sleep(0.3)
    else:
        pytest.fail("the second engine never found what the first one stored")
    other = random_prompt(400, seed=77)
    ask(second, references, "gemma3", other)
    ask(first, references, "gemma3", other)


def test_an_idle_engine_finds_what_is_broken_in_it(engines, monkeypatch):
    """A lost block would one day be somebody else's answer: the engine stops instead."""
    from stowage.engine import loop as module
    from stowage.errors import StowageError

    monkeypatch.setattr(module, "CHECK_EVERY_S", 0.0)
    engine = engines("llama")
    engine.generate([random_prompt(20)], greedy(2))
    assert engine._loop.thread.is_alive()
    engine.parts.pools[0]._free.pop()
    with pytest.raises(StowageError, match="stopped"):
        for _ in range(3):
            engine.generate([random_prompt(20)], greedy(2))
            engine._loop.thread.join(0.2)
    engine._loop.closing = True


def test_a_forked_child_is_told_to_open_its_own(engines):
    """It has no thread that would ever answer."""
    engine = engines("llama")

    def told() -> bool:
        with pytest.raises(StowageError, match="open an Engine in this process"):
            engine.generate([PROMPT], greedy(4))
        engine.close()
        return True

    assert exit_code_of_a_child(told) == 0
    assert len(engine.generate([PROMPT], greedy(4))[0].token_ids) == 4, "the parent goes on"
