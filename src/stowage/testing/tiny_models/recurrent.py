"""Families with layers that keep a state of fixed size instead of keys: state spaces, delta rules, short convolutions;
each beside layers with attention, or both in one layer.
"""

from __future__ import annotations

from typing import Any

from stowage.testing.tiny_models.family import Family, TinySize, common, with_heads
from stowage.testing.tiny_models.full import latents

_ALTERNATING = ("linear_attention", "full_attention")


def _delta(size: TinySize) -> dict[str, Any]:
    """Gated delta rule in every second layer."""
    return with_heads(size) | {
        "layer_types": size.pattern(*_ALTERNATING),
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": size.head_dim,
        "linear_value_head_dim": size.head_dim,
        "linear_conv_kernel_dim": 4,
    }


def _delta_experts(size: TinySize) -> dict[str, Any]:
    return _delta(size) | {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": size.hidden,
        "shared_expert_intermediate_size": size.hidden,
    }


def _qwen3_next(size: TinySize) -> dict[str, Any]:
    return _delta_experts(size) | {"decoder_sparse_step": 2}


def _kimi_linear(size: TinySize) -> dict[str, Any]:
    """Delta rule with a gate per channel, beside latent attention."""
    return latents(size) | {
        "layer_types": size.pattern(*_ALTERNATING),
        "linear_head_dim": size.head_dim,
        "linear_num_heads": size.heads,
        "moe_intermediate_size": size.hidden // 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "q_lora_rank": None,
    }


def _nemotron_h(size: TinySize) -> dict[str, Any]:
    """The layers' number follows from their kinds; Transformers warns where both are given."""
    fields = with_heads(size)
    del fields["num_hidden_layers"]
    return fields | {
        "layers_block_type": size.pattern("linear_attention", "mlp", "full_attention", "linear_attention"),
        "mamba_num_heads": size.heads,
        "mamba_head_dim": size.head_dim,
        "ssm_state_size": 16,
        "n_groups": 2,
        "conv_kernel": 4,
        "chunk_size": 32,
        "use_mamba_kernels": False,
    }


def mamba2(size: TinySize) -> dict[str, Any]:
    """State spaces of the second kind, twice as wide as the model."""
    return common(size) | {
        "mamba_n_heads": 2 * size.heads,
        "mamba_d_head": size.head_dim,
        "mamba_n_groups": 1,
        "mamba_d_state": 16,
        "mamba_chunk_size": 32,
    }


def _bamba(size: TinySize) -> dict[str, Any]:
    return mamba2(size) | {"attn_layer_indices": list(range(1, size.layers, 2))}


def _falcon_h1(size: TinySize) -> dict[str, Any]:
    """State space and attention side by side in every layer."""
    return mamba2(size) | {"mamba_n_heads": size.heads, "mamba_d_ssm": size.hidden, "head_dim": size.head_dim}


def _granite_hybrid(size: TinySize) -> dict[str, Any]:
    return mamba2(size) | {
        "layer_types": size.pattern("mamba", "attention"),
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": size.hidden // 2,
    }


def _jamba(size: TinySize) -> dict[str, Any]:
    return common(size) | {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "use_mamba_kernels": False,
    }


def _lfm2(size: TinySize) -> dict[str, Any]:
    return common(size) | {"layer_types": size.pattern("conv", "full_attention")}


def _lfm2_moe(size: TinySize) -> dict[str, Any]:
    return _lfm2(size) | {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": size.hidden // 2,
        "num_dense_layers": 1,
    }


def _zamba2(size: TinySize) -> dict[str, Any]:
    """One attention module that several layers share."""
    return common(size) | {
        "layers_block_type": size.pattern("mamba", "hybrid"),
        "num_key_value_heads": size.heads,
        "mamba_d_state": 16,
        "n_mamba_heads": 2 * size.heads,
        "mamba_ngroups": 1,
        "chunk_size": 32,
        "use_mem_rope": True,
        "adapter_rank": 8,
        "num_mem_blocks": 1,
        "use_mamba_kernels": False,
    }


def _zamba(size: TinySize) -> dict[str, Any]:
    return common(size) | {
        "layers_block_type": size.pattern("linear_attention", "linear_attention", "hybrid"),
        "num_key_value_heads": size.heads,
        "mamba_d_state": 16,
        "mamba_dt_rank": 8,
        "use_mamba_kernels": False,
    }


_SINGLY = (
    "a prompt's first step is computed at once and the rest token by token, because Transformers' code forgets the "
    "state when it goes on with several tokens: raise `max_num_batched_tokens` for long prompts"
)


def _mamba2(size: TinySize) -> dict[str, Any]:
    """State spaces alone. Their names for sizes are not those of hybrids."""
    return common(size) | {
        "num_heads": 2 * size.heads,
        "head_dim": size.head_dim,
        "state_size": 16,
        "n_groups": 1,
        "chunk_size": 32,
    }


RECURRENT: tuple[Family, ...] = (
    Family("qwen3_next", "qwen3_next", _qwen3_next, "Qwen3-Next, Qwen3-Coder-Next"),
    Family("nemotron_h", "nemotron_h", _nemotron_h, "Nemotron-H, Nemotron 3 Nano", layers=4),
    Family("qwen3_5", "qwen3_5_text", _delta, "Qwen3.5, Qwen3.6 dense, text"),
    Family("qwen3_5_moe", "qwen3_5_moe_text", _delta_experts, "Qwen3.5, Qwen3.6 with experts, text"),
    Family("kimi_linear", "kimi_linear", _kimi_linear, "Kimi-Linear"),
    Family("olmo_hybrid", "olmo_hybrid", _delta, "OLMo Hybrid"),
    Family("bamba", "bamba", _bamba, "Bamba"),
    Family("falcon_h1", "falcon_h1", _falcon_h1, "Falcon-H1"),
    Family("granitemoehybrid", "granitemoehybrid", _granite_hybrid, "Granite 4"),
    Family("lfm2", "lfm2", _lfm2, "LFM2"),
    Family("lfm2_moe", "lfm2_moe", _lfm2_moe, "LFM2-8B-A1B"),
    Family("zamba2", "zamba2", _zamba2, "Zamba2", layers=4),
    Family("zamba", "zamba", _zamba, "Zamba", layers=6, note=_SINGLY),
    Family("zaya", "zaya", with_heads, "ZAYA1"),
    Family("jamba", "jamba", _jamba, "Jamba", note=_SINGLY),
    Family("mamba", "mamba", common, "Mamba", note=_SINGLY),
    Family("mamba2", "mamba2", _mamba2, "Mamba 2; Codestral Mamba"),
    Family("falcon_mamba", "falcon_mamba", common, "Falcon Mamba", note=_SINGLY),
)
