"""The error for a sequence that is too long for the engine's memory."""

from __future__ import annotations

from stowage.config.memory import Memory, format_size
from stowage.engine.assembly import Parts
from stowage.engine.sequence import Sequence
from stowage.errors import BudgetError
from stowage.executor.determinism.pieces import remedy


def too_long(sequence: Sequence, parts: Parts, memory: Memory, no_offload_reason: str) -> BudgetError:
    """The error, with what would be enough. ``no_offload_reason``: why exactness excludes offloaded keys, or ""."""
    length = sequence.length_max
    need = parts.capacity.least_device_bytes(length, recorded=parts.graphs is not None)
    host = memory.arena_bytes
    behind = f"with host memory of {format_size(host)}" if host else "without host memory"
    least: int | None = 0
    why = "" if parts.inexact_because else remedy(no_offload_reason)
    if not why:
        least = parts.capacity.least_host_bytes(length, parts.kv_cache_memory_bytes, parts.snapshot_tokens)
    instead = f"With this device budget it needs --host-memory {-(-least // 1024)}KiB; alone on" if least else "On"
    return BudgetError(
        f"a sequence of {length} tokens ({sequence.prompt_tokens} of the prompt, up to {sequence.new_tokens_max} new) "
        f"does not fit into the device KV budget of {format_size(memory.kv_cache_memory_bytes)}, {behind} behind it. "
        f"{instead} the device it needs {need:,} bytes: --kv-cache-memory {-(-need // 1024)}KiB.{why}"
    )
