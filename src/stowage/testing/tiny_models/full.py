"""Families whose layers all attend to everything before: grouped queries, experts, learned positions, latents."""

from __future__ import annotations

from typing import Any

from stowage.testing.tiny_models.family import Family, TinySize, common, shared_experts, with_heads

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""Of models whose queries are scaled the more, the later they stand."""


def _experts(size: TinySize) -> dict[str, Any]:
    return common(size) | {"num_local_experts": 4, "num_experts_per_tok": 2}


def _shared_experts(size: TinySize) -> dict[str, Any]:
    return with_heads(size) | shared_experts(size)


def _qwen3_moe(size: TinySize) -> dict[str, Any]:
    return with_heads(size) | {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": size.hidden // 2,
        "shared_expert_intermediate_size": size.hidden // 2,
    }


def _ernie_moe(size: TinySize) -> dict[str, Any]:
    return common(size) | {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": size.hidden // 2}


def _granite_moe(size: TinySize) -> dict[str, Any]:
    return _experts(size) | {"shared_intermediate_size": size.hidden // 2}


def _hunyuan_moe(size: TinySize) -> dict[str, Any]:
    return with_heads(size) | {"num_experts": 4, "moe_topk": 2}


def latents(size: TinySize) -> dict[str, Any]:
    """Multi-head latent attention."""
    return common(size) | {
        "num_key_value_heads": size.heads,
        "q_lora_rank": size.hidden // 2,
        "kv_lora_rank": size.hidden // 2,
        "qk_nope_head_dim": size.head_dim,
        "qk_rope_head_dim": size.head_dim // 2,
        "v_head_dim": size.head_dim,
    }


def _deepseek_v3(size: TinySize) -> dict[str, Any]:
    return latents(size) | {
        "moe_intermediate_size": size.hidden,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    }


def _deepseek_v2(size: TinySize) -> dict[str, Any]:
    return _deepseek_v3(size) | {"n_group": 1}


def _mistral4(size: TinySize) -> dict[str, Any]:
    """Queries are scaled the more, the later they stand."""
    return _deepseek_v2(size) | {"rope_parameters": {**YARN}}  # its config changes them


def _longcat(size: TinySize) -> dict[str, Any]:
    """Two attentions in each layer."""
    return latents(size) | {
        "num_layers": max(1, size.layers // 2),
        "head_dim": size.head_dim // 2,
        "ffn_hidden_size": 2 * size.hidden,
        "expert_ffn_hidden_size": size.hidden // 2,
        "n_routed_experts": 4,
        "zero_expert_num": 2,
        "moe_topk": 2,
    }


def _gpt2(size: TinySize) -> dict[str, Any]:
    """Positions are learned, so the context ends with their table."""
    return common(size) | {"n_positions": size.context_tokens}


def _opt(size: TinySize) -> dict[str, Any]:
    return common(size) | {"ffn_dim": 2 * size.hidden, "word_embed_proj_dim": size.hidden}


def _ctrl(size: TinySize) -> dict[str, Any]:
    return common(size) | {"n_positions": size.context_tokens, "dff": 2 * size.hidden}


def _phi4_mini(size: TinySize) -> dict[str, Any]:
    """Long rope: its frequencies change beyond the length that it was first trained with."""
    factors = [1.0 + i / 4 for i in range(size.head_dim // 4)]
    return common(size) | {
        "max_position_embeddings": 2 * size.context_tokens,
        "original_max_position_embeddings": size.context_tokens,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
            "original_max_position_embeddings": size.context_tokens,
            "short_factor": factors,
            "long_factor": [4 * f for f in factors],
        },
    }


_LONG_ROPE = "runs up to the length that it was first trained with (4,096 tokens for Phi-4-mini): beyond it long rope "
_LONG_ROPE += "changes the keys of the whole batch, those in the cache included"


def _aria(size: TinySize) -> dict[str, Any]:
    return common(size) | {"intermediate_size": size.hidden, "moe_num_experts": 4, "moe_topk": 2}


def _dbrx(size: TinySize) -> dict[str, Any]:
    return common(size) | {
        "d_model": size.hidden,
        "n_heads": size.heads,
        "n_layers": size.layers,
        "max_seq_len": size.context_tokens,
        "attn_config": {"kv_n_heads": size.kv_heads, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": size.hidden, "ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    }


def _hrm(size: TinySize) -> dict[str, Any]:
    """Two stacks of layers, each gone through again and again, with keys of its own each time."""
    return with_heads(size) | {"H_cycles": 2, "L_cycles": 1}


def decoder(size: TinySize) -> dict[str, Any]:
    """Of the BERT kind, made to read what came before only."""
    return common(size) | {"is_decoder": True}


def _roc(size: TinySize) -> dict[str, Any]:
    """Shape and sound of a letter besides; of a token alone they are always the same."""
    return decoder(size) | {"shape_vocab_size": 8, "pronunciation_vocab_size": 8}


FULL: tuple[Family, ...] = (
    Family("llama", "llama", with_heads, "Llama 2, 3; Yi; DeepSeek-R1 distilled; many others"),
    Family("qwen3", "qwen3", with_heads, "Qwen3"),
    Family("deepseek_v3", "deepseek_v3", _deepseek_v3, "DeepSeek-V3, R1; Kimi-K2; Moonlight"),
    Family("qwen3_moe", "qwen3_moe", _qwen3_moe, "Qwen3-30B-A3B, 235B-A22B"),
    Family("qwen2_moe", "qwen2_moe", _qwen3_moe, "Qwen1.5-MoE, Qwen2-57B-A14B"),
    Family("phi", "phi", common, "Phi-1, 1.5, 2"),
    Family("phi4_mini", "phi3", _phi4_mini, "Phi-4-mini, Phi-3 with 128K", note=_LONG_ROPE),
    Family("phimoe", "phimoe", _experts, "Phi-3.5-MoE"),
    Family("gemma", "gemma", with_heads, "Gemma 1"),
    Family("glm", "glm", with_heads, "GLM-4-9B"),
    Family("glm4", "glm4", with_heads, "GLM-4-0414"),
    Family("glm4_moe", "glm4_moe", _shared_experts, "GLM-4.5, 4.6"),
    Family("olmo", "olmo", common, "OLMo"),
    Family("olmo2", "olmo2", common, "OLMo 2"),
    Family("olmoe", "olmoe", _qwen3_moe, "OLMoE"),
    Family("granite", "granite", common, "Granite 3"),
    Family("granitemoe", "granitemoe", _granite_moe, "Granite 3 MoE"),
    Family("granitemoeshared", "granitemoeshared", _granite_moe, "Granite MoE with shared experts"),
    Family("cohere", "cohere", common, "Command R"),
    Family("nemotron", "nemotron", common, "Nemotron-4, Minitron"),
    Family("smollm3", "smollm3", common, "SmolLM3"),
    Family("stablelm", "stablelm", common, "StableLM"),
    Family("ernie4_5", "ernie4_5", with_heads, "ERNIE 4.5"),
    Family("ernie4_5_moe", "ernie4_5_moe", _ernie_moe, "ERNIE 4.5 MoE"),
    Family("hunyuan_dense", "hunyuan_v1_dense", with_heads, "Hunyuan 0.5B to 7B"),
    Family("hunyuan_moe", "hunyuan_v1_moe", _hunyuan_moe, "Hunyuan-A13B"),
    Family("minimax_m2", "minimax_m2", _shared_experts, "MiniMax-M2"),
    Family("seed_oss", "seed_oss", with_heads, "Seed-OSS"),
    Family("apertus", "apertus", common, "Apertus"),
    Family("arcee", "arcee", with_heads, "AFM-4.5B"),
    Family("helium", "helium", with_heads, "Helium"),
    Family("ministral3", "ministral3", with_heads, "Ministral 3"),
    Family("deepseek_v2", "deepseek_v2", _deepseek_v2, "DeepSeek-V2, V2-Lite"),
    Family("minicpm3", "minicpm3", latents, "MiniCPM3"),
    Family("glm4_moe_lite", "glm4_moe_lite", _deepseek_v2, "GLM-4.7-Flash"),
    Family("longcat_flash", "longcat_flash", _longcat, "LongCat-Flash", layers=4),
    Family("gpt2", "gpt2", _gpt2, "GPT-2, Cerebras-GPT"),
    Family("gpt_bigcode", "gpt_bigcode", _gpt2, "StarCoder, SantaCoder"),
    Family("gpt_neox", "gpt_neox", common, "Pythia, GPT-NeoX"),
    Family("opt", "opt", _opt, "OPT, Galactica"),
    Family("biogpt", "biogpt", common, "BioGPT"),
    Family("ctrl", "ctrl", _ctrl, "CTRL"),
    Family("persimmon", "persimmon", common, "Persimmon"),
    Family("bitnet", "bitnet", common, "BitNet b1.58, not packed"),
    Family("nanochat", "nanochat", common, "nanochat"),
    Family("jais2", "jais2", common, "Jais 2"),
    Family("hy_v3", "hy_v3", _shared_experts, "Hunyuan 3"),
    Family("solar_open", "solar_open", _shared_experts, "Solar Open"),
    Family("flex_olmo", "flex_olmo", _qwen3_moe, "FlexOlmo"),
    Family("axk1", "axk1", _deepseek_v2, "A.X K1"),
    Family("youtu", "youtu", latents, "Youtu-LLM"),
    Family("mistral4", "mistral4", _mistral4, "Mistral Small 4"),
    Family("hyperclovax", "hyperclovax", common, "HyperCLOVA X"),
    Family("aria", "aria_text", _aria, "Aria, text"),
    Family("dbrx", "dbrx", _dbrx, "DBRX"),
    Family("hrm_text", "hrm_text", _hrm, "HRM-Text", note="prompts are read causally, as without `token_type_ids`"),
    Family("bert", "bert", decoder, "BERT as a decoder"),
    Family("bert_generation", "bert-generation", decoder, "BERT for generation, as a decoder"),
    Family("electra", "electra", decoder, "ELECTRA as a decoder"),
    Family("ernie", "ernie", decoder, "ERNIE 1 to 3 as a decoder"),
    Family("roc_bert", "roc_bert", _roc, "RoCBert as a decoder"),
)
