"""Tiny GGUF files, written with the ``gguf`` package from Transformers' models: what converters do, the other way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

from stowage.weights.quantized.blocks import joined

_RENAMED: Mapping[str, str] = {
    "gemma3_text": "gemma3",
    "gpt_oss": "gpt-oss",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
}
"""Families whose files have another name than Transformers' type."""
_INTERLEAVED = ("arcee", "granite", "llama", "smollm3")
_NORMS_FROM_1 = ("gemma2", "gemma3", "nemotron")
_K_BYTES = {Kind.Q4_K: 144, Kind.Q5_K: 176, Kind.Q6_K: 210}
_MORE = (
    ("attention.key_length", "head_dim"),
    ("expert_count", "num_experts"),
    ("expert_used_count", "num_experts_per_tok"),
    ("expert_feed_forward_length", "moe_intermediate_size"),
    ("expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
    ("attn_logit_softcapping", "attn_logit_softcapping"),
    ("final_logit_softcapping", "final_logit_softcapping"),
    ("attention.sliding_window", "sliding_window"),
    ("attention.layer_norm_epsilon", "layer_norm_eps"),
    ("attention.layer_norm_rms_epsilon", "norm_eps"),
    ("attention.scale", "attention_multiplier"),
    ("embedding_scale", "embedding_multiplier"),
    ("residual_scale", "residual_multiplier"),
    ("logit_scale", "logits_scaling"),
    ("logit_scale", "logit_scale"),
)


def quantised(values: np.ndarray, kind: Kind) -> np.ndarray:
    """The bytes of ``values``; of the kinds that ``gguf`` does not pack, random ones with sane scales."""
    if kind is Kind.TQ2_0:
        return np.zeros((*values.shape[:-1], values.shape[-1] // 256 * 66), np.uint8)
    if kind not in _K_BYTES:
        return gguf.quants.quantize(np.ascontiguousarray(values, np.float32), kind)
    blocks = values.shape[-1] // 256
    raw = np.random.default_rng(values.size).integers(0, 256, (*values.shape[:-1], blocks, _K_BYTES[kind]), np.uint8)
    scale = np.array([2e-4], np.float16).view(np.uint8)
    if kind is Kind.Q6_K:
        raw[..., 208:210] = scale
    else:
        raw[..., 0:2] = raw[..., 2:4] = scale
    return raw.reshape(*values.shape[:-1], -1)


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
    ``tokens``: more fields; ``more``: tensors; ``without``: others.
    """
    arch = arch_of(model.config)
    own = dict(tokens or {})
    writer = gguf.GGUFWriter(path, own.pop("general.architecture", arch), **settings)
    for key, value in {**fields(model.config, arch), **own}.items():
        add(writer, key, value)
    for name, values in [*tensors(model, arch), *more]:
        if name in without:
            continue
        chosen = kind if isinstance(kind, Kind) else kind(name)
        if values.ndim == 1 or "inp" in name or name.endswith("bias") or chosen is Kind.F32:
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
    for key, name in [*_MORE, *table.items()]:
        value = getattr(config, name, None) if name else None
        if isinstance(value, int | float) and not isinstance(value, bool):
            found[f"{arch}.{key}"] = value
    if config.model_type == "gpt_oss":
        found[f"{arch}.expert_feed_forward_length"] = config.intermediate_size
    if config.model_type == "lfm2":
        heads = [config.num_key_value_heads * (kind == "full_attention") for kind in config.layer_types]
        found[f"{arch}.attention.head_count_kv"] = heads
        found[f"{arch}.feed_forward_length"] = -(-int(2 * config.intermediate_size / 3) // 256) * 256
    if config.model_type == "mixtral":
        found[f"{arch}.expert_count"] = config.num_local_experts
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    found[f"{arch}.rope.freq_base"] = float(rope["rope_theta"])
    if rope.get("rope_type") == "yarn":
        found[f"{arch}.rope.scaling.type"], found[f"{arch}.rope.scaling.factor"] = "yarn", float(rope["factor"])
        found[f"{arch}.rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    found[f"{arch}.rope.dimension_count"] = int(size * rope.get("partial_rotary_factor", 1.0))
    return found


def tensors(model: Any, arch: str) -> list[tuple[str, np.ndarray]]:
    """Their names and values in a file."""
    config = model.config
    names = _names(config)
    heads = heads_of(config)
    found = []
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    for path, tensor in model.state_dict().items():
        if path in tied:
            continue
        values = tensor.detach().float().numpy()
        if ".experts." in path:
            found += _experts(path, values, model.get_submodule(path.rpartition(".")[0]))
            continue
        base, _, last = path.rpartition(".")
        whole = names.get_name(path)
        name = f"{whole}.weight" if whole else f"{names.get_name(base)}.{last}"
        part = name.split(".")[-2]
        if part in heads:
            values = interleaved(values, heads[part])
        if arch in _NORMS_FROM_1 and path.endswith("norm.weight"):
            values = values + 1
        alone = 0 if part == "ffn_gate_inp_shexp" else 1 if values.ndim == 3 else None
        found.append((name, values if alone is None else values.squeeze(alone)))
    return found


def _experts(path: str, values: np.ndarray, module: Any) -> list[tuple[str, np.ndarray]]:
    """Outputs first, and gates apart from what they gate."""
    layer, own = path.split(".")[2], path.rpartition(".")[2]
    last = "bias" if own.endswith("bias") else "weight"
    if last == "weight" and module.is_transposed:
        values = values.swapaxes(1, 2)
    if "gate_up" not in own:
        return [(f"blk.{layer}.ffn_down_exps.{last}", values)]
    halves = np.split(values, 2, axis=1) if module.is_concatenated else [values[:, ::2], values[:, 1::2]]
    return [(f"blk.{layer}.ffn_{part}_exps.{last}", half) for part, half in zip(("gate", "up"), halves, strict=True)]


def _names(config: Any) -> Any:
    number = next(n for n, name in gguf.MODEL_ARCH_NAMES.items() if name == arch_of(config))
    return gguf.get_tensor_name_map(number, config.num_hidden_layers)


def arch_of(config: Any) -> str:
    """What a file calls the family."""
    return _RENAMED.get(config.model_type, config.model_type)


def heads_of(config: Any) -> dict[str, int]:
    if arch_of(config) not in _INTERLEAVED:
        return {}
    return {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}


def apart(values: torch.Tensor, heads: int) -> torch.Tensor:
    """What ``interleaved`` did, undone."""
    return values.view(heads, values.shape[0] // heads // 2, 2, *values.shape[1:]).transpose(1, 2).reshape(values.shape)


def state_of(path: Path, plain: Any) -> dict[str, torch.Tensor]:
    """The values in a file, as the ``gguf`` package says, under the names of ``plain``, in bfloat16."""
    values, state = dequantised(path), {}
    config = plain.config
    names = _names(config)
    for name, tensor in plain.state_dict().items():
        if ".experts." in name:
            found = _expert_values(name, values, plain.get_submodule(name.rpartition(".")[0]))
        else:
            base, _, last = name.rpartition(".")
            whole = names.get_name(name)
            found = values[f"{whole}.weight" if whole else f"{names.get_name(base)}.{last}"]
            heads = heads_of(config).get(str(names.get_name(base)).rpartition(".")[2])
            found = apart(found, heads) if heads else found
        state[name] = found.reshape(tensor.shape).to(torch.bfloat16)
    return state


def _expert_values(path: str, values: Mapping[str, torch.Tensor], module: Any) -> torch.Tensor:
    """What ``_experts`` took apart."""
    layer, own = path.split(".")[2], path.rpartition(".")[2]
    last = "bias" if own.endswith("bias") else "weight"
    parts = ("gate", "up") if "gate_up" in own else ("down",)
    found = [values[f"blk.{layer}.ffn_{part}_exps.{last}"] for part in parts]
    whole = joined(found, 1, not module.is_concatenated and len(found) > 1)
    return whole.transpose(1, 2) if last == "weight" and module.is_transposed else whole


def dequantised(path: Path) -> dict[str, torch.Tensor]:
    """The values in a file, by name, as the ``gguf`` package says."""
    found = {}
    for tensor in gguf.GGUFReader(path).tensors:
        values = gguf.quants.dequantize(np.array(tensor.data), tensor.tensor_type)
        found[tensor.name] = torch.from_numpy(np.ascontiguousarray(values, np.float32))
    return found
