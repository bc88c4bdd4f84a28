"""Settings in ``kv_connector_extra_config``: how they are parsed and checked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from stowage.config.memory import Memory, format_size, parse_size, ram_total_bytes
from stowage.config.wording import unknown_name
from stowage.core.geometry import Group, Kind, round_up
from stowage.core.groups import GroupStrategy
from stowage.core.resume_points import Points
from stowage.core.retention import Learner, Retention
from stowage.errors import BudgetError, ConfigError
from stowage.plugins.vllm.adapter import GroupShape
from stowage.storage.lease import Lease, budget_directory

_NOT_OURS = frozenset(
    {"device_memory", "weights", "kv_cache_memory", "block_size", "group_block_size", "chunk_blocks", "max_num_seqs"}
    | {"max_model_len"}
)
"""Of ``Memory``: what vLLM decides."""
_CHUNK_TOKENS = 128
"""A chunk holds at least so many tokens: short enough to share most prefixes, long enough to be read at speed."""
CHUNK_BLOCKS_MAX = 64
_SPACING_MAX = 2048
"""Of recurrent states, where nobody says how far apart they will be: prompts are often no longer."""
_SWITCHES = ("deduplicate_ranks", "any_parallel_size")
_POINTS = ("auto", "growing", "all", "ends")
_POINT_SHARE = 2
"""Points that grow apart are no further apart than this part of the way from the prompt's start."""


@dataclass(frozen=True)
class Options:
    """The settings that are no memory budgets. ``chunk_blocks``: blocks per chunk, 0: as many as ``_CHUNK_TOKENS``
    take. ``close_timeout_s``: how long an end waits for what is still to be written. ``spacing_given``: whether the
    user said how far apart states are. ``points``: one of ``_POINTS``, or a distance in tokens. ``node_bytes``: what
    the host memory of all engines on this machine may sum to, 0: each has its own. ``deduplicate_ranks``: what several
    ranks hold alike is stored once. ``any_parallel_size``: chunks are named by heads and layers, and serve engines of
    another number of ranks.
    """

    memory: Memory
    chunk_blocks: int = 0
    close_timeout_s: float = 10.0
    spacing_given: bool = False
    points: str | int = "auto"
    node_bytes: int = 0
    deduplicate_ranks: bool = True
    any_parallel_size: bool = False

    def lease(self) -> Lease | None:
        """This engine's part of the node's budget. Raises ``BudgetError`` when so much is not left, or not there."""
        asked_bytes, total_bytes = self.memory.host_memory_bytes, ram_total_bytes()
        if asked_bytes > total_bytes:
            raise BudgetError(
                f"host_memory is {format_size(asked_bytes)}, and this machine or container has "
                f"{format_size(total_bytes)} of memory: the engine would be killed when it has filled that. Set "
                "host_memory to less."
            )
        if not self.node_bytes:
            return None
        return Lease(budget_directory("vllm"), asked_bytes, self.node_bytes)

    def group(self, index: int, shape: GroupShape, nbytes: int) -> Group:
        """A cache group whose blocks have so many bytes on all ranks together."""
        blocks = 1 if shape.kind is Kind.RECURRENT else self.blocks_per_chunk(shape.block_tokens)
        inside = (shape.resume_tokens, shape.spared_tokens)
        return Group(index, shape.kind, shape.block_tokens, blocks, nbytes, shape.window, (), *inside)

    def blocks_per_chunk(self, block_tokens: int) -> int:
        """Of a paged group with blocks of so many tokens."""
        return self.chunk_blocks or min(CHUNK_BLOCKS_MAX, max(1, _CHUNK_TOKENS // block_tokens))


def read(extra: Mapping[str, Any]) -> Options:
    """Raises ``ConfigError`` for a name that is unknown or a value that cannot be used."""
    memory_names = [field.name for field in fields(Memory) if field.name not in _NOT_OURS]
    own_names = ["chunk_blocks", "close_timeout_s", "node_host_memory", "resume_points", *_SWITCHES]
    for name in extra:
        if name not in memory_names + own_names:
            raise ConfigError(unknown_name(f"The setting {name!r} of StowageConnector", name, memory_names + own_names))
    memory = Memory(**{name: extra[name] for name in memory_names if name in extra})
    if not memory.host_memory_bytes:
        raise ConfigError(
            "StowageConnector needs host memory, because every chunk passes through it. Give it a size, such as "
            '"kv_connector_extra_config": {"host_memory": "8GiB"}.'
        )
    blocks, timeout_s = extra.get("chunk_blocks", 0), extra.get("close_timeout_s", 10.0)
    if isinstance(blocks, bool) or not isinstance(blocks, int) or not 0 <= blocks <= CHUNK_BLOCKS_MAX:
        raise ConfigError(f"chunk_blocks is {blocks!r}: it must be a whole number from 1 to {CHUNK_BLOCKS_MAX}, or 0.")
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 <= timeout_s < float("inf"):
        raise ConfigError(f"close_timeout_s is {timeout_s!r}: it must be a number of seconds, 0 or more.")
    try:
        node_bytes = parse_size(extra.get("node_host_memory", 0), ram_total_bytes())
    except ConfigError as error:
        raise ConfigError(f"node_host_memory cannot be used. {error}") from error
    points = _points(extra.get("resume_points", "auto"))
    switches = {name: extra[name] for name in _SWITCHES if name in extra}
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise ConfigError(f"{name} is {value!r}: it must be true or false.")
    options = Options(memory, blocks, float(timeout_s), "snapshot_tokens" in extra, points, node_bytes, **switches)
    if options.any_parallel_size and not options.deduplicate_ranks:
        raise ConfigError(
            "any_parallel_size names chunks by heads and not by ranks, and deduplicate_ranks=false by ranks. Leave one."
        )
    return options


def _points(given: Any) -> str | int:
    if isinstance(given, str) and given in _POINTS:
        return given
    if isinstance(given, int) and not isinstance(given, bool) and given > 0:
        return given
    raise ConfigError(f"resume_points is {given!r}: it must be {', '.join(_POINTS)}, or a distance in tokens.")


def resume_points(options: Options, groups: Sequence[Group]) -> Points:
    """Where prompts that part from a stored one can resume; with ``auto``, at the most. Everywhere with full attention
    alone, which needs none, and without it, since only windows see how far prompts are alike; and with both windows and
    states, since these are not kept at the same positions.
    """
    kinds = {group.kind for group in groups}
    mixed = Kind.RECURRENT in kinds and not kinds <= {Kind.FULL, Kind.RECURRENT}
    if options.points == "all" or kinds == {Kind.FULL} or Kind.FULL not in kinds or mixed:
        return Points(1)
    if options.points == "ends":
        return Points(0)
    unit = math.lcm(*(group.chunk_tokens for group in groups))
    if isinstance(options.points, int):
        return Points(round_up(options.points, unit))
    return Points(unit, _POINT_SHARE)


def retention(options: Options, strategies: Sequence[GroupStrategy], step_tokens: int) -> Retention | Learner:
    """What is kept of windows and states of every prompt, or who learns it. ``step_tokens``: see ``Learner``."""
    points = resume_points(options, [strategy.group for strategy in strategies])
    learns = options.points == "auto" and not points.everywhere
    return Learner(points, strategies, step_tokens) if learns else Retention(points)


def state_spacing(options: Options, step_tokens: int) -> int:
    """Tokens of prompts for each recurrent state, by which the host arena is divided. vLLM shows a state where a step
    ends, so there is no more than one in ``step_tokens`` of a long prompt; short ones have one each.
    """
    given = options.memory.snapshot_tokens
    return given if options.spacing_given else max(given, min(step_tokens, _SPACING_MAX))
