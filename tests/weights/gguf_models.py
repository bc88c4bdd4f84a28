"""The tiny models that GGUF files are written from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from stowage.testing import tiny_models

SIZE = tiny_models.TinySize(hidden=256, layers=2)


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


GRANITE = {
    "mamba_chunk_size": 256,
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
    "tie_word_embeddings": True,
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
    "qwen3_moe": {"norm_topk_prob": True},
    "gemma2": {"tie_word_embeddings": True},
    "gemma3": {"layer_types": ["sliding_attention"] * 4},
    "gemma4": {"tie_word_embeddings": True, "final_logit_softcapping": 30.0, "enable_moe_block": True, **EXPERTS},
    "gpt_oss": {},
    "nemotron": {},
    "nemotron_h": {"chunk_size": 128},
    "phi3": {},
    "phi4_mini": {"sliding_window": None},
    "stablelm": {},
    "starcoder2": {},
    "arcee": {},
    "cohere2": {"tie_word_embeddings": True, "layer_types": [*["sliding_attention"] * 3, "full_attention"]},
    "deepseek_v2": {"rope_parameters": YARN, "q_lora_rank": None},
    "deepseek_v3": {"rope_parameters": YARN, "norm_topk_prob": True},
    "ernie4_5": {},
    "exaone4": {"layer_types": [*["sliding_attention"] * 3, "full_attention"]},
    "glm4": {},
    "glm4_moe": {"routed_scaling_factor": 1.5, "use_qk_norm": True},
    "granite": {},
    "granitemoe": {"attention_multiplier": 0.2, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    "granitemoehybrid": GRANITE | {"num_local_experts": 4},
    "granitemoeshared": {"attention_multiplier": 0.2, "embedding_multiplier": 3.0},
    "lfm2": {},
    "lfm2_moe": {"tie_word_embeddings": True},
    "minimax_m2": {},
    "ministral3": {"max_position_embeddings": 256, "rope_parameters": YARN},
    "olmo2": {},
    "qwen3_5": {},
    "qwen3_5_moe": {},
    "qwen3_next": {"decoder_sparse_step": 1},
    "olmoe": {},
    "seed_oss": {},
    "smollm3": {},
}

NEMOTRON = {
    "chunk_size": 128,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 64,
    "n_routed_experts": 4,
    "routed_scaling_factor": 1.5,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "granite 4 without experts": (
        "granitemoehybrid",
        GRANITE | {"num_local_experts": 0, "shared_intermediate_size": 128},
    ),
    "nemotron 3 nano": ("nemotron_h", NEMOTRON),
    "nemotron 3 super": ("nemotron_h", NEMOTRON | {"moe_latent_size": 32, "norm_topk_prob": False}),
}
"""Models of a family of which others are quite different: which family, and what is changed in its config."""


def made(name: str, directory: Path, size: Any = None) -> Any:
    """The model of `FAMILIES` or `VARIANTS`."""
    family, changed = VARIANTS.get(name) or (name, FAMILIES[name])
    return model_of(family, directory, size, **changed)
