"""A process that is killed while it stores: what others find afterwards is exact or absent, and nothing is stuck."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stowage.storage.remote.tier import RemoteTier
from tests.tiers.client import Client
from tests.tiers.servers import RedisServer

ROOT = Path(__file__).parents[2]
LENGTH = 300_000
PROGRAM = f"""
import sys
from stowage.storage.objects import ObjectTier
from stowage.storage.valkey import ValkeyTier
from tests.tiers.client import Client
url, first = sys.argv[1], int(sys.argv[2])
client = Client((ValkeyTier if url.startswith("redis") else ObjectTier)(url, bytes(range(32))))
client.store([first], length={LENGTH})
print("begun", flush=True)
for number in range(first + 1, first + 100000, 4):
    client.store(range(number, number + 4), length={LENGTH})
"""
ENVIRONMENT = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}


def ends_well(program: str, *arguments: str) -> None:
    command = [sys.executable, "-c", program, *arguments]
    ended = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.slow
def test_a_process_dies_in_the_middle_of_a_store(url: str, tiers: Callable[..., RemoteTier]) -> None:
    for turn in range(4):
        first = 1_000_000 * turn
        command = [sys.executable, "-c", PROGRAM, url, str(first)]
        writer = subprocess.Popen(command, stdout=subprocess.PIPE, env=ENVIRONMENT, text=True)
        assert writer.stdout is not None and writer.stdout.readline() == "begun\n"
        time.sleep(0.05 * turn)
        writer.kill()
        writer.wait()
        writer.stdout.close()
        client = Client(tiers(url))
        numbers = range(first, first + 60)
        found = client.probe(numbers)
        outcome = client.load(numbers, length=LENGTH)
        assert outcome.ok[0] and found[0] and client.count("corrupt") == 0
        assert client.store(numbers, length=LENGTH).ok.all() and client.load(numbers, length=LENGTH).ok.all()


def test_a_process_that_never_closes_its_tier_ends(url: str) -> None:
    program = PROGRAM.replace("100000", "5") + 'client.start("load", [1], 300_000, 0, 1e18)\n'
    ends_well(program, url, "0")


def test_a_child_process_that_throws_its_copy_away_disturbs_nothing(redis: RedisServer) -> None:
    """Engines are not for use across a fork; but a library that forks, and ends well, must not make ours deaf."""
    program = """
import gc, os, sys
from stowage.storage.valkey import ValkeyTier
from tests.tiers.client import Client
tier = ValkeyTier(sys.argv[1], bytes(range(32)))
client = Client(tier)
assert client.store(range(8)).ok.all() and client.load(range(8)).ok.all()
for how in ("exit", "close", "forget"):
    child = os.fork()
    if child == 0:
        if how == "close":
            tier.close(0.0)
        if how == "forget":
            del tier, client
            gc.collect()
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert client.load(range(8)).ok.all()
assert client.count("retries") == client.count("read_errors") == 0, "a connection was deaf"
"""
    ends_well(program, f"{redis.url}?prefix=fork-{time.monotonic_ns()}")
