"""Families with layers that attend to a window, or to their own part, and what comes with them: soft-capping, sinks,
keys shared between layers, heads that differ from layer to layer.
"""

from __future__ import annotations

from typing import Any

from stowage.testing.tiny_models.family import Family, TinySize, common, shared_experts, with_heads

WINDOW_TOKENS = 72
"""No multiple of a block."""
_ALTERNATING = ("sliding_attention", "full_attention")


def windowed(size: TinySize) -> dict[str, Any]:
    """Every layer has the window."""
    return with_heads(size) | {"sliding_window": WINDOW_TOKENS}


def alternating(size: TinySize) -> dict[str, Any]:
    """Every second layer has the window."""
    return windowed(size) | {"layer_types": size.pattern(*_ALTERNATING)}


def experts(size: TinySize) -> dict[str, Any]:
    return shared_experts(size) | {"num_local_experts": 4}


def _alternating_experts(size: TinySize) -> dict[str, Any]:
    return alternating(size) | experts(size)


def _mixtral(size: TinySize) -> dict[str, Any]:
    return windowed(size) | {"num_local_experts": 4, "num_experts_per_tok": 2}


def _qwen2(size: TinySize) -> dict[str, Any]:
    """The window begins with a later layer."""
    half = size.layers // 2
    return common(size) | {"use_sliding_window": True, "sliding_window": WINDOW_TOKENS, "max_window_layers": half}


def _gemma2(size: TinySize) -> dict[str, Any]:
    """Caps low enough to bend every score."""
    return alternating(size) | {
        "query_pre_attn_scalar": size.head_dim,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 30.0,
    }


def _gemma3(size: TinySize) -> dict[str, Any]:
    """Two sliding layers to each full one."""
    return windowed(size) | {
        "query_pre_attn_scalar": size.head_dim,
        "layer_types": size.pattern("sliding_attention", "sliding_attention", "full_attention"),
    }


def _sharing(size: TinySize) -> dict[str, Any]:
    """The last two layers have no keys of their own."""
    return alternating(size) | {
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": size.hidden // 4,
        "vocab_size_per_layer_input": size.vocab,
    }


def _gemma3n(size: TinySize) -> dict[str, Any]:
    return _sharing(size) | {
        "altup_num_inputs": 2,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.0] * size.layers,
    }


def _gemma4(size: TinySize) -> dict[str, Any]:
    """Full layers have wider heads, and fewer of them, than sliding ones; their values are made of the keys."""
    heads = {"global_head_dim": 2 * size.head_dim, "num_global_key_value_heads": 1}
    return _sharing(size) | heads | {"attention_k_eq_v": True}


def _gemma4_unified(size: TinySize) -> dict[str, Any]:
    """As Gemma 4, with no rows for each layer."""
    return _gemma4(size)


def _llama4(size: TinySize) -> dict[str, Any]:
    """Chunked-local layers with rope, full ones without it, temperature on these, experts in every second layer."""
    return with_heads(size) | {
        "intermediate_size_mlp": 2 * size.hidden,
        "attention_chunk_size": 96,
        "no_rope_layer_interval": 2,
        "interleave_moe_layer_step": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "attn_temperature_tuning": True,
        "floor_scale": 64,
        "attn_scale": 0.1,
    }


def _modernbert(size: TinySize) -> dict[str, Any]:
    return common(size) | {"local_attention": 2 * WINDOW_TOKENS, "layer_types": size.pattern(*_ALTERNATING)}


def _compass(size: TinySize) -> dict[str, Any]:
    """Positions in three parts, as of pictures, all the same for text."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
    return alternating(size) | {"rope_parameters": {"full_attention": rope, "sliding_attention": rope}}


WINDOWED: tuple[Family, ...] = (
    Family("gemma3", "gemma3_text", _gemma3, "Gemma 3, text", layers=3),
    Family("llama4", "llama4_text", _llama4, "Llama 4, text"),
    Family("mistral", "mistral", windowed, "Mistral 7B; Mistral Small, Nemo without a window"),
    Family("mixtral", "mixtral", _mixtral, "Mixtral"),
    Family("ministral", "ministral", alternating, "Ministral 8B"),
    Family("qwen2", "qwen2", _qwen2, "Qwen2, Qwen2.5; QwQ"),
    Family("gemma2", "gemma2", _gemma2, "Gemma 2", note="scores are capped, as Transformers does with `eager` only"),
    Family("vaultgemma", "vaultgemma", _gemma2, "VaultGemma", note="as Gemma 2"),
    Family("gemma3n", "gemma3n_text", _gemma3n, "Gemma 3n, text", layers=6),
    Family("gemma4", "gemma4_text", _gemma4, "Gemma 4, text", layers=6),
    Family("gemma4_unified", "gemma4_unified_text", _gemma4_unified, "Gemma 4 12B, text", layers=6),
    Family("gpt_oss", "gpt_oss", _alternating_experts, "gpt-oss-20b, 120b"),
    Family("granite_swa", "granite_swa", alternating, "Granite with windows and sinks"),
    Family("granitemoe_swa", "granitemoe_swa", _alternating_experts, "the same with experts"),
    Family("mimo_v2_flash", "mimo_v2_flash", _alternating_experts, "MiMo-V2-Flash"),
    Family("phi3", "phi3", lambda size: common(size) | {"sliding_window": WINDOW_TOKENS}, "Phi-3, Phi-3.5; Phi-4"),
    Family("starcoder2", "starcoder2", windowed, "StarCoder 2"),
    Family("cohere2", "cohere2", alternating, "Command R7B, Command A"),
    Family("cohere2_moe", "cohere2_moe", _alternating_experts, "the same with experts"),
    Family("olmo3", "olmo3", alternating, "OLMo 3"),
    Family("exaone4", "exaone4", alternating, "EXAONE 4"),
    Family("exaone_moe", "exaone_moe", _alternating_experts, "K-EXAONE"),
    Family("cwm", "cwm", alternating, "CWM"),
    Family("dots1", "dots1", _alternating_experts, "dots.llm1"),
    Family("afmoe", "afmoe", _alternating_experts, "Trinity"),
    Family("laguna", "laguna", _alternating_experts, "Laguna"),
    Family("mellum", "mellum", _alternating_experts, "Mellum 2"),
    Family("modernbert_decoder", "modernbert-decoder", _modernbert, "ModernBERT decoder, Ettin"),
    Family("cohere_compass", "cohere_compass_text", _compass, "Cohere Compass, text"),
)
