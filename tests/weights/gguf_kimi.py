"""What converters write of Kimi-Linear (llama.cpp: `conversion/kimi_linear.py`)."""

from __future__ import annotations

from typing import Any

import numpy as np


def latents(config: Any) -> dict[str, Any]:
    """How wide heads, and the latents that they are made of, are; DeepSeek's converter writes them so too."""
    return {
        "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention.value_length": config.kv_lora_rank,
        "attention.key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length_mla": config.v_head_dim,
        "attention.kv_lora_rank": config.kv_lora_rank,
    }


def fields(config: Any, arch: str) -> dict[str, Any]:
    """Beside what every decoder has."""
    if arch != "kimi-linear":
        return {}
    found = latents(config) | {
        "attention.head_count_kv": [int(kind == "full_attention") for kind in config.layer_types],
        "expert_gating_func": 2,
        "expert_shared_count": config.num_shared_experts,
        "kda.head_dim": config.linear_head_dim,
        "leading_dense_block_count": config.mlp_layer_types.count("dense"),
        "rope.dimension_count": config.qk_rope_head_dim,
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
    }
    return {f"{arch}.{key}": value for key, value in found.items()}


def written(block: str, own: str, values: np.ndarray) -> list[tuple[str, np.ndarray]] | None:
    """The tensors of a parameter of a layer; `None` where it is one as it is."""
    match own:
        case "self_attn.conv1d.weight":
            parts = zip("qkv", np.split(values, 3), strict=True)
            return [(f"{block}.ssm_conv1d_{name}.weight", part[None]) for name, part in parts]
        case "self_attn.forget_gate.A_log":
            return [(f"{block}.ssm_a", -np.exp(values))]
        case "self_attn.forget_gate.dt_bias":
            return [(f"{block}.ssm_dt.bias", values)]
    return None
