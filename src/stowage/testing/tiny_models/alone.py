"""Families whose attention cannot be paged: they run on the fallback executor, one sequence at a time."""

from __future__ import annotations

from typing import Any

from stowage.testing.tiny_models.family import Family, TinySize, common, with_heads
from stowage.testing.tiny_models.full import latents
from stowage.testing.tiny_models.windowed import WINDOW_TOKENS, experts


def _gptj(size: TinySize) -> dict[str, Any]:
    return common(size) | {
        "n_embd": size.hidden,
        "n_layer": size.layers,
        "n_head": size.heads,
        "rotary_dim": size.head_dim // 2,
        "n_positions": size.context_tokens,
    }


def _gpt_neo(size: TinySize) -> dict[str, Any]:
    return common(size) | {
        "attention_types": [[["global", "local"], size.layers // 2]],
        "num_layers": size.layers,
        "window_size": 72,
    }


def _mpt(size: TinySize) -> dict[str, Any]:
    return common(size) | {"d_model": size.hidden, "n_heads": size.heads, "n_layers": size.layers}


def _xglm(size: TinySize) -> dict[str, Any]:
    return common(size) | {"d_model": size.hidden, "ffn_dim": 64, "attention_heads": 4, "num_layers": size.layers}


def _sparse(size: TinySize) -> dict[str, Any]:
    """An indexer chooses which keys a query reads."""
    return latents(size) | {
        "num_key_value_heads": size.heads,
        "moe_intermediate_size": size.hidden // 2,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "index_n_heads": 16,
        "index_head_dim": size.head_dim,
        "index_topk": 16,
    }


def _jetmoe(size: TinySize) -> dict[str, Any]:
    return common(size) | {"kv_channels": size.head_dim, "num_local_experts": 4, "num_experts_per_tok": 2}


def _deepseek_v4(size: TinySize) -> dict[str, Any]:
    """A window alone; with an entry for every 4 tokens, of which an indexer chooses; with one for every 32."""
    return (
        with_heads(size)
        | experts(size)
        | {
            "num_key_value_heads": 1,
            "layer_types": size.pattern(
                "compressed_sparse_attention", "heavily_compressed_attention", "sliding_attention"
            ),
            "mlp_layer_types": ["hash_moe" if layer == 0 else "moe" for layer in range(size.layers)],
            "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 32},
            "sliding_window": WINDOW_TOKENS,
            "q_lora_rank": size.hidden // 2,
            "partial_rotary_factor": 0.5,
            "index_n_heads": 16,
            "index_head_dim": size.head_dim,
            "index_topk": 24,
            "o_groups": 2,
            "o_lora_rank": size.hidden // 4,
            "hc_mult": 2,
        }
    )


def _inkling(size: TinySize) -> dict[str, Any]:
    """Every layer has convolutions beside its attention, every second one a window."""
    return (
        with_heads(size)
        | experts(size)
        | {
            "layer_types": size.pattern("hybrid_sliding", "hybrid"),
            "swa_num_attention_heads": size.heads,
            "swa_num_key_value_heads": size.kv_heads,
            "swa_head_dim": size.head_dim,
            "sliding_window_size": WINDOW_TOKENS,
            "d_rel": size.head_dim // 2,
            "rel_extent": 64,
            "logits_mup_width_multiplier": 1.0,
        }
    )


ALONE: tuple[Family, ...] = (
    Family("deepseek_v32", "deepseek_v32", _sparse, "DeepSeek-V3.2", note="an indexer chooses keys"),
    Family("glm_moe_dsa", "glm_moe_dsa", _sparse, "GLM-5", note="an indexer chooses keys"),
    Family(
        "deepseek_v4",
        "deepseek_v4",
        _deepseek_v4,
        "DeepSeek-V4",
        note="an indexer chooses entries; `--dtype float32`, since Transformers 5.17 fails in 16 bits",
        layers=3,
    ),
    Family("inkling", "inkling_text", _inkling, "Inkling", note="a bias for each distance"),
    Family("bloom", "bloom", common, "BLOOM", note="ALiBi"),
    Family("mpt", "mpt", _mpt, "MPT", note="ALiBi"),
    Family("falcon", "falcon", common, "Falcon"),
    Family("gptj", "gptj", _gptj, "GPT-J"),
    Family("codegen", "codegen", _gptj, "CodeGen"),
    Family("gpt_neo", "gpt_neo", _gpt_neo, "GPT-Neo", note="every second layer's mask shows a window"),
    Family("xglm", "xglm", _xglm, "XGLM"),
    Family("diffllama", "diffllama", common, "DiffLlama", note="two halves of the heads, one from the other"),
    Family("jetmoe", "jetmoe", _jetmoe, "JetMoE", note="experts of attention"),
)
