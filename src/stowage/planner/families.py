"""Which families are known from a config alone, and how the layers of each differ from Llama's: a table.

Owns the table and nothing else. Every row is held, layer by layer, against the model that Transformers builds of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from stowage.planner.model_config import Fields
from stowage.planner.parts import linear, mlp

Switch = str | bool
"""A field of the config, or what the family always does."""


@dataclass(frozen=True, slots=True)
class Experts:
    """Which layers have experts, and how wide they are. ``where``: the rule of the family.

    ``inner``: the field with an expert's width. ``shared``: parameters of the experts that every token uses.
    """

    where: Callable[[Fields, int], bool] = lambda fields, index: True
    inner: str = "moe_intermediate_size"
    bias: bool = False
    gated: bool = True
    router_bias: bool = False
    shared: Callable[[Fields], int] = lambda fields: 0


@dataclass(frozen=True, slots=True)
class Family:
    """How a family differs from Llama. ``every``: each so many-th layer sees everything, the others a window; 0: all
    layers are alike. ``switch``: the field without which a window in the config does not count. ``ends``: parameters
    besides embedding and head, above the final norm.
    """

    norms: int = 2
    norm_bias: bool = False
    gated: bool = True
    bias: Switch = "attention_bias"
    out_bias: Switch = "attention_bias"
    mlp_bias: Switch = "mlp_bias"
    head_bias: bool = False
    norm: str | Callable[[Fields], str] = ""
    sinks: bool = False
    every: int = 0
    switch: str = ""
    experts: Experts | None = None
    mixer: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)


def _from_first(fields: Fields, index: int) -> bool:
    return index >= fields.number("first_k_dense_replace", 0)


def _every_step(fields: Fields, index: int) -> bool:
    dense = fields.get("mlp_only_layers") or []
    return index not in dense and (index + 1) % fields.number("decoder_sparse_step", 1) == 0


def _llama4(fields: Fields, index: int) -> bool:
    step = fields.number("interleave_moe_layer_step", 1)
    stated = fields.get("moe_layers")
    return index in stated if stated is not None else (index + 1) % step == 0


def _after_dense(fields: Fields, index: int) -> bool:
    return index >= fields.number("num_dense_layers", 2)


def _shared_deepseek(fields: Fields) -> int:
    return mlp(fields.number("hidden_size"), fields.number("moe_intermediate_size") * fields.number("n_shared_experts"))


def _shared_qwen(fields: Fields) -> int:
    """With the gate that weighs it."""
    hidden = fields.number("hidden_size")
    return mlp(hidden, fields.number("shared_expert_intermediate_size")) + linear(hidden, 1)


def _shared_llama4(fields: Fields) -> int:
    return mlp(fields.number("hidden_size"), fields.number("intermediate_size"))


def _shared_granite(fields: Fields) -> int:
    return mlp(fields.number("hidden_size"), fields.number("shared_intermediate_size", 0))


def _phi_norm(fields: Fields) -> str:
    return "head" if fields.flag("qk_layernorm") else ""


def _qk_norm(kind: str) -> Callable[[Fields], str]:
    return lambda fields: kind if fields.flag("use_qk_norm") else ""


_TIED = {"tie_word_embeddings": True}
_GEMMA = {"head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 4, **_TIED}
_DEEPSEEK = Experts(where=_from_first, shared=_shared_deepseek)
_QWEN_SHARED = Experts(where=_every_step, shared=_shared_qwen)
_GRANITE = Experts(inner="intermediate_size", shared=_shared_granite)
_DELTA = {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "head_dim": 256}
_LLAMA = Family()
_GPT2 = Family(norm_bias=True, gated=False, bias=True, out_bias=True, mlp_bias=True, defaults=_TIED)

FAMILIES: Mapping[str, Family] = {
    "llama": _LLAMA,
    "granite": _LLAMA,
    "helium": _LLAMA,
    "mistral": Family(defaults={"sliding_window": 4096}),
    "ministral": _LLAMA,
    "ministral3": _LLAMA,
    "smollm3": Family(switch="use_sliding_window", defaults=_TIED),
    "qwen2": Family(bias=True, out_bias=False, switch="use_sliding_window"),
    "qwen3": Family(norm="head", switch="use_sliding_window"),
    "qwen2_moe": Family(
        bias="qkv_bias",
        out_bias=False,
        switch="use_sliding_window",
        experts=_QWEN_SHARED,
        defaults={"qkv_bias": True},
    ),
    "qwen3_moe": Family(norm="head", switch="use_sliding_window", experts=Experts(where=_every_step)),
    "qwen3_next": Family(norm="head", mixer="delta", experts=_QWEN_SHARED, defaults=_DELTA),
    "qwen3_5_text": Family(norm="head", mixer="delta", defaults=_DELTA),
    "qwen3_5_moe_text": Family(norm="head", mixer="delta", experts=_QWEN_SHARED, defaults=_DELTA),
    "gemma": Family(defaults={"head_dim": 256, **_TIED}),
    "gemma2": Family(norms=4, every=2, defaults=_GEMMA | {"sliding_window": 4096}),
    "gemma3_text": Family(
        norms=4, norm="head", every=6, defaults=_GEMMA | {"sliding_window": 4096, "vocab_size": 262208}
    ),
    "gemma4_text": Family(
        norms=4,
        norm="head",
        every=6,
        defaults=_GEMMA
        | {
            "sliding_window": 512,
            "vocab_size": 262144,
            "hidden_size_per_layer_input": 256,
            "vocab_size_per_layer_input": 262144,
        },
    ),
    "phi": Family(
        norms=1, norm_bias=True, gated=False, bias=True, out_bias=True, mlp_bias=True, head_bias=True, norm=_phi_norm
    ),
    "phi3": Family(bias=False, out_bias=False),
    "olmo": Family(norms=0),
    "olmo2": Family(norm="row"),
    "olmo3": Family(norm="row", every=4, defaults={"sliding_window": 4096}),
    "olmoe": Family(norm="row", experts=Experts(inner="intermediate_size")),
    "cohere": Family(norms=1, norm=_qk_norm("each"), defaults=_TIED),
    "cohere2": Family(norms=1, every=4, defaults=_TIED | {"sliding_window": 4096}),
    "nemotron": Family(norm_bias=True, gated=False),
    "starcoder2": Family(
        norm_bias=True,
        gated=False,
        bias="use_bias",
        out_bias="use_bias",
        mlp_bias="use_bias",
        defaults=_TIED | {"use_bias": True},
    ),
    "gpt2": _GPT2,
    "gpt_bigcode": Family(
        norm_bias=True, gated=False, bias=True, out_bias=True, mlp_bias=True, defaults=_TIED | {"multi_query": True}
    ),
    "seed_oss": Family(out_bias="attention_out_bias", defaults={"attention_bias": True, "head_dim": 128}),
    "arcee": Family(gated=False),
    "apertus": Family(gated=False, norm="head"),
    "glm": Family(out_bias=False, defaults={"attention_bias": True, "head_dim": 128}),
    "glm4": Family(norms=4, out_bias=False, defaults={"attention_bias": True, "head_dim": 128}),
    "glm4_moe": Family(out_bias=False, norm=_qk_norm("head"), experts=_DEEPSEEK, defaults={"first_k_dense_replace": 1}),
    "ernie4_5": Family(bias="use_bias", out_bias="use_bias", mlp_bias="use_bias", defaults=_TIED | {"head_dim": 128}),
    "hunyuan_v1_dense": Family(norm="head"),
    "exaone4": Family(norm="head", every=4, defaults={"sliding_window": 4096}),
    "mixtral": Family(experts=Experts(inner="intermediate_size")),
    "minimax_m2": Family(norm="row", experts=Experts(inner="intermediate_size"), defaults={"head_dim": 128}),
    "granitemoe": Family(experts=Experts(inner="intermediate_size")),
    "granitemoeshared": Family(experts=_GRANITE),
    "gpt_oss": Family(
        sinks=True,
        every=2,
        experts=Experts(inner="intermediate_size", bias=True, router_bias=True),
        defaults={"attention_bias": True, "head_dim": 64, "sliding_window": 128, "num_experts_per_tok": 4},
    ),
    "llama4_text": Family(
        experts=Experts(where=_llama4, inner="intermediate_size", shared=_shared_llama4),
        defaults={"head_dim": 128, "attention_chunk_size": 8192},
    ),
    "deepseek_v2": Family(experts=_DEEPSEEK, defaults={"n_shared_experts": 2}),
    "deepseek_v3": Family(experts=_DEEPSEEK, defaults={"first_k_dense_replace": 3, "n_shared_experts": 1}),
    "nemotron_h": Family(
        norms=1,
        defaults={
            "use_conv_bias": True,
            "conv_kernel": 4,
            "n_groups": 8,
            "mamba_head_dim": 64,
            "num_experts_per_tok": 2,
        },
    ),
    "bamba": Family(mixer="space", defaults={"mamba_conv_bias": True}),
    "falcon_h1": Family(mixer="beside", defaults={"mamba_conv_bias": True}),
    "granitemoehybrid": Family(
        mixer="space", experts=_GRANITE, defaults={"mamba_conv_bias": True, "shared_intermediate_size": 1024}
    ),
    "lfm2": Family(
        norm="head",
        mixer="conv",
        defaults=_TIED | {"block_auto_adjust_ff_dim": True, "block_multiple_of": 256, "conv_L_cache": 3},
    ),
    "lfm2_moe": Family(
        norm="head", mixer="conv", experts=Experts(where=_after_dense), defaults=_TIED | {"conv_L_cache": 3}
    ),
}
"""By ``model_type`` of the config."""
