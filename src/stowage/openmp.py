"""Settings of torch's OpenMP threads: how long idle ones spin, and that only one thread of the process has a team of
them.

Torch computes with a team of threads that belongs to whichever thread calls it. GNU's runtime lets idle ones wait awake
for some milliseconds, which is fatal to whoever needs their cores, and for next to no time as soon as all teams
together are more than the cores (``gomp_spin_count_var`` and ``gomp_throttled_spin_count_var`` in its ``env.c``): then
every operation waits until they are woken. Opening an engine in one thread and computing in another made prompts take 5
to 20 % longer. Ten microseconds are right for both (numbers: ``docs/benchmarks.md``), but only the environment can
say so, before torch is loaded.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from functools import cache

_SPINS, _POLICY = "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"
_BRIEF, _BRIEF_MOST = 1000, 5000
"""Turns of a loop: some ten, and some fifty microseconds."""
_SOFT = 1
"""``omp_pause_soft`` of OpenMP 5.0: what the runtime was told stays."""


def wait_briefly() -> None:
    """Let idle threads wait awake for a moment only, unless the environment says how long. For programs of our own, at
    their beginning: nothing happens once torch is loaded.
    """
    if "torch" not in sys.modules and _POLICY not in os.environ:
        os.environ.setdefault(_SPINS, str(_BRIEF))


def waits_briefly() -> bool:
    """Whether idle threads do."""
    spins = os.environ.get(_SPINS, "")
    return spins.isdecimal() and int(spins) <= _BRIEF_MOST


def release_team() -> None:
    """End the calling thread's team, if it has one; its next operation makes another. For a thread that computes
    rarely, while another does all the time. Nothing happens where the runtime is not GNU's.
    """
    if "torch" in sys.modules and (pause := _pause()) is not None:
        pause(_SOFT)


@cache
def _pause() -> Callable[[int], int] | None:
    loaded = ctypes.CDLL(None)
    if hasattr(loaded, "__kmpc_fork_call"):  # LLVM's or Intel's: it would end the teams of all threads
        return None
    return getattr(loaded, "omp_pause_resource_all", None)
