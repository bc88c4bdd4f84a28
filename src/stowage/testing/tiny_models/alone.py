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


def _indexed(size: TinySize) -> dict[str, Any]:
    """``_sparse``, with what newer families of the kind have besides."""
    return _sparse(size) | {"head_dim": size.head_dim // 2, "gated_norm_rank": 4, "hc_mult": 2}


def _minimax_m3(size: TinySize) -> dict[str, Any]:
    """An indexer for each key head chooses blocks of keys, in every second layer."""
    return (
        with_heads(size)
        | experts(size)
        | {
            "layer_types": size.pattern("full_attention", "minimax_m3_sparse"),
            "dense_intermediate_size": size.hidden,
            "shared_intermediate_size": size.hidden,
            "intermediate_size": size.hidden,
            "rotary_dim": size.head_dim // 2,
            "index_n_heads": size.kv_heads,
            "index_head_dim": size.head_dim,
            "index_block_size": 8,
            "index_topk_blocks": 3,
        }
    )


def _qwen4(size: TinySize) -> dict[str, Any]:
    """Delta rule, with what the last tokens were looked up in a table; attention to what an indexer chooses."""
    return with_heads(size) | {
        "layer_types": size.pattern("linear_attention", "qwen_sparse_attention"),
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": size.head_dim,
        "linear_value_head_dim": size.head_dim,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": size.hidden // 2,
        "shared_expert_intermediate_size": size.hidden // 2,
        "hc_count": 2,
        "hc_lowrank": 16,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": size.head_dim,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
        "ple_layer_ids": [1],
        "ple_embed_dim": size.hidden,
        "ngram_vocab_size_base": 64,
        "split_ngram_parts": 2,
        "heads_per_ngram": 4,
    }


def _doge(size: TinySize) -> dict[str, Any]:
    return common(size) | {"keep_window_size": 40}


def _minimax(size: TinySize) -> dict[str, Any]:
    return common(size) | {
        "layer_types": size.pattern("linear_attention", "full_attention"),
        "block_size": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }


def _recurrent_gemma(size: TinySize) -> dict[str, Any]:
    return common(size) | {
        "attention_window_size": WINDOW_TOKENS,
        "lru_width": size.hidden,
        "block_types": ["recurrent", "attention"],
    }


def _xlstm(size: TinySize) -> dict[str, Any]:
    return common(size) | {"num_heads": size.heads, "qk_dim_factor": 1.0, "chunk_size": 32}


def _rwkv(size: TinySize) -> dict[str, Any]:
    """So deep that Transformers halves some of its weights."""
    return common(size) | {"context_length": size.context_tokens, "rescale_every": 1}


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
    Family("gpt_neox_japanese", "gpt_neox_japanese", common, "GPT-NeoX-Japanese"),
    Family("axk2", "axk2", _indexed, "A.X K2", note="an indexer chooses keys"),
    Family("hy_v4", "hy_v4", _indexed, "Hunyuan 4", note="an indexer chooses keys"),
    Family("minimax_m3", "minimax_m3_vl_text", _minimax_m3, "MiniMax-M3, text", note="an indexer chooses blocks"),
    Family("qwen4_exp", "qwen4_exp_text", _qwen4, "Qwen4 (experimental), text", note="an indexer chooses keys"),
    Family("doge", "doge", _doge, "Doge", note="with `eager` attention: with `sdpa` a prompt reads its own future"),
    Family("minimax", "minimax", _minimax, "MiniMax-Text-01, M1", note="states in a cache of its own class"),
    Family(
        "recurrent_gemma",
        "recurrent_gemma",
        _recurrent_gemma,
        "RecurrentGemma",
        note="states in its modules; a prompt's first step is computed at once and the rest token by token, as Jamba's",
    ),
    Family("xlstm", "xlstm", _xlstm, "xLSTM", note="states in a cache of its own class"),
    Family("rwkv", "rwkv", _rwkv, "RWKV-4", note="states in tensors that it is handed by themselves"),
)
