"""What llama.cpp's converters write of families with Mamba 2: `conversion/granite.py`, `mamba.py`, `nemotron.py`."""

from __future__ import annotations

from typing import Any

import numpy as np

HYBRIDS = ("falcon-h1", "granitehybrid", "jamba", "mamba", "mamba2", "nemotron_h", "nemotron_h_moe")
INTERLEAVED = ("granitehybrid", "nemotron_h", "nemotron_h_moe")
_GRANITES = ("granitehybrid", "granitemoe")


def fields(config: Any, arch: str) -> dict[str, Any]:
    """Beside what every decoder has."""
    found: dict[str, Any] = {}
    if arch in _GRANITES:
        found |= {"expert_count": config.num_local_experts, "attention.scale": config.attention_multiplier}
        if config.model_type != "granitemoe":
            found["expert_shared_feed_forward_length"] = config.shared_intermediate_size
    if arch in HYBRIDS[1:] and not arch.startswith("mamba"):
        heads = config.num_key_value_heads
        found["attention.head_count_kv"] = [heads * (kind == "full_attention") for kind in config.layer_types]
    if arch == "granitehybrid":
        found |= {
            "ssm.conv_kernel": config.mamba_d_conv,
            "ssm.state_size": config.mamba_d_state,
            "ssm.group_count": config.mamba_n_groups,
            "ssm.inner_size": config.mamba_expand * config.hidden_size,
            "ssm.time_step_rank": config.mamba_n_heads,
            "rope.scaling.finetuned": config.position_embedding_type == "rope",
        }
    if arch in ("falcon-h1", "jamba"):
        found |= {"ssm.conv_kernel": config.mamba_d_conv, "ssm.state_size": config.mamba_d_state}
    if arch == "falcon-h1":
        found |= {
            "ssm.group_count": config.mamba_n_groups,
            "ssm.inner_size": config.mamba_d_ssm,
            "ssm.time_step_rank": config.mamba_n_heads,
        }
    if arch == "jamba":
        found |= {
            "ssm.inner_size": config.mamba_expand * config.hidden_size,
            "ssm.time_step_rank": config.mamba_dt_rank,
        }
    if arch in ("mamba", "mamba2"):
        found |= {
            "attention.head_count": 0,
            "attention.layer_norm_rms_epsilon": config.layer_norm_epsilon,
            "embedding_length": config.hidden_size,
            "feed_forward_length": 0,
            "ssm.conv_kernel": config.conv_kernel,
            "ssm.state_size": config.state_size,
        }
    if arch == "mamba":
        found |= {
            "ssm.inner_size": config.intermediate_size,
            "ssm.time_step_rank": config.time_step_rank,
            "ssm.dt_b_c_rms": config.model_type == "falcon_mamba",
        }
    if arch == "mamba2":
        found |= {
            "ssm.group_count": config.n_groups,
            "ssm.inner_size": config.num_heads * config.head_dim,
            "ssm.time_step_rank": config.num_heads,
        }
    if arch in ("nemotron_h", "nemotron_h_moe"):
        found |= _nemotron_h(config, arch == "nemotron_h_moe")
    return {f"{arch}.{key}": value for key, value in found.items()}


def _nemotron_h(config: Any, mixture: bool) -> dict[str, Any]:
    wide = config.moe_intermediate_size if mixture else config.intermediate_size
    found = {
        "feed_forward_length": [wide * (kind in ("moe", "mlp")) for kind in config.layer_types],
        "attention.layer_norm_epsilon": config.layer_norm_epsilon,
        "attention.layer_norm_rms_epsilon": config.layer_norm_epsilon,
        "ssm.conv_kernel": config.conv_kernel,
        "ssm.state_size": config.ssm_state_size,
        "ssm.group_count": config.n_groups,
        "ssm.inner_size": config.mamba_num_heads * config.mamba_head_dim,
        "ssm.time_step_rank": config.mamba_num_heads,
    }
    if mixture:
        found["expert_shared_feed_forward_length"] = config.moe_shared_expert_intermediate_size
        found["expert_weights_norm"] = config.norm_topk_prob
    if mixture and config.moe_latent_size:
        found["moe_latent_size"] = config.moe_latent_size
    return found


def written(config: Any, arch: str, block: str, own: str, values: np.ndarray) -> list[tuple[str, np.ndarray]] | None:
    """The tensors of a parameter of a layer; ``None`` where it is one as it is."""
    if arch in _GRANITES and own.startswith("shared_mlp."):
        last = "_shexp" if config.num_local_experts else ""
        if own == "shared_mlp.output_linear.weight":
            return [(f"{block}.ffn_down{last}.weight", values)]
        return [
            (f"{block}.ffn_{name}{last}.weight", half)
            for name, half in zip(("gate", "up"), np.split(values, 2), strict=True)
        ]
    if arch not in HYBRIDS:
        return None
    part, _, own = own.partition(".")
    if part not in ("mamba", "mixer"):
        return None
    if own in ("A_log", "D") and arch in ("jamba", "mamba"):
        return [(f"{block}.ssm_a", -np.exp(values))] if own == "A_log" else [(f"{block}.ssm_d", values)]
    if own in ("A_log", "D"):
        column = values.reshape(-1, 1)
        return [(f"{block}.ssm_a", -np.exp(column))] if own == "A_log" else [(f"{block}.ssm_d", column)]
    if own == "dt_bias":
        return [(f"{block}.ssm_dt.bias", values)]
    if own == "norm.weight":
        groups = getattr(config, "mamba_n_groups", None) or config.n_groups
        return [(f"{block}.ssm_norm.weight", values.reshape(groups, -1))]
    return None


def is_dense(config: Any) -> bool:
    """Whether it has no experts, though its config says how many there would be."""
    if config.model_type == "nemotron_h":
        return "moe" not in config.layer_types
    return config.model_type == "granitemoehybrid" and not config.num_local_experts


def named(arch: str, path: str) -> str:
    """As the package gguf knows a parameter."""
    if arch in _GRANITES:
        return path.replace("block_sparse_moe.router.", "block_sparse_moe.router.layer.")
    if arch == "kimi-linear":
        return path.replace("self_attn.forget_gate.", "self_attn.")
    if arch == "ernie4_5-moe":
        return path.replace("mlp.gate.moe_statics.", "mlp.moe_statics.")
    return path.replace("model.layers.", "backbone.layers.") if arch.startswith("nemotron_h") else path
