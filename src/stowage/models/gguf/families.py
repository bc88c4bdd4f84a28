"""Families that are read from GGUF files, and their config entries that are no plain copy of a GGUF field.

Owns the way from ``general.architecture`` to Transformers' type of model. What no field says of a family stands in
llama.cpp's code (https://github.com/ggml-org/llama.cpp, ``src/models``), or is seen from which tensors there are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from stowage.errors import CheckpointError
from stowage.models.gguf import gemma, hybrids, kimi, latents, mixtures, windows
from stowage.models.gguf.fields import lacks_size, layers_of, number, unsupported
from stowage.models.gguf.mixtures import sigmoid_routed
from stowage.weights.gguf import GgufFile

FAMILIES: Final[Mapping[str, str]] = {
    "afmoe": "afmoe",
    "apertus": "apertus",
    "arcee": "arcee",
    "bailingmoe2": "glm4_moe",
    "cohere2": "cohere2",
    "command-r": "cohere",
    "deepseek2": "deepseek_v3",
    "dots1": "dots1",
    "ernie4_5": "ernie4_5",
    "ernie4_5-moe": "ernie4_5_moe",
    "exaone-moe": "exaone_moe",
    "exaone4": "exaone4",
    "falcon-h1": "falcon_h1",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "glm-dsa": "glm_moe_dsa",
    "glm4": "glm4",
    "glm4moe": "glm4_moe",
    "gpt-oss": "gpt_oss",
    "granite": "granite",
    "granitehybrid": "granitemoehybrid",
    "granitemoe": "granitemoe",
    "hunyuan-dense": "hunyuan_v1_dense",
    "hunyuan-moe": "hunyuan_v1_moe",
    "internlm2": "llama",
    "jamba": "jamba",
    "kimi-linear": "kimi_linear",
    "lfm2": "lfm2",
    "lfm2moe": "lfm2_moe",
    "llama": "llama",
    "llama4": "llama4_text",
    "mamba": "mamba",
    "mamba2": "mamba2",
    "minicpm": "granite",
    "minicpm3": "minicpm3",
    "mimo2": "mimo_v2_flash",
    "minimax-m2": "minimax_m2",
    "mistral3": "ministral3",
    "mistral4": "mistral4",
    "nemotron": "nemotron",
    "nemotron_h": "nemotron_h",
    "nemotron_h_moe": "nemotron_h",
    "olmo2": "olmo2",
    "olmoe": "olmoe",
    "phi3": "phi3",
    "qwen2": "qwen2",
    "qwen2moe": "qwen2_moe",
    "qwen2vl": "qwen2",
    "qwen3": "qwen3",
    "qwen35": "qwen3_5_text",
    "qwen35moe": "qwen3_5_moe_text",
    "qwen3moe": "qwen3_moe",
    "qwen3next": "qwen3_next",
    "qwen3vl": "qwen3",
    "qwen3vlmoe": "qwen3_moe",
    "seed_oss": "seed_oss",
    "smollm3": "smollm3",
    "stablelm": "stablelm",
    "starcoder2": "starcoder2",
}
"""From ``general.architecture`` to the type of model in Transformers. Mistral's files call themselves llama. Three have
none of their own there, and compute what another does: Ling 2 as GLM-4.5, InternLM 2 as Llama, MiniCPM as Granite.
Of Qwen's models that see, text alone is rotated as in those that do not.
"""


def family_of(file: GgufFile) -> str | None:
    """Transformers' type of the model in ``file``; ``None`` for what is not read. Raises UnsupportedModelError."""
    family = FAMILIES.get(file.architecture)
    if family == "llama" and number(file, "expert_count"):
        return "mixtral"
    if family == "llama" and windows.is_first_mistral(file):
        return "mistral"
    if family == "granitemoe" and "blk.0.ffn_gate_shexp.weight" in file.tensors:
        return "granitemoeshared"
    if family == "mamba" and file.fields.get("mamba.ssm.dt_b_c_rms") is True:
        return "falcon_mamba"
    if family == "olmo2" and number(file, "attention.sliding_window"):
        return "olmo3"
    if family == "ministral3":
        if number(file, "expert_count"):
            what = "is a mixture of experts of the family mistral3"
            raise unsupported(file, f"{what}, of which models without experts are read from GGUF")
        return family if f"{file.architecture}.attention.temperature_scale" in file.fields else "mistral"
    if family != "deepseek_v3" or latents.scores_by_sigmoid(file):
        return family
    return "mistral4" if f"{file.architecture}.attention.temperature_scale" in file.fields else "deepseek_v2"


def entries_of(file: GgufFile, family: str, entries: Mapping[str, Any]) -> dict[str, Any]:
    """More entries of the config, and other values of ``entries``. Raises CheckpointError."""
    own = OWN.get(family)
    return own(file, entries) if own is not None else {}


def unused_in(file: GgufFile) -> tuple[str, ...]:
    """With what names of tensors begin that no text is computed from: layers that guess tokens ahead, and keys, values
    and indexers of layers that take those of others.
    """
    layers = layers_of(file)
    ahead = [f"blk.{layer}." for layer in range(layers, number(file, "block_count"))]
    sharing = range(max(0, layers - number(file, "attention.shared_kv_layers")), layers)
    ahead += [f"blk.{layer}.indexer." for layer in latents.unindexed(file)]
    return (*ahead, *(f"blk.{layer}.attn_{part}." for layer in sharing for part in ("k", "k_norm", "v")))


def _gated_delta(file: GgufFile, _: Mapping[str, Any]) -> dict[str, Any]:
    """Every so many layers one has attention, and the others a state."""
    every, values = number(file, "full_attention_interval") or 4, number(file, "ssm.time_step_rank")
    keys, sizes = number(file, "ssm.group_count"), number(file, "ssm.state_size")
    if not keys or not sizes or not values or values % keys or number(file, "ssm.inner_size") % values:
        raise lacks_size(file)
    kinds = ["linear_attention" if (layer + 1) % every else "full_attention" for layer in range(layers_of(file))]
    return {
        "layer_types": kinds,
        "linear_conv_kernel_dim": number(file, "ssm.conv_kernel"),
        "linear_key_head_dim": sizes,
        "linear_num_key_heads": keys,
        "linear_num_value_heads": values,
        "linear_value_head_dim": number(file, "ssm.inner_size") // values,
    }


def _glm4_moe(file: GgufFile, entries: Mapping[str, Any]) -> dict[str, Any]:
    return {**sigmoid_routed(file, entries), "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors}


def _lfm2(file: GgufFile, entries: Mapping[str, Any]) -> dict[str, Any]:
    """Layers without heads are convolutions."""
    heads = entries.get("num_key_value_heads")
    if not isinstance(heads, list) or not heads or not all(isinstance(count, int) for count in heads):
        raise CheckpointError(f"{file.paths[0]} does not say how many heads each layer has; download it again.")
    kinds = ["full_attention" if count else "conv" for count in heads]
    adjusts = {} if file.architecture == "lfm2moe" else {"block_auto_adjust_ff_dim": False}
    return {"layer_types": kinds, "num_key_value_heads": max(heads), **adjusts}


def _stablelm(file: GgufFile, _: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in file.tensors,
        "qk_layernorm": "blk.0.attn_q_norm.weight" in file.tensors,
    }


OWN: Final[Mapping[str, Callable[[GgufFile, Mapping[str, Any]], dict[str, Any]]]] = {
    "deepseek_v2": latents.deepseek_v2,
    "deepseek_v3": latents.deepseek,
    "afmoe": mixtures.afmoe,
    "dots1": sigmoid_routed,
    "ernie4_5_moe": mixtures.ernie_moe,
    "exaone4": windows.exaone4,
    "exaone_moe": mixtures.exaone_moe,
    "falcon_h1": hybrids.falcon_h1,
    "gemma2": gemma.gemma,
    "gemma3_text": gemma.gemma,
    "gemma3n_text": gemma.gemma3n,
    "gemma4_text": gemma.gemma4,
    "glm4_moe": _glm4_moe,
    "glm_moe_dsa": latents.glm_dsa,
    "gpt_oss": windows.every_layer,
    "granite": hybrids.granite,
    "granitemoe": hybrids.granite_moe,
    "granitemoehybrid": hybrids.granite_hybrid,
    "granitemoeshared": hybrids.granite_moe,
    "hunyuan_v1_moe": mixtures.hunyuan_moe,
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2,
    "llama4_text": mixtures.llama4,
    "cohere": windows.cohere,
    "cohere2": windows.every_layer,
    "falcon_mamba": hybrids.mamba,
    "jamba": hybrids.jamba,
    "kimi_linear": kimi.kimi_linear,
    "mamba": hybrids.mamba,
    "mamba2": hybrids.mamba2,
    "mimo_v2_flash": mixtures.mimo2,
    "minicpm3": latents.minicpm3,
    "mistral": windows.mistral,
    "mistral4": latents.mistral4,
    "nemotron_h": hybrids.nemotron_h,
    "olmo3": windows.every_layer,
    "qwen3_5_moe_text": _gated_delta,
    "qwen3_5_text": _gated_delta,
    "qwen3_next": _gated_delta,
    "stablelm": _stablelm,
    "starcoder2": windows.starcoder2,
}
"""What files say of single families otherwise than a field for a field, by Transformers' type of model."""
