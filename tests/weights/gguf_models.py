"""The tiny models that GGUF files are written from."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM

from stowage.testing import tiny_models
from stowage.testing.tiny_models.full import YARN

SIZE = tiny_models.TinySize(hidden=256, layers=2)


LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 1.0,
    "original_max_position_embeddings": 4096,
    "short_factor": [1.0 + at / 8 for at in range(4)],
    "long_factor": [1.0 + at / 4 for at in range(4)],
}


MINICPM3 = {"dim_model_base": 256, "scale_depth": 1.4, "scale_emb": 12}


GRANITE = {
    "mamba_chunk_size": 256,
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
    "tie_word_embeddings": True,
}


DOTS = {
    "layer_types": ["full_attention"] * 4,
    "num_key_value_heads": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}


GLM5 = {"index_head_dim": 64, "rms_norm_eps": 1e-6}


LLAMA4 = {"attention_chunk_size": 8192, "floor_scale": 8192, "no_rope_layer_interval": 4}


HALF = {"rope_type": "default", "partial_rotary_factor": 0.5}
MIMO = {
    "num_attention_heads": 4,
    "rope_parameters": {
        "full_attention": {**HALF, "rope_theta": 5e6},
        "sliding_attention": {**HALF, "rope_theta": 1e4},
    },
    "v_head_dim": 32,
}


EXPERTS = {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 64}


def model_of(family: str, directory: Path, size: Any = None, **changed: Any) -> Any:
    """A tiny model of Transformers, in float32; ``changed`` in its config."""
    source = tiny_models.write(family, directory, size, **changed)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    spread(model)
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model


def spread(model: Any) -> None:
    """Values that matter for what Transformers begins with ones and zeros: norms, biases, corrections of routers."""
    generator = torch.Generator().manual_seed(1)
    for name, tensor in model.state_dict().items():
        if (tensor.dim() == 1 or name.endswith("bias")) and not name.endswith(("A_log", "dt_bias")):
            tensor.add_(torch.rand(tensor.shape, generator=generator), alpha=0.2)


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mixtral": {},
    "qwen2": {"use_sliding_window": False, "layer_types": ["full_attention"] * 4},
    "qwen2_moe": {},
    "qwen3": {},
    "qwen3_moe": {"norm_topk_prob": True, "head_dim": 32},
    "cohere": {"tie_word_embeddings": True},
    "falcon_mamba": {},
    "falcon_h1": {"mamba_chunk_size": 256, "mamba_norm_before_gate": False},
    "gemma": {"tie_word_embeddings": True},
    "gemma2": {"tie_word_embeddings": True},
    "gemma3": {"layer_types": ["sliding_attention"] * 4},
    "gemma3n": {
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 4,
        "tie_word_embeddings": True,
    },
    "gemma4": {"tie_word_embeddings": True, "final_logit_softcapping": 30.0, "enable_moe_block": True, **EXPERTS},
    "gpt_oss": {},
    "nemotron": {},
    "nemotron_h": {"chunk_size": 128},
    "phi3": {},
    "phi4_mini": {"sliding_window": None},
    "stablelm": {},
    "starcoder2": {},
    "afmoe": {
        "layer_types": [*["sliding_attention"] * 3, "full_attention"],
        "mup_enabled": True,
        "num_hidden_layers": 4,
        "route_scale": 2.5,
    },
    "apertus": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "arcee": {},
    "cohere2": {"tie_word_embeddings": True, "layer_types": [*["sliding_attention"] * 3, "full_attention"]},
    "deepseek_v2": {"rope_parameters": YARN, "q_lora_rank": None},
    "deepseek_v3": {"rope_parameters": YARN, "norm_topk_prob": True},
    "dots1": DOTS,
    "ernie4_5": {},
    "ernie4_5_moe": {},
    "exaone4": {"layer_types": [*["sliding_attention"] * 3, "full_attention"]},
    "exaone_moe": {"norm_topk_prob": True, "head_dim": 32},
    "glm4": {},
    "glm4_moe": {"routed_scaling_factor": 1.5, "use_qk_norm": True, "head_dim": 32},
    "glm_moe_dsa": GLM5,
    "granite": {},
    "granitemoe": {"attention_multiplier": 0.2, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    "granitemoehybrid": GRANITE | {"num_local_experts": 4},
    "granitemoeshared": {"attention_multiplier": 0.2, "embedding_multiplier": 3.0},
    "hunyuan_dense": {},
    "hunyuan_moe": {},
    "jamba": {},
    "kimi_linear": {"rms_norm_eps": 1e-6},
    "lfm2": {},
    "llama4": LLAMA4,
    "lfm2_moe": {"tie_word_embeddings": True},
    "mamba": {},
    "mamba2": {"chunk_size": 256},
    "mimo_v2_flash": MIMO,
    "minicpm3": MINICPM3,
    "minimax_m2": {},
    "mistral4": {"max_position_embeddings": 256},
    "ministral3": {"max_position_embeddings": 256, "rope_parameters": YARN},
    "olmo2": {},
    "olmo3": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "qwen3_5": {},
    "qwen3_5_moe": {},
    "qwen3_next": {"decoder_sparse_step": 1},
    "olmoe": {},
    "seed_oss": {},
    "smollm3": {},
}

GEMMA3N = {
    "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 12,
    "altup_num_inputs": 4,
    "hidden_size_per_layer_input": 256,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "laurel_rank": 64,
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 4 + ["sliding_attention", "full_attention"],
    "num_hidden_layers": 22,
    "tie_word_embeddings": True,
}
NEMOTRON = {
    "chunk_size": 128,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 64,
    "n_routed_experts": 4,
    "routed_scaling_factor": 1.5,
}
ALPHA = {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 1000.0, "factor": 1.0}
LING = {
    "gguf_arch": "bailingmoe2",
    "attention_bias": False,
    "n_group": 2,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "use_qk_norm": True,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon h1 with a norm": ("falcon_h1", {"mamba_norm_before_gate": False, "mamba_rms_norm": True}),
    "gemma 3n e2b": ("gemma3n", GEMMA3N),
    "glm 5.2": ("glm_moe_dsa", {**GLM5, "indexer_types": ["full", "full", "shared", "shared"]}),
    "granite 4 without experts": (
        "granitemoehybrid",
        GRANITE | {"num_local_experts": 0, "shared_intermediate_size": 128},
    ),
    "hunyuan with alpha": ("hunyuan_dense", {"rope_parameters": ALPHA}),
    "internlm 2": ("llama", {"gguf_arch": "internlm2"}),
    "ling 2": ("glm4_moe", LING),
    "llama with biases": ("llama", {"attention_bias": True}),
    "llama 4 maverick": ("llama4", LLAMA4 | {"num_local_experts": 128, "use_qk_norm": False}),
    "minicpm": ("granite", {"gguf_arch": "minicpm", "attention_multiplier": 0.25, "embedding_multiplier": 3.0}),
    "minicpm 3 with long rope": ("minicpm3", MINICPM3 | {"rope_parameters": LONG}),
    "qwen 2.5 vl": ("qwen2", FAMILIES["qwen2"] | {"gguf_arch": "qwen2vl"}),
    "qwen 3 vl": ("qwen3", {"gguf_arch": "qwen3vl"}),
    "qwen 3 vl with experts": ("qwen3_moe", FAMILIES["qwen3_moe"] | {"gguf_arch": "qwen3vlmoe"}),
    "mistral large 3": ("mistral4", {"gguf_arch": "deepseek2"}),
    "nemotron 3 nano": ("nemotron_h", NEMOTRON),
    "nemotron 3 super": ("nemotron_h", NEMOTRON | {"moe_latent_size": 32, "norm_topk_prob": False}),
}
"""Models of a family of which others are quite different: which family, and what is changed in its config."""


def made(name: str, directory: Path, size: Any = None) -> Any:
    """The model of `FAMILIES` or `VARIANTS`."""
    family, changed = VARIANTS.get(name) or (name, FAMILIES[name])
    return model_of(family, directory, size, **changed)


def vocabulary_of(text: str, pre: str) -> dict[str, Any]:
    """A tokenizer with every piece of ``text``, however long, as a token."""
    ((symbols, _),) = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    ends = itertools.combinations(range(len(symbols) + 1), 2)
    tokens = list(dict.fromkeys([*symbols, *(symbols[begin:end] for begin, end in ends)]))
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * len(tokens),
        "tokenizer.ggml.merges": [f"{token[:-1]} {token[-1]}" for token in tokens if len(token) > 1],
    }
