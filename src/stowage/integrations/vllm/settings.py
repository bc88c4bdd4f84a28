"""What users write into ``kv_connector_extra_config``, and what it comes to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from stowage.config import Memory, unknown_name
from stowage.errors import ConfigError

__all__ = ["Options", "read", "state_spacing"]

_NOT_OURS = frozenset(
    {"device_memory", "weights", "device_kv", "block_tokens", "group_block_tokens", "chunk_blocks", "sequences_max"}
)
"""Of ``Memory``: what vLLM decides."""
_CHUNK_TOKENS = 128
"""A chunk holds at least so many tokens: short enough to share most prefixes, long enough to be read at speed."""
CHUNK_BLOCKS_MAX = 64
_SPACING_MAX = 2048
"""Of recurrent states, where nobody says how far apart they will be: prompts are often no longer."""


@dataclass(frozen=True)
class Options:
    """``chunk_blocks``: blocks per chunk, 0: as many as ``_CHUNK_TOKENS`` take. ``close_timeout_s``: how long an end
    waits for what is still to be written. ``spacing_given``: whether the user said how far apart states are.
    """

    memory: Memory
    chunk_blocks: int = 0
    close_timeout_s: float = 10.0
    spacing_given: bool = False

    def blocks_per_chunk(self, block_tokens: int) -> int:
        """Of a paged group with blocks of so many tokens."""
        return self.chunk_blocks or min(CHUNK_BLOCKS_MAX, max(1, _CHUNK_TOKENS // block_tokens))


def read(extra: Mapping[str, Any]) -> Options:
    """Raises ``ConfigError`` for a name that is unknown or a value that cannot be used."""
    memory_names = [field.name for field in fields(Memory) if field.name not in _NOT_OURS]
    own_names = ["chunk_blocks", "close_timeout_s"]
    for name in extra:
        if name not in memory_names + own_names:
            raise ConfigError(unknown_name(f"The setting {name!r} of StowageConnector", name, memory_names + own_names))
    memory = Memory(**{name: extra[name] for name in memory_names if name in extra})
    if not memory.host_bytes:
        raise ConfigError(
            "StowageConnector needs host memory, because every chunk passes through it. Give it a size, such as "
            '"kv_connector_extra_config": {"host": "8GiB"}.'
        )
    blocks, timeout_s = extra.get("chunk_blocks", 0), extra.get("close_timeout_s", 10.0)
    if isinstance(blocks, bool) or not isinstance(blocks, int) or not 0 <= blocks <= CHUNK_BLOCKS_MAX:
        raise ConfigError(f"chunk_blocks is {blocks!r}: it must be a whole number from 1 to {CHUNK_BLOCKS_MAX}, or 0.")
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 <= timeout_s < float("inf"):
        raise ConfigError(f"close_timeout_s is {timeout_s!r}: it must be a number of seconds, 0 or more.")
    return Options(memory, blocks, float(timeout_s), "snapshot_tokens" in extra)


def state_spacing(options: Options, step_tokens: int) -> int:
    """Tokens of prompts for each recurrent state, by which the host arena is divided. vLLM shows a state where a step
    ends, so there is no more than one in ``step_tokens`` of a long prompt; short ones have one each.
    """
    given = options.memory.snapshot_tokens
    return given if options.spacing_given else max(given, min(step_tokens, _SPACING_MAX))
