"""Divides memory budgets between weights, KV cache and activations.

``device_memory`` holds weights, the KV pool and a step's activations; ``host_memory`` offloaded weights and the arena;
``disk`` weights in another format than the checkpoint's, and segments.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from stowage.config.memory import AUTO, KV_AUTO_BYTES, KV_AUTO_PART, Memory, format_size
from stowage.errors import BudgetError
from stowage.weights.device_prefetcher import Carrier
from stowage.weights.loading import Budget
from stowage.weights.placement import parse_rules
from stowage.weights.source import WeightSource

_HIDDEN_COPIES, _INNER_COPIES, _LOGIT_COPIES, _BYTES = 8, 4, 3, 4
"""Float32 copies that are live at once, at most: of a token's hidden state, of its MLP activations, of its logits."""


def weights_budget(memory: Memory, carrier: Carrier | None, config: Any, adapters_bytes: int = 0) -> Budget:
    """What weights may take of ``memory`` (which is without the adapters'), for a model with ``config``. ``carrier``:
    what copies them to the device. It may be 0: placing then fails with what is needed.
    """
    rules = parse_rules(memory.weights)
    scratch = (memory.disk_directory, memory.disk_bytes) if memory.disk_directory is not None else None
    if not memory.device_memory_bytes:
        return Budget(None, memory.host_memory_bytes, scratch, rules, carrier, memory.host_memory_bytes // 2)
    steps = activation_bytes(memory, config)
    device_bytes = max(0, memory.device_memory_bytes - memory.kv_cache_memory_bytes - steps)
    more = partial(_more, memory, steps, adapters_bytes)
    return Budget(device_bytes, memory.host_memory_bytes // 2, scratch, rules, carrier, more=more)


def _more(memory: Memory, steps: int, adapters: int, weights: int) -> str:
    """The advice of the error when ``weights`` bytes do not fit beside KV, ``adapters`` and activations (``steps``)."""
    beside = steps + weights
    kv_bytes = memory.kv_cache_memory_bytes
    if memory.kv_cache_memory == AUTO:  # which grows with the device
        kv_bytes = min(KV_AUTO_BYTES, (beside - 1) // (KV_AUTO_PART - 1))
    others = f", adapters {format_size(adapters)}" if adapters else ""
    return (
        f"Of device_memory ({format_size(memory.device_memory_bytes + adapters)}) a step takes {format_size(steps)}"
        f"{others}, and KV {format_size(memory.kv_cache_memory_bytes)}: "
        f"give device_memory at least {beside + kv_bytes + adapters} bytes, or less to kv_cache_memory or "
        "max_num_batched_tokens."
    )


def activation_bytes(memory: Memory, config: Any) -> int:
    """A rough upper bound of one step's activations. They are in no pool, but count as device memory."""
    text = config.get_text_config()
    hidden = int(text.hidden_size)
    each = int(getattr(text, "moe_intermediate_size", None) or 0) * int(getattr(text, "num_experts_per_tok", None) or 0)
    wide = getattr(text, "intermediate_size", None) or 4 * hidden
    inner = max(each, *(wide if isinstance(wide, list | tuple) else [int(wide)]))
    tokens = memory.max_num_batched_tokens * (_HIDDEN_COPIES * hidden + _INNER_COPIES * inner)
    return _BYTES * (tokens + _LOGIT_COPIES * memory.max_num_seqs * int(text.vocab_size))


def kv_budget(memory: Memory, source: WeightSource | None, config: Any) -> Memory:
    """What ``source``'s weights leave of ``memory`` for KV in host memory and on disk, and on the device if its pool is
    sized automatically. ``config``: the model's. Raises BudgetError when nothing is left.
    """
    if source is None:
        return memory
    host_bytes = memory.host_memory_bytes - source.placement.host_bytes
    if memory.host_memory_bytes and host_bytes <= 0:
        raise BudgetError(
            f"host_memory is {format_size(memory.host_memory_bytes)}, and the weights that are to lie there take "
            f"{format_size(source.placement.host_bytes)}: nothing is left for KV. Give host_memory a larger "
            "size."
        )
    changed: dict[str, Any] = {"host_memory": host_bytes} if memory.host_memory_bytes else {}
    if memory.kv_cache_memory == AUTO and memory.device_memory_bytes:
        taken_bytes = source.placement.device_bytes + activation_bytes(memory, config)
        changed["kv_cache_memory"] = memory.device_memory_bytes - taken_bytes
    if memory.disk_directory is not None and source.scratch_bytes:
        disk_bytes = memory.disk_bytes - source.scratch_bytes
        if disk_bytes <= 0:
            raise BudgetError(
                f"disk is {format_size(memory.disk_bytes)}, and weights whose form is not the checkpoint's take "
                f"{format_size(source.scratch_bytes)} of it: nothing is left for KV. Give disk a larger size."
            )
        changed["disk"] = f"{memory.disk_directory}:{disk_bytes}"
    return replace(memory, **changed)
