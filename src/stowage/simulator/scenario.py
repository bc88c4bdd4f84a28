"""The simulated cluster: nodes with their memory, disks and links, and how prompts are routed to them.

Owns the numbers and their checks: every `Scenario` can be simulated. Rates are bytes or tokens per second.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from stowage.cache.policy import POLICIES, POLICY_DEFAULT
from stowage.config.wording import shown_value
from stowage.core.geometry import Geometry, Group, Kind, SlabClass, round_up, split_arena
from stowage.errors import BudgetError, ConfigError
from stowage.storage.disk.tier import least_limit_bytes

NODES_MAX: Final = 4096
"""Each takes about a megabyte of the machine that simulates it."""
_COUNT_MAX: Final = 1 << 31
_SECONDS_MAX: Final = 86_400.0
_RATE_LEAST: Final = 1e-3
_RATE_MAX: Final = 1e15
_LIMITS: Final = (
    *((name, 1, _COUNT_MAX) for name in ("kv_bytes_per_token", "block_tokens", "sticky_blocks", "max_num_seqs")),
    ("nodes", 1, NODES_MAX),
    ("step_tokens", 0, _COUNT_MAX),
    ("disk_bytes", 0, math.inf),
    ("seed", 0, math.inf),
    ("prefill_s_fixed", 0, _SECONDS_MAX),
    ("load_s_fixed", 0, _SECONDS_MAX),
    ("load_timeout_s", _RATE_LEAST, _SECONDS_MAX),
    ("prefill_tokens_per_s", _RATE_LEAST, _RATE_MAX),
    ("copy_bytes_per_s", _RATE_LEAST, _RATE_MAX),
)
"""Of every number, the least and the most: what is beyond is a mistake, and would overflow."""
ROUTINGS: Final = ("round-robin", "sticky", "random")


@dataclass(frozen=True, slots=True)
class Link:
    """The link to a tier. Up to `parallel` transfers share its rates; each also waits `latency_s`."""

    read_bytes_per_s: float
    write_bytes_per_s: float
    latency_s: float
    parallel: int = 8

    def __post_init__(self) -> None:
        for rate in (self.read_bytes_per_s, self.write_bytes_per_s):
            if not _RATE_LEAST <= rate <= _RATE_MAX:
                raise ConfigError(f"A tier that moves {rate:g} bytes per second is none: give rates above 0.")
        if not 0 <= self.latency_s <= _SECONDS_MAX:
            raise ConfigError(f"A latency of {self.latency_s:g} s cannot be: give 0 to {_SECONDS_MAX:.0f}.")


@dataclass(frozen=True, slots=True)
class Scenario:
    """One cluster of equal nodes. Sizes are per node; a size of 0 switches a tier off, but for `objects`.

    `prefill_s_fixed`: the fixed time of a forward; `load_s_fixed`: the fixed time of a hit (look-up, plan, copy calls).
    `step_tokens`: the longest forward, after each of which the engine stores complete chunks; 0: a prompt is computed
    and stored at once. `lookup_timeout_s`: the longest wait for an object store's look-up. `packed_share`: bytes of a
    chunk below host memory over its raw bytes, after lossless compression (0.69 for bfloat16 caches of a real model:
    docs/benchmarks.md). `shared_objects`: all nodes have one object store; otherwise each has its own.
    `sticky_blocks`: with the routing `sticky`, prompts with the same first blocks, this many, go to the same node.
    """

    host_bytes: int
    kv_bytes_per_token: int = 131_072
    block_tokens: int = 512
    disk_bytes: int = 0
    objects: bool = False
    shared_objects: bool = True
    nodes: int = 1
    routing: str = "sticky"
    sticky_blocks: int = 2
    seed: int = 0
    policy: str = POLICY_DEFAULT
    prefill_tokens_per_s: float = 20_000.0
    prefill_s_fixed: float = 0.0
    load_s_fixed: float = 0.0
    step_tokens: int = 0
    max_num_seqs: int = 16
    load_timeout_s: float = 30.0
    lookup_timeout_s: float = 0.5
    copy_bytes_per_s: float = 20e9
    packed_share: float = 1.0
    disk: Link = field(default=Link(6e9, 4e9, 100e-6))
    object: Link = field(default=Link(2e9, 2e9, 20e-3, 16))

    def __post_init__(self) -> None:
        for name, least, most in _LIMITS:
            if not least <= (value := getattr(self, name)) <= most:
                raise ConfigError(f"{name} is {shown_value(value)}; it must be from {_shown(least)} to {_shown(most)}.")
        if not 0 < self.packed_share <= 1:
            raise ConfigError(
                f"packed_share is {self.packed_share:g}; it must be above 0 and at most 1, which is raw bytes."
            )
        if self.step_tokens % self.block_tokens:
            raise ConfigError(
                f"step_tokens is {self.step_tokens}: the simulation stores whole blocks of {self.block_tokens} tokens, "
                "so a step must be a multiple of that, or 0 for whole prompts."
            )
        if self.routing not in ROUTINGS:
            raise ConfigError(f"The routing {self.routing!r} is unknown; choose one of {', '.join(ROUTINGS)}.")
        if self.policy not in POLICIES:
            raise ConfigError(f"The policy {self.policy!r} is unknown; choose one of {', '.join(POLICIES)}.")
        if self.host_bytes < self.slot_bytes:
            raise BudgetError(
                f"Host memory of {self.host_bytes} bytes holds not one block of {self.block_tokens} tokens with "
                f"{self.kv_bytes_per_token} bytes each, and every tier works through it. The least that works is "
                f"{self.slot_bytes} bytes."
            )
        if self.disk_bytes and self.disk_bytes < least_limit_bytes(self.chunk_bytes):
            raise BudgetError(
                f"A disk of {self.disk_bytes} bytes holds not one block of {self.chunk_bytes} bytes. The least that "
                f"works is {least_limit_bytes(self.chunk_bytes)} bytes; 0 is no disk."
            )

    @property
    def chunk_bytes(self) -> int:
        """Bytes of the keys and values of one block."""
        return self.kv_bytes_per_token * self.block_tokens

    @property
    def stored_bytes(self) -> int:
        """Bytes of one block in a tier below host memory: whole pages where it is packed."""
        packed = round_up(math.ceil(self.chunk_bytes * self.packed_share))
        return min(self.chunk_bytes, packed)

    @property
    def slot_bytes(self) -> int:
        """Host memory that one block takes."""
        return round_up(self.chunk_bytes)

    @property
    def slabs(self) -> tuple[SlabClass, ...]:
        """Host memory as the engine divides it."""
        return split_arena(self.geometry(self.kv_bytes_per_token), self.host_bytes)

    @property
    def tier_names(self) -> list[str]:
        """Fastest first; the host is number 0."""
        return ["host", *(["disk"] if self.disk_bytes else []), *(["object"] if self.objects else [])]

    @property
    def are_nodes_apart(self) -> bool:
        """Whether nodes share nothing, so that they can be simulated separately."""
        return self.nodes == 1 or not (self.objects and self.shared_objects)

    def geometry(self, bytes_per_token: int) -> Geometry:
        """One group of full attention, a block to a chunk."""
        return Geometry((Group(0, Kind.FULL, self.block_tokens, 1, bytes_per_token * self.block_tokens),))

    def forward_s(self, tokens: int) -> float:
        """Seconds to compute ``tokens`` tokens of a prompt."""
        forwards = -(-tokens // self.step_tokens) if self.step_tokens else 1
        return forwards * self.prefill_s_fixed + tokens / self.prefill_tokens_per_s


def _shown(limit: float) -> str:
    return f"{limit:,}" if isinstance(limit, int) else f"{limit:g}"
