"""Families that the engine refuses, for what its probe finds in them; ``engine.families`` says it in a user's words."""

from __future__ import annotations

from typing import Any

from stowage.testing.tiny_models.family import Family, TinySize, common
from stowage.testing.tiny_models.full import latents
from stowage.testing.tiny_models.recurrent import mamba2
from stowage.testing.tiny_models.windowed import experts, windowed

_OWN = "computes attention by itself"
_CHANGED = "changes keys or values after they are cached"
_SPARSE = "hands indices to its attention"


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
        "index_n_heads": 4,
        "index_head_dim": size.head_dim,
        "index_topk": 16,
    }


def _deepseek_v4(size: TinySize) -> dict[str, Any]:
    return common(size) | experts(size)


def _jetmoe(size: TinySize) -> dict[str, Any]:
    return common(size) | {"kv_channels": size.head_dim, "num_local_experts": 4, "num_experts_per_tok": 2}


def _minimax(size: TinySize) -> dict[str, Any]:
    return common(size) | {
        "layer_types": size.pattern("linear_attention", "full_attention"),
        "block_size": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }


def _recurrent_gemma(size: TinySize) -> dict[str, Any]:
    return common(size) | {
        "attention_window_size": 72,
        "lru_width": size.hidden,
        "block_types": ["recurrent", "attention"],
    }


def _mamba2(size: TinySize) -> dict[str, Any]:
    return mamba2(size) | {"num_heads": 2 * size.heads, "head_dim": size.head_dim, "state_size": 16, "n_groups": 1}


REFUSED: tuple[Family, ...] = (
    Family("bloom", "bloom", common, "BLOOM", refused=_OWN),
    Family("mpt", "mpt", _mpt, "MPT", refused=_OWN),
    Family("falcon", "falcon", common, "Falcon", refused=_OWN),
    Family("gptj", "gptj", _gptj, "GPT-J", refused=_OWN),
    Family("codegen", "codegen", _gptj, "CodeGen", refused=_OWN),
    Family("gpt_neo", "gpt_neo", _gpt_neo, "GPT-Neo", refused=_OWN),
    Family("xglm", "xglm", _xglm, "XGLM", refused=_OWN),
    Family("diffllama", "diffllama", common, "DiffLlama", refused=_CHANGED),
    Family("jetmoe", "jetmoe", _jetmoe, "JetMoE", refused=_CHANGED),
    Family("deepseek_v32", "deepseek_v32", _sparse, "DeepSeek-V3.2", refused=_SPARSE),
    Family("glm_moe_dsa", "glm_moe_dsa", _sparse, "GLM-5", refused=_SPARSE),
    Family("deepseek_v4", "deepseek_v4", _deepseek_v4, "DeepSeek-V4", refused=_CHANGED),
    Family("inkling", "inkling_text", windowed, "Inkling", refused="hands position_bias to its attention"),
    Family("doge", "doge", common, "Doge", refused="changes its mask by itself"),
    Family("minimax", "minimax", _minimax, "MiniMax-Text-01, M1", refused="own dynamic cache"),
    Family("recurrent_gemma", "recurrent_gemma", _recurrent_gemma, "RecurrentGemma", refused="state of its own"),
    Family("mamba", "mamba", common, "Mamba", refused="keeps no state between tokens"),
    Family("mamba2", "mamba2", _mamba2, "Mamba 2", refused="keeps no state between tokens"),
    Family("falcon_mamba", "falcon_mamba", common, "Falcon Mamba", refused="keeps no state between tokens"),
)
