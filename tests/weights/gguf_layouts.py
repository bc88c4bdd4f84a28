"""What converters do to parameters that a GGUF file has in another order than Transformers, and how it is undone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from tests.weights import gguf_gemma, gguf_hybrids, gguf_kimi, gguf_mixtures

LATENTS = ("deepseek2", "glm-dsa", "mistral4")
DELTA = ("qwen3next", "qwen35", "qwen35moe")


def written(config: Any, arch: str, path: str, values: np.ndarray) -> list[tuple[str, np.ndarray]] | None:
    """The tensors of the parameter at ``path``; ``None`` where it is one as it is."""
    if (alone := gguf_gemma.written(arch, path, values)) is not None:
        return alone
    layer, _, own = path.removeprefix("model.layers.").removeprefix("backbone.layers.").partition(".")
    block = f"blk.{layer}"
    if arch in (*LATENTS, "kimi-linear") and own == "self_attn.kv_b_proj.weight":
        heads = values.reshape(config.num_attention_heads, -1, values.shape[1])
        keys, rest = np.split(heads, [config.qk_nope_head_dim], axis=1)
        return [(f"{block}.attn_k_b.weight", keys.swapaxes(1, 2)), (f"{block}.attn_v_b.weight", rest)]
    if arch == "kimi-linear":
        return gguf_kimi.written(block, own, values)
    if arch == "gemma4" and own.startswith("router.") and own.endswith("scale"):
        return [(f"{block}.{'ffn_down_exps' if 'expert' in own else 'ffn_gate_inp'}.scale", values)]
    if arch not in DELTA or not own.startswith("linear_attn."):
        relaid = gguf_hybrids.written(config, arch, block, own, values)
        return relaid or gguf_mixtures.written(arch, block, own, values)
    own = own.removeprefix("linear_attn.")
    width, begin = config.linear_value_head_dim, 2 * config.linear_num_key_heads * config.linear_key_head_dim
    if own == "in_proj_qkvz.weight":
        return [(f"{block}.{name}.weight", part) for name, part in _by_kind(config, values).items()]

    def tiled(part: np.ndarray, size: int) -> np.ndarray:
        return part if arch == "qwen3next" else _tiled(config, part, size)

    if own == "A_log":
        return [(f"{block}.ssm_a", -np.exp(tiled(values, 1)))]
    if own == "dt_bias":
        return [(f"{block}.ssm_dt.bias", tiled(values, 1))]
    if own in ("conv1d.weight", "in_proj_qkv.weight"):
        values, name = values.squeeze(1) if values.ndim == 3 else values, "ssm_conv1d" if "conv" in own else "attn_qkv"
        return [(f"{block}.{name}.weight", np.concatenate([values[:begin], tiled(values[begin:], width)]))]
    if own == "out_proj.weight":
        return [(f"{block}.ssm_out.weight", tiled(values.T, width).T)]
    sizes = {"in_proj_z": ("attn_gate", width), "in_proj_a": ("ssm_alpha", 1), "in_proj_b": ("ssm_beta", 1)}
    if own.removesuffix(".weight") in sizes:
        name, size = sizes[own.removesuffix(".weight")]
        return [(f"{block}.{name}.weight", tiled(values, size))]
    return None


def read(config: Any, arch: str, path: str, shape: torch.Size, values: Mapping[str, torch.Tensor]) -> Any:
    """The parameter again, of the numbers of a file; ``None`` where it is one as it is."""
    probe = np.arange(shape.numel(), dtype=np.float64).reshape(shape)
    parts = written(config, arch, path, probe)
    if parts is None:
        return None
    if path.endswith("A_log"):
        places = written(config, arch, path.replace("A_log", "dt_bias"), probe)
        parts = [(parts[0][0], places[0][1])]
        values = {parts[0][0]: torch.log(-values[parts[0][0]])}
    flat = torch.empty(shape.numel())
    for name, places in parts:
        flat[torch.from_numpy(places.copy()).long().flatten()] = values[name].flatten()
    return flat.reshape(shape)


def _by_kind(config: Any, values: np.ndarray) -> dict[str, np.ndarray]:
    """Queries of all heads, then keys, then values; gates apart. In Transformers each key head has its own of all."""
    size, wide = config.linear_key_head_dim, config.linear_value_head_dim
    wide *= config.linear_num_value_heads // config.linear_num_key_heads
    kinds: list[list[np.ndarray]] = [[], [], [], []]
    for head in np.split(values, config.linear_num_key_heads):
        for kind, part in zip(kinds, np.split(head, np.cumsum([size, size, wide])), strict=True):
            kind.append(part)
    q, k, v, z = (np.concatenate(kind) for kind in kinds)
    return {"attn_qkv": np.concatenate([q, k, v]), "attn_gate": z}


def _tiled(config: Any, values: np.ndarray, size: int) -> np.ndarray:
    """Value heads of ``size`` rows: the first of every key head, then the second of every one."""
    keys = config.linear_num_key_heads
    each = [np.split(group, len(group) // size) for group in np.split(values, keys)]
    return np.concatenate([head for heads in zip(*each, strict=True) for head in heads])
