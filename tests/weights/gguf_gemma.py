"""What converters write of Gemma, and of other families with windows (llama.cpp: `conversion/gemma.py`, `olmo.py`)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def fields(config: Any, arch: str) -> dict[str, Any]:
    """Beside what every decoder has."""
    if arch == "gemma4":
        return _gemma4(config, arch)
    if arch == "gemma3n":
        return _gemma3n(config)
    if config.model_type in ("olmo3", "exaone4") and config.sliding_window is not None:
        return {f"{arch}.attention.sliding_window_pattern": windows(config)}
    return {}


def windows(config: Any) -> list[bool]:
    return [kind == "sliding_attention" for kind in config.layer_types]


def _gemma4(config: Any, arch: str) -> dict[str, Any]:
    """Of its layers without a window a head is wider. What is rotated in those is said by a tensor."""
    full = config.layer_types.index("full_attention")
    each = windows(config)
    wide = config.per_layer_config[full]
    sizes = {
        "attention.sliding_window_pattern": each,
        "attention.key_length": wide.head_dim,
        "attention.value_length": wide.head_dim,
        "attention.key_length_swa": config.head_dim,
        "attention.value_length_swa": config.head_dim,
        "attention.head_count_kv": [config.num_key_value_heads if own else wide.num_key_value_heads for own in each],
        "attention.shared_kv_layers": config.num_kv_shared_layers,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
        "rope.freq_base_swa": config.rope_parameters["sliding_attention"]["rope_theta"],
        "rope.dimension_count_swa": config.head_dim,
    }
    if config.enable_moe_block:
        sizes["expert_used_count"] = config.top_k_experts
    return {f"{arch}.{key}": value for key, value in sizes.items()}


def _gemma3n(config: Any) -> dict[str, Any]:
    normal, sparse = torch.distributions.normal.Normal(0, 1), torch.tensor(config.activation_sparsity_pattern)
    sizes = {
        "activation_sparsity_scale": [float(one) for one in normal.icdf(sparse)],
        "altup.active_idx": config.altup_active_idx,
        "altup.num_inputs": config.altup_num_inputs,
        "attention.shared_kv_layers": config.num_kv_shared_layers,
        "attention.sliding_window_pattern": windows(config),
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
        "feed_forward_length": config.intermediate_size,
    }
    return {f"gemma3n.{key}": value for key, value in sizes.items()}


def stacked(config: Any, arch: str, tensors: list[tuple[str, np.ndarray]]) -> list[tuple[str, np.ndarray]]:
    """Matrices of AltUp, one behind the other; and what published checkpoints have of layers that share keys, though
    nothing is computed from it.
    """
    if arch != "gemma3n":
        return tensors
    found = [(name, values) for name, values in tensors if not name.startswith("altup")]
    for part in ("altup_proj", "altup_unembd_proj"):
        each = [dict(tensors)[f"{part}.{number}"] for number in range(config.altup_num_inputs - 1)]
        found.append((f"{part}.weight", np.stack(each)))
    for layer in range(config.num_hidden_layers - config.num_kv_shared_layers, config.num_hidden_layers):
        unused = np.ones((config.num_key_value_heads * config.head_dim, config.hidden_size))
        found += [(f"blk.{layer}.attn_{part}.weight", unused) for part in "kv"]
        found.append((f"blk.{layer}.attn_k_norm.weight", np.ones(config.head_dim)))
    return found


def written(arch: str, path: str, values: np.ndarray) -> list[tuple[str, np.ndarray]] | None:
    """What `stacked` puts together; of Falcon-H1 a norm whose name has no last part; of Command R+ norms of heads."""
    if arch == "gemma3n" and path.startswith("model.altup_"):
        _, part, number, _ = path.split(".")
        return [(f"{'altup_unembd_proj' if 'unembed' in part else 'altup_proj'}.{number}", values)]
    layer = path.split(".")[2] if path.count(".") > 2 else ""
    if arch == "falcon-h1" and path.endswith("pre_ff_layernorm.weight"):
        return [(f"blk.{layer}.ffn_norm", values)]
    return None
