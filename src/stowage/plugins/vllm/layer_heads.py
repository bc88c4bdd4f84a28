"""Which KV heads of each layer a tensor-parallel rank holds, as vLLM divides them: read off its configuration.

vLLM gives each rank an equal run of the heads; with fewer heads than ranks, neighbouring ranks hold the same one. An
MLA latent is on every rank. What is not certain is left out, and each rank then keeps its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from stowage.plugins.vllm.adapter import drafts_of
from stowage.plugins.vllm.division import Heads, Naming

_APART = frozenset({"CPU_ATTN", "FLASH_ATTN", "FLASHINFER", "FLEX_ATTENTION", "TRITON_ATTN"})
"""Attention backends of vLLM 0.32 and 0.33 that read each head's part of ``[blocks, heads, tokens, content]`` by
itself. Others may arrange what heads share, such as the scales of small number types.
"""
_PLAIN_CACHES = frozenset({"auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"})
_HEAD_COUNTS = "key_value_heads kv_heads head_kv heads_kv attention_groups query_group heads_in_group".split()
"""In the names of a model's settings: how many KV heads some layers have."""


def naming(config: Any, kv_cache_config: Any, tensor_rank: int, *, shared: bool, each_head: bool) -> Naming:
    """How this rank names what it holds. Not ``shared``: everything is its own."""
    ranks = config.parallel_config.tensor_parallel_size
    modules = getattr(config.compilation_config, "static_forward_context", {})
    backends = {name: _backend(module) for name, module in modules.items()}
    heads = _heads(config, kv_cache_config, tensor_rank, backends) if shared else {}
    return Naming(tensor_rank, ranks, heads, each_head, backends)


def _backend(module: Any) -> str:
    backend: Any = getattr(module, "attn_backend", None)
    return str(backend.get_name()) if hasattr(backend, "get_name") else ""


def _heads(config: Any, kv_cache_config: Any, tensor_rank: int, backends: Mapping[str, str]) -> dict[str, Heads]:
    from vllm.v1 import kv_cache_interface as vllm

    ranks = config.parallel_config.tensor_parallel_size
    total = _heads_of_all_layers(config)
    plain = str(config.cache_config.cache_dtype) in _PLAIN_CACHES
    found = {}
    for name, spec in _specs(kv_cache_config):
        if type(spec) is vllm.MLAAttentionSpec:
            found[name] = Heads(0, 1, 1, apart=True)
        elif type(spec) in (vllm.FullAttentionSpec, vllm.SlidingWindowSpec, vllm.ChunkedLocalAttentionSpec):
            mine = max(1, total // ranks)
            if not total or (total % ranks and ranks % total) or spec.num_kv_heads != mine:
                continue
            first = tensor_rank * total // ranks
            found[name] = Heads(first, first + mine, total, plain and backends.get(name, "") in _APART)
    return found


def _specs(kv_cache_config: Any) -> Iterator[tuple[str, Any]]:
    for group in kv_cache_config.kv_cache_groups:
        by_layer = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        for name in group.layer_names:
            yield name, by_layer[name] if by_layer is not None else group.kv_cache_spec


def _heads_of_all_layers(config: Any) -> int:
    """KV heads of every layer with attention, or 0: layers differ, or draft layers have their own number."""
    model, drafts = config.model_config, drafts_of(config)
    if drafts is not None and drafts.model is not None:
        return 0
    total = int(model.get_total_num_kv_heads())
    counts = set(_counts(model.hf_text_config.to_dict()))
    return total if counts <= {total} else 0


def _counts(value: Any, name: str = "") -> Iterator[Any]:
    """The numbers of KV heads that a configuration names, wherever they stand in it."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _counts(inner, str(key))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _counts(inner, name)
    elif value is not None and any(part in name for part in _HEAD_COUNTS):
        yield value
