"""Helpers to compare runs with and without offloading: engines with selected tiers, and when two answers agree.

Owns the settings of a run without offloading, and the bounds within which two runs agree.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from stowage.config.memory import Memory, ram_total_bytes
from stowage.engine.engine import Engine
from stowage.engine.request import Completion
from stowage.errors import ConfigError
from stowage.weights.scratch_directory import scratch_directory

HOST_BYTES = 1 << 30
DISK_BYTES = 2 << 30
FLUSH_TIMEOUT_S = 120.0
_TOLERANCE = {"float32": 1e-3}
_TOLERANCE_HALF = 0.25  # in 16 bits a token's logits depend on how many tokens were computed together
_OFF: dict[str, dict[str, Any]] = {
    "disk": {"disk": ""},
    "valkey": {"valkey": "", "valkey_password_file": ""},
    "object": {"object": "", "object_limit": 0},
}


def tolerance(dtype: str, exact: bool) -> float:
    """By how much log-probabilities may differ between two runs in ``dtype``."""
    return 0.0 if exact else _TOLERANCE.get(dtype, _TOLERANCE_HALF)


def plain(memory: Memory) -> Memory:
    """``memory`` with nothing offloaded: no tier below the device, and all weights in memory."""
    off = {name: value for fields in _OFF.values() for name, value in fields.items()}
    return replace(memory, host_memory=0, device_memory=0, weights="auto", **off)


def with_tiers(memory: Memory, directory: Path) -> Memory:
    """``memory`` with a host arena and a disk: its own where it states them."""
    host = memory.host_memory if memory.host_memory_bytes else min(HOST_BYTES, ram_total_bytes() // 4)
    return replace(memory, host_memory=host, disk=memory.disk or f"{directory / 'disk'}:{DISK_BYTES}")


def lower_tiers(memory: Memory) -> list[str]:
    """Names of the tiers below the host, nearest first."""
    return [name for name in _OFF if getattr(memory, name)]


def with_only(memory: Memory, tier: str) -> Memory:
    """``memory`` with no tier below the host but this one."""
    off = {name: value for other, fields in _OFF.items() if other != tier for name, value in fields.items()}
    return replace(memory, **off)


def temporary_directory() -> AbstractContextManager[Path]:
    """A directory that is removed at the end, together with those that killed runs of this user left behind."""
    return scratch_directory(Path(tempfile.gettempdir()), "stowage-verify-*")


@contextmanager
def opened(model: str | Path, memory: Memory, computed: Mapping[str, Any]) -> Iterator[Engine]:
    """``computed``: how, as ``Engine`` takes it."""
    # without CUDA graphs: bits are compared, and which steps are replayed depends on what was asked before
    engine = Engine(model, memory, cuda_graphs=False, **computed)
    try:
        yield engine
    finally:
        engine.close()


def flush(engine: Engine) -> None:
    """Wait until the tiers have what was stored. Raises ConfigError for a disk that is too slow."""
    if not engine.flush(FLUSH_TIMEOUT_S):
        raise ConfigError(
            f"The disk did not take what was stored within {FLUSH_TIMEOUT_S:.0f} s, so it cannot be verified. "
            "Choose a faster or emptier directory with --disk."
        )


def leave_only(engine: Engine, tier: str) -> None:
    """Empty the tiers above ``tier``, so that cached chunks are in ``tier`` and below only."""
    if tier not in ("device", "host"):
        flush(engine)
        engine.drop_host()
    if tier != "device":
        engine.drop_device_cache()


def difference(expected: Completion, found: Completion) -> float:
    """Largest difference of log-probabilities that both report, up to and including the first token that differs."""
    worst = 0.0
    for a, b in zip(expected.logprobs or [], found.logprobs or [], strict=False):
        left, right = dict(a.top) | {a.token_id: a.logprob}, dict(b.top) | {b.token_id: b.logprob}
        differences = [abs(left[token] - right[token]) for token in left.keys() & right.keys()]
        worst = max([worst, *(math.inf if math.isnan(d) else d for d in differences)])
        if a.token_id != b.token_id:
            break
    return worst


def near_tie(expected: Completion, found: Completion, tolerance: float) -> bool:
    """Whether the first token that differs was, in the expected run, within ``tolerance`` of the chosen one."""
    for a, b in zip(expected.logprobs or [], found.logprobs or [], strict=False):
        if a.token_id != b.token_id:
            return a.logprob - dict(a.top).get(b.token_id, -math.inf) <= tolerance
    return True
