"""Tiny random models that vLLM's CPU build runs, one per family; and those that it refuses, with its reasons.

Head sizes, dtypes and options are what its CPU kernels take. Blocks are of 128 tokens, a page of Qwen3.5's states makes
them 384 there, and Gemma-4's sliding layers have 256: its groups differ in block size.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VOCAB = 512
_SIZES: Mapping[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "vocab_size": VOCAB,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,  # wide: greedy tokens vary, and flip when a byte of the KV cache does
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "decoder_sparse_step": 1}
_SLIDING = {
    "num_hidden_layers": 3,
    "sliding_window": 200,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}


def _linear(head_dim: int) -> dict[str, Any]:
    """Gated delta net; its CPU kernel knows head sizes of 64 and 128."""
    return {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": head_dim,
        "linear_value_head_dim": head_dim,
        "linear_conv_kernel_dim": 4,
    }


@dataclass(frozen=True)
class Family:
    """``fields``: of Transformers' config, ``None`` takes one away. ``options``: vLLM's, where the usual ones are
    wrong. ``recurrent``: it has states, which can be resumed only where one was kept. ``exact``: a prefill that is
    split elsewhere gives the same numbers, as it should.
    """

    model_type: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    options: Mapping[str, Any] = field(default_factory=dict)
    recurrent: bool = False
    exact: bool = True


FAMILIES: Mapping[str, Family] = {
    "llama": Family("llama"),
    "llama-bf16": Family("llama", dtype="bfloat16"),
    "qwen3": Family("qwen3"),
    "mixtral": Family("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": Family("qwen3_moe", _EXPERTS),
    "gemma3": Family("gemma3_text", {"query_pre_attn_scalar": 32, **_SLIDING}),
    "gemma4": Family(
        "gemma4_text",
        {
            "global_head_dim": 64,
            "num_global_key_value_heads": 1,
            "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 32,
            **_SLIDING,
        },
    ),
    "gpt_oss": Family(
        "gpt_oss",
        {
            "num_hidden_layers": 4,
            "head_dim": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "llama4": Family(
        "llama4_text",
        {
            "num_hidden_layers": 4,
            "intermediate_size_mlp": 256,
            "attention_chunk_size": 256,
            "no_rope_layer_interval": 2,
            "interleave_moe_layer_step": 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "attn_temperature_tuning": True,
            "floor_scale": 64,
            "attn_scale": 0.1,
        },
    ),
    "deepseek_v3": Family(
        "deepseek_v3",
        {
            "head_dim": None,
            "num_key_value_heads": 4,
            "q_lora_rank": 64,
            "kv_lora_rank": 512,  # with the rope part 576 values per token: the one size that its kernel has
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 64,
            "v_head_dim": 32,
            "moe_intermediate_size": 128,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "topk_method": "noaux_tc",
        },
        dtype="bfloat16",
        options={"compilation_config": {"custom_ops": ["all", "-rotary_embedding"]}},  # its CPU rope kernel is wrong
    ),
    "qwen3_next": Family(
        "qwen3_next",
        _linear(64) | _EXPERTS | {"shared_expert_intermediate_size": 128},
        dtype="bfloat16",
        recurrent=True,
    ),
    "qwen3_5": Family("qwen3_5_text", _linear(128), dtype="bfloat16", recurrent=True),
    "lfm2": Family(
        "lfm2",
        {
            "num_hidden_layers": 4,
            "layer_types": ["conv", "conv", "full_attention", "conv"],
            "conv_L_cache": 3,
            "conv_dim": 128,
            "conv_dim_out": 128,
            "block_dim": 128,
            "block_ff_dim": 256,
            "block_multiple_of": 32,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": False,
        },
        options={"max_num_seqs": 1},  # with more its convolutions mix up their states
        recurrent=True,
        exact=False,
    ),
}


@dataclass(frozen=True)
class Refused:
    """A part of one of ``reasons`` is what vLLM says, at the start or the first prompt; the processor decides which."""

    family: Family
    reasons: tuple[str, ...]


WITH_MODULE = Family("qwen2")
"""What `write_drafts` makes a MiMo of, which vLLM's CPU build runs with multi-token prediction."""

_MAMBA2 = {"n_groups": 2, "conv_kernel": 4, "chunk_size": 32}
_FALCON = {
    "mamba_d_ssm": 128,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 32,
}
_NO_SSD = "is out of bounds for dimension 0"  # the chunked scan has no CPU kernel and leaves its states out

REFUSED: Mapping[str, Refused] = {
    "nemotron_h": Refused(
        Family(
            "nemotron_h",
            {
                "num_hidden_layers": None,
                "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
                "mamba_num_heads": 4,
                "mamba_head_dim": 32,
                "ssm_state_size": 16,
                "use_mamba_kernels": False,
                **_MAMBA2,
            },
        ),
        (_NO_SSD,),
    ),
    "falcon_h1": Refused(Family("falcon_h1", _FALCON, dtype="bfloat16"), (_NO_SSD,)),
    "jamba": Refused(
        Family(
            "jamba",
            {
                "head_dim": None,
                "num_hidden_layers": 4,
                "attn_layer_period": 4,
                "attn_layer_offset": 2,
                "expert_layer_period": 2,
                "expert_layer_offset": 1,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "mamba_d_state": 16,
                "mamba_d_conv": 4,
                "mamba_expand": 2,
                "use_mamba_kernels": False,
            },
            dtype="bfloat16",
        ),
        ("no attribute 'selective_scan_fwd'", "Dimension out of range"),  # the latter with AVX-512
    ),
    "bamba": Refused(
        Family(
            "bamba",
            {
                "head_dim": None,
                "num_hidden_layers": 4,
                "attn_layer_indices": [2],
                "mamba_n_heads": 8,
                "mamba_d_head": 32,
                "mamba_n_groups": 1,
                "mamba_d_state": 16,
                "mamba_d_conv": 4,
                "mamba_chunk_size": 32,
            },
            dtype="bfloat16",
        ),
        ("vLLM has no other way to handle it",),
    ),
}


def write(family: Family, directory: Path, seed: int = 0) -> Path:
    """A random checkpoint in ``directory``. The same arguments give the same bytes."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from stowage.testing import tiny_models

    fields = {name: value for name, value in {**_SIZES, **family.fields}.items() if value is not None}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family.model_type, **fields))
        tiny_models.vary(model)
    model = model.to(getattr(torch, family.dtype))
    model.config.dtype = getattr(torch, family.dtype)
    model.save_pretrained(directory)
    return directory


def write_drafts(method: str, target: Path, directory: Path) -> dict[str, Any]:
    """vLLM's setting for drafts of ``target``: what can be random is (a seed of its own), a draft model is the target
    itself, which is always right, and a module for multi-token prediction becomes part of the target.
    """
    import torch
    from safetensors.torch import load_file, save_file

    generator = torch.Generator().manual_seed(7)
    config = json.loads((target / "config.json").read_text())
    width = config["hidden_size"]
    if method == "ngram":
        return {"method": method, "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 1}
    setting: dict[str, Any] = {"method": method, "num_speculative_tokens": 3, "model": str(directory)}
    if method == "draft_model":
        return {**setting, "model": str(target)}
    weights = load_file(target / "model.safetensors")
    if method == "mtp":
        _write_module(target, weights, config, generator)
        return {"method": method, "num_speculative_tokens": 3}
    fc = torch.randn(width, 2 * width, generator=generator) * 0.05
    first = "model.layers.0."
    layer = {name.removeprefix("model."): value.clone() for name, value in weights.items() if name.startswith(first)}
    del layer["layers.0.input_layernorm.weight"]
    directory.mkdir()
    save_file(layer | {"fc.weight": fc}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    return setting


def _write_module(target: Path, weights: dict[str, Any], config: dict[str, Any], generator: Any) -> None:
    """Make a Qwen2 a MiMo, which has a module for multi-token prediction: a layer of its own, here a copy of one, that
    reads the target's hidden states.
    """
    import torch
    from safetensors.torch import save_file

    width, first, module = config["hidden_size"], "model.layers.0.", "model.mtp_layers.0."
    ones = ("token_layernorm", "hidden_layernorm", "final_layernorm")
    more = {f"{module}{name}.weight": torch.ones(width) for name in ones}
    more[f"{module}input_proj.weight"] = torch.randn(width, 2 * width, generator=generator) * 0.05
    more |= {name.replace(first, module): value.clone() for name, value in weights.items() if name.startswith(first)}
    save_file(weights | more, target / "model.safetensors", {"format": "pt"})
    changed = {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (target / "config.json").write_text(json.dumps(config | changed))
