"""Tiny GGUF files, written with the ``gguf`` package from Transformers' models: what converters do, the other way."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

from stowage.weights.quantized.blocks import joined
from stowage.weights.quantized.stacks import has_transposed_experts
from tests.block_formats import q1_0, scale
from tests.weights import gguf_gemma, gguf_hybrids, gguf_kimi, gguf_layouts, gguf_mixtures

_RENAMED: Mapping[str, str] = {
    "cohere": "command-r",
    "falcon_h1": "falcon-h1",
    "falcon_mamba": "mamba",
    "gemma3_text": "gemma3",
    "gemma3n_text": "gemma3n",
    "gemma4_text": "gemma4",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "ernie4_5_moe": "ernie4_5-moe",
    "exaone_moe": "exaone-moe",
    "glm4_moe": "glm4moe",
    "glm_moe_dsa": "glm-dsa",
    "gpt_oss": "gpt-oss",
    "granitemoehybrid": "granitehybrid",
    "granitemoeshared": "granitemoe",
    "hunyuan_v1_dense": "hunyuan-dense",
    "hunyuan_v1_moe": "hunyuan-moe",
    "kimi_linear": "kimi-linear",
    "llama4_text": "llama4",
    "lfm2_moe": "lfm2moe",
    "mimo_v2_flash": "mimo2",
    "minimax_m2": "minimax-m2",
    "ministral3": "mistral3",
    "olmo3": "olmo2",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_5_text": "qwen35",
    "qwen3_moe": "qwen3moe",
    "qwen3_next": "qwen3next",
}
"""Families whose files have another name than Transformers' type."""
_INTERLEAVED = (
    "arcee",
    "granite",
    "granitemoe",
    "internlm2",
    "llama",
    "minicpm",
    "mistral3",
    "smollm3",
    *gguf_hybrids.INTERLEAVED,
)
_NORMS_FROM_1 = ("gemma", "gemma2", "gemma3", "nemotron")
_PACKED = (Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.MXFP4)
_OF_SIGNS = (Kind.TQ1_0, Kind.TQ2_0, Kind.Q1_0)
_MORE = (
    ("attention.key_length", "head_dim"),
    ("attention.value_length", "head_dim"),
    ("expert_count", "num_experts"),
    ("expert_count", "n_routed_experts"),
    ("expert_used_count", "num_experts_per_tok"),
    ("expert_feed_forward_length", "moe_intermediate_size"),
    ("expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
    ("attn_logit_softcapping", "attn_logit_softcapping"),
    ("final_logit_softcapping", "final_logit_softcapping"),
    ("attention.sliding_window", "sliding_window"),
    ("attention.layer_norm_epsilon", "layer_norm_eps"),
    ("attention.layer_norm_epsilon", "norm_eps"),
    ("attention.layer_norm_rms_epsilon", "norm_eps"),
    ("attention.scale", "attention_multiplier"),
    ("embedding_scale", "embedding_multiplier"),
    ("residual_scale", "residual_multiplier"),
    ("logit_scale", "logits_scaling"),
    ("logit_scale", "logit_scale"),
    ("expert_shared_count", "n_shared_experts"),
    ("expert_group_count", "n_group"),
    ("expert_group_used_count", "topk_group"),
    ("expert_weights_scale", "routed_scaling_factor"),
    ("leading_dense_block_count", "first_k_dense_replace"),
    ("leading_dense_block_count", "num_dense_layers"),
    ("shortconv.l_cache", "conv_L_cache"),
)


def quantised(values: np.ndarray, kind: Kind) -> np.ndarray:
    """The bytes of ``values``; of the kinds that ``gguf`` does not pack, random ones with sane scales."""
    if kind in _PACKED:
        return gguf.quants.quantize(np.ascontiguousarray(values, np.float32), kind)
    each, nbytes = gguf.GGML_QUANT_SIZES[kind]
    shape = (*values.shape[:-1], values.shape[-1] // each * nbytes)
    raw = np.random.default_rng(values.size).integers(0, 256, shape, np.uint8)
    blocks = torch.from_numpy(raw.reshape(-1, nbytes))
    scale(kind.name.lower(), blocks, 1e-2 if kind in _OF_SIGNS else 2e-4)
    return raw


def interleaved(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows as llama.cpp rotates them."""
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def write(
    model: Any,
    path: Path,
    kind: Callable[[str], Kind] | Kind = Kind.F32,
    tokens: Mapping[str, Any] | None = None,
    more: Sequence[tuple[str, np.ndarray]] = (),
    without: Sequence[str] = (),
    **settings: Any,
) -> Path:
    """``model``'s weights in one file, matrices as ``kind`` says (of a tensor's name). ``settings``: of the writer;
    ``tokens``: more fields, ``None`` for those that are left out; ``more``: tensors; ``without``: others.
    """
    arch = arch_of(model.config)
    own = dict(tokens or {})
    writer = gguf.GGUFWriter(path, own.pop("general.architecture", arch), **settings)
    for key, value in {**fields(model.config, arch), **_activations(model, arch), **own}.items():
        if value is not None:
            add(writer, key, value)
    for name, values in [*tensors(model, arch), *more]:
        if name in without:
            continue
        chosen = kind if isinstance(kind, Kind) else kind(name)
        if values.shape[-1] % gguf.GGML_QUANT_SIZES[chosen][0]:
            chosen = Kind.F32 if values.shape[-1] % 32 else Kind.Q8_0
        if values.ndim == 1 or "inp" in name or "norm" in name or name.endswith("bias") or chosen is Kind.F32:
            writer.add_tensor(name, np.ascontiguousarray(values, np.float32))
        else:
            writer.add_tensor(name, quantised(values, chosen), raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add(writer: Any, key: str, value: Any) -> None:
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    kinds[list] = writer.add_array
    kinds[type(value)](key, value)


def fields(config: Any, arch: str) -> dict[str, Any]:
    """What Transformers' table says of ``config``, the other way round."""
    table = GGUF_CONFIG_MAPPING.get(config.model_type.removesuffix("_text"), GGUF_CONFIG_MAPPING["llama"])
    found: dict[str, Any] = {}
    if arch == "gemma4":  # whose layers differ
        config = copy.deepcopy(config)
        config.allow_global_per_layer_attribute_access = True
    for key, name in [*_MORE, *table.items()]:
        value = getattr(config, name, None) if name else None
        if isinstance(value, int | float) and not isinstance(value, bool):
            found[f"{arch}.{key}"] = value
    found |= _latents(config, arch) if arch in gguf_layouts.LATENTS else {}
    found |= _delta(config, arch) if arch in gguf_layouts.DELTA else {}
    found |= gguf_gemma.fields(config, arch) | gguf_hybrids.fields(config, arch) | gguf_kimi.fields(config, arch)
    if f"{arch}.expert_count" in found and gguf_hybrids.is_dense(config):
        found = {key: value for key, value in found.items() if ".expert_" not in key or ".expert_shared" in key}
    if config.model_type in ("gpt_oss", "minimax_m2"):
        found[f"{arch}.expert_feed_forward_length"] = config.intermediate_size
    if getattr(config, "norm_topk_prob", None) is not None and arch in gguf_layouts.LATENTS:
        found[f"{arch}.expert_weights_norm"] = config.norm_topk_prob
    found |= gguf_mixtures.fields(config, arch)
    if config.model_type == "ministral3":
        found[f"{arch}.attention.temperature_scale"] = config.rope_parameters["llama_4_scaling_beta"]
        found[f"{arch}.rope.scaling.yarn_log_multiplier"] = config.rope_parameters["mscale_all_dim"]
        found[f"{arch}.rope.scaling.yarn_beta_fast"] = config.rope_parameters["beta_fast"]
        found[f"{arch}.rope.scaling.yarn_beta_slow"] = config.rope_parameters["beta_slow"]
    if config.model_type == "mistral4":
        found[f"{arch}.attention.temperature_scale"] = config.rope_parameters["llama_4_scaling_beta"]
        found[f"{arch}.attention.temperature_length"] = config.rope_parameters["original_max_position_embeddings"]
    if config.model_type in ("lfm2", "lfm2_moe"):
        heads = [config.num_key_value_heads * (kind == "full_attention") for kind in config.layer_types]
        found[f"{arch}.attention.head_count_kv"] = heads
    if config.model_type == "lfm2":
        found[f"{arch}.feed_forward_length"] = -(-int(2 * config.intermediate_size / 3) // 256) * 256
    if config.model_type == "mixtral":
        found[f"{arch}.expert_count"] = config.num_local_experts
    if getattr(config, "rope_parameters", None) is None:
        return found
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    found[f"{arch}.rope.freq_base"] = float(rope["rope_theta"])
    if rope.get("alpha"):  # as many models have it, and as transformers says it of Hunyuan
        found[f"{arch}.rope.freq_base"] *= rope["alpha"] ** (config.head_dim / (config.head_dim - 2))
    if rope.get("rope_type") == "longrope":
        first = rope["original_max_position_embeddings"]
        found[f"{arch}.rope.scaling.original_context_length"] = first
        factor = math.sqrt(1 + math.log(config.max_position_embeddings / first) / math.log(first))
        found[f"{arch}.rope.scaling.attn_factor"] = factor
    if arch == "phi3" and config.sliding_window is None:
        found[f"{arch}.attention.sliding_window"] = 0
    if rope.get("rope_type") == "yarn":
        found[f"{arch}.rope.scaling.type"], found[f"{arch}.rope.scaling.factor"] = "yarn", float(rope["factor"])
        found[f"{arch}.rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if arch == "gemma4":
        return {**found, f"{arch}.rope.dimension_count": found[f"{arch}.attention.key_length"]}
    rotated = getattr(config, "qk_rope_head_dim", None) or int(size * rope.get("partial_rotary_factor", 1.0))
    return {**found, f"{arch}.rope.dimension_count": rotated}


def _activations(model: Any, arch: str) -> dict[str, Any]:
    """Numbers of each layer's xIELU."""
    if arch != "apertus":
        return {}
    each = [layer.mlp.act_fn for layer in model.model.layers]
    names = ("alpha_n", "alpha_p", "beta", "eps")
    return {f"xielu.{name}": [getattr(one, name).float().item() for one in each] for name in names}


def _latents(config: Any, arch: str) -> dict[str, Any]:
    """Of DeepSeek: one head of keys that all others share, and beside it what heads are made of."""
    sizes = gguf_kimi.latents(config) | {
        "attention.head_count_kv": 1,
        "expert_gating_func": 1 if config.model_type in ("deepseek_v2", "mistral4") else 2,
    }
    if config.q_lora_rank:
        sizes["attention.q_lora_rank"] = config.q_lora_rank
    if config.rope_parameters["rope_type"] == "yarn":
        sizes["rope.scaling.yarn_log_multiplier"] = 0.1 * config.rope_parameters["mscale_all_dim"]
    return {f"{arch}.{key}": value for key, value in sizes.items()}


def _delta(config: Any, arch: str) -> dict[str, Any]:
    sizes = {
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
        "full_attention_interval": config.layer_types.index("full_attention") + 1,
        "rope.dimension_sections": [2, 1, 1, 0],
    }
    return {f"{arch}.{key}": value for key, value in sizes.items()}


def tensors(model: Any, arch: str) -> list[tuple[str, np.ndarray]]:
    """Their names and values in a file."""
    config = model.config
    names = _names(config)
    heads = heads_of(config)
    found = [
        (f"rope_factors_{name}.weight", np.array(config.rope_parameters[f"{name}_factor"]))
        for name in ("short", "long")
        if f"{name}_factor" in (getattr(config, "rope_parameters", None) or {})
    ]
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    if arch == "gemma4":
        rotated = model.model.rotary_emb.full_attention_inv_freq.numpy() != 0
        found.append(("rope_freqs.weight", np.where(rotated, 1, 1e30)))
    for path, tensor in model.state_dict().items():
        if path in tied or ".act_fn." in path:  # numbers of activations are fields
            continue
        values = tensor.detach().float().numpy()
        if (relaid := gguf_layouts.written(config, arch, path, values)) is not None:
            found += relaid
            continue
        if ".experts." in path and arch != "gemma4":
            found += _experts(path, values, model.get_submodule(path.rpartition(".")[0]))
            continue
        base, _, last = _named(arch, path).rpartition(".")
        whole = names.get_name(_named(arch, path))
        name = f"{whole}.weight" if whole else f"{names.get_name(base)}.{last}"
        part = name.split(".")[-2]
        if part in heads:
            values = interleaved(values, heads[part])
        values = values + _begin(arch, path)
        alone = 0 if part == "ffn_gate_inp_shexp" else 1 if values.ndim == 3 and values.shape[1] == 1 else None
        found.append((name, values if alone is None else values.squeeze(alone)))
    return gguf_gemma.stacked(config, arch, gguf_mixtures.merged(config, arch, found))


def _begin(arch: str, path: str) -> int:
    """What is added to a norm's weights when a file is written."""
    delta = arch in gguf_layouts.DELTA and not path.endswith("linear_attn.norm.weight")
    return int(path.endswith("norm.weight") and (delta or arch in _NORMS_FROM_1))


def _named(arch: str, path: str) -> str:
    """A router's correction is no module of Transformers', and is one here."""
    path = gguf_hybrids.named(arch, path)
    for own in ("e_score_correction", "expert_bias"):
        if path.endswith(own.removesuffix("_bias") + "_bias"):
            return f"{path.rpartition('.')[0]}.{own}.bias"
    return path


def _experts(path: str, values: np.ndarray, module: Any) -> list[tuple[str, np.ndarray]]:
    """Outputs first, and gates apart from what they gate."""
    layer, own = path.split(".")[2], path.rpartition(".")[2]
    last = "bias" if own.endswith("bias") else "weight"
    if last == "weight" and has_transposed_experts(module):
        values = values.swapaxes(1, 2)
    if "gate_up" not in own:
        return [(f"blk.{layer}.ffn_{own.partition('_')[0]}_exps.{last}", values)]
    halves = (
        np.split(values, 2, axis=1) if getattr(module, "is_concatenated", True) else [values[:, ::2], values[:, 1::2]]
    )
    return [(f"blk.{layer}.ffn_{part}_exps.{last}", half) for part, half in zip(("gate", "up"), halves, strict=True)]


def _names(config: Any) -> Any:
    number = next(n for n, name in gguf.MODEL_ARCH_NAMES.items() if name == arch_of(config))
    return gguf.get_tensor_name_map(number, config.num_hidden_layers)


def arch_of(config: Any) -> str:
    """What a file calls the family; ``gguf_arch`` in a config: another one that computes the same."""
    if getattr(config, "gguf_arch", None):
        return str(config.gguf_arch)
    if config.model_type == "nemotron_h" and "moe" in config.layer_types:
        return "nemotron_h_moe"
    return _RENAMED.get(config.model_type, config.model_type)


def heads_of(config: Any) -> dict[str, int]:
    if arch_of(config) not in _INTERLEAVED:
        return {}
    return {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}


def apart(values: torch.Tensor, heads: int) -> torch.Tensor:
    """What ``interleaved`` did, undone."""
    return values.view(heads, values.shape[0] // heads // 2, 2, *values.shape[1:]).transpose(1, 2).reshape(values.shape)


def state_of(path: Path, plain: Any) -> dict[str, torch.Tensor]:
    """The values in a file, as the ``gguf`` package says, under the names and in the types of ``plain``."""
    config, state = plain.config, {}
    names, arch = _names(config), arch_of(config)
    values = gguf_mixtures.parted(config, arch, dequantised(path))
    for own, tensor in plain.state_dict().items():
        name = "model.embed_tokens.weight" if config.tie_word_embeddings and own == "lm_head.weight" else own
        relaid = gguf_layouts.read(config, arch, name, tensor.shape, values)
        if ".act_fn." in name:
            found = tensor
        elif relaid is not None:
            found = relaid
        elif ".experts." in name and arch != "gemma4":
            found = _expert_values(name, values, plain.get_submodule(name.rpartition(".")[0]))
        else:
            base, _, last = _named(arch, name).rpartition(".")
            whole = names.get_name(_named(arch, name))
            found = values[f"{whole}.weight" if whole else f"{names.get_name(base)}.{last}"]
            heads = heads_of(config).get(str(names.get_name(base)).rpartition(".")[2])
            found = (apart(found, heads) if heads else found) - _begin(arch, name)
        state[own] = found.reshape(tensor.shape).to(tensor.dtype)
    return state


def _expert_values(path: str, values: Mapping[str, torch.Tensor], module: Any) -> torch.Tensor:
    """What ``_experts`` took apart."""
    layer, own = path.split(".")[2], path.rpartition(".")[2]
    last = "bias" if own.endswith("bias") else "weight"
    parts = ("gate", "up") if "gate_up" in own else (own.partition("_")[0],)
    found = [values[f"blk.{layer}.ffn_{part}_exps.{last}"] for part in parts]
    whole = joined(found, 1, not getattr(module, "is_concatenated", True) and len(found) > 1)
    return whole.transpose(1, 2) if last == "weight" and has_transposed_experts(module) else whole


def dequantised(path: Path) -> dict[str, torch.Tensor]:
    """The values in a file, by name, as the ``gguf`` package says."""
    found = {}
    for tensor in gguf.GGUFReader(path).tensors:
        raw, kind = np.array(tensor.data), tensor.tensor_type
        values = q1_0(raw) if kind is Kind.Q1_0 else gguf.quants.dequantize(raw, kind)
        found[tensor.name] = torch.from_numpy(np.ascontiguousarray(values, np.float32))
    return found
