"""OpenMP's threads: how long they wait, and whose they are. Each test has an interpreter of its own, in which torch has
two threads.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import stowage
from stowage.testing import tiny_models
from tests.depth import mostly_rare
from tests.nursery import QUICKLY

SOURCE = Path(stowage.__file__).parents[1]
VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
BEGIN = """
import ctypes, json, os, sys, time
from stowage import openmp
def compute():
    import torch
    torch.set_num_threads(2)
    numbers = torch.ones(1 << 20)
    return float(numbers.mul_(2).sum())
def threads():
    "How many there are, once none has come or gone for a while: who has joined one may still see it."
    found = []
    while len(found) < 10 or len(set(found[-10:])) > 1:
        found.append(len(os.listdir("/proc/self/task")))
        time.sleep(0.02)
    return found[-1]
def team():
    "Threads that end with the calling thread's team."
    before = threads()
    openmp.release_team()
    return before - threads()
"""

gnu = pytest.mark.skipif(sys.platform != "linux", reason="torch has GNU's runtime on Linux")


def said(program: str, **environment: str) -> Any:
    """The JSON that ``program`` prints at its end."""
    kept = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + program],
        env=kept | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "2"} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, ["1000", True]),
        ({"GOMP_SPINCOUNT": "7"}, ["7", True]),
        ({"GOMP_SPINCOUNT": "300000"}, ["300000", False]),
        ({"GOMP_SPINCOUNT": "infinite"}, ["infinite", False]),
        ({"OMP_WAIT_POLICY": "active"}, [None, False]),
    ],
)
def test_the_environment_has_the_last_word(environment, expected):
    program = "openmp.wait_briefly(); print(json.dumps([os.environ.get('GOMP_SPINCOUNT'), openmp.waits_briefly()]))"
    assert said(program, **environment) == expected


@pytest.mark.slow
def test_it_is_too_late_once_torch_is_loaded():
    assert said("import torch; openmp.wait_briefly(); print(json.dumps(openmp.waits_briefly()))") is False


def test_the_command_waits_briefly():
    program = """
from stowage.cli import main
sys.argv = ["stowage", "--version"]
try:
    main()
finally:
    print(json.dumps([openmp.waits_briefly(), "torch" in sys.modules]), flush=True)
    os._exit(0)
"""
    assert said(program) == [True, False]


@pytest.mark.rare
@gnu
def test_a_team_ends_and_another_is_made():
    program = "print(json.dumps([team(), compute(), team(), team(), compute(), team()]))"
    assert said(program) == [0, 2.0 * (1 << 20), 1, 0, 2.0 * (1 << 20), 1]


@pytest.mark.rare
@gnu
def test_another_runtime_is_left_alone():
    """LLVM's would end the teams of all threads."""
    program = """
compute()
openmp.ctypes.CDLL = lambda name: type("LLVM", (), {"__kmpc_fork_call": 1, "omp_pause_resource_all": None})
print(json.dumps(team()))
"""
    assert said(program) == 0


@pytest.mark.slow
@gnu
@pytest.mark.parametrize(("spins", "teams"), mostly_rare([("1000", [0, 0]), ("300000", [1, 1])], ["1000"]))
def test_only_the_engine_has_a_team(spins, teams, tmp_path):
    """After it was opened, and while it answers, whatever the asking thread has computed before. Where idle threads
    wait long, two teams are better than one that is always awake.
    """
    tiny_models.write("llama", tmp_path / "model")
    program = f"""
{QUICKLY}
from stowage import Engine, Memory, SamplingParams
compute()
engine = Engine({str(tmp_path / "model")!r}, Memory(kv_cache_memory="8MiB"))
found = [team()]
compute()
engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=2))
found.append(team())
engine.close()
print(json.dumps(found))
"""
    assert said(program, GOMP_SPINCOUNT=spins) == teams
