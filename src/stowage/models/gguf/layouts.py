"""Parameters whose numbers a GGUF file has in another order than Transformers, or in other tensors.

Rows that lie elsewhere are rows all the same: they stay in the file, as pieces of it (``Rows``). What is transposed,
has its columns in another order, or is kept as a function of itself, becomes numbers in memory (``Made``).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from stowage.models.gguf.gemma import altup_layout
from stowage.models.gguf.hybrids import HYBRIDS, mamba_layout, shared_layout
from stowage.models.gguf.kimi import delta_layout
from stowage.models.gguf.tensor_layout import Layout, Made, Rows, Stated
from stowage.weights.gguf import GgufTensor

_PATH: Final = re.compile(
    r"(?:model|backbone)\.layers\.(\d+)\.(?:self_attn|linear_attn|router|mlp|mamba|mixer|shared_mlp)\.(.+)"
)
_CALLED: Final[Mapping[str, tuple[str, str]]] = {
    "granitehybrid": ("block_sparse_moe.router.", "block_sparse_moe.router.layer."),
    "granitemoe": ("block_sparse_moe.router.", "block_sparse_moe.router.layer."),
    "ernie4_5-moe": ("mlp.gate.moe_statics.", "mlp.moe_statics."),
    "kimi-linear": ("self_attn.forget_gate.", "self_attn."),
    "nemotron_h": ("model.layers.", "backbone.layers."),
    "nemotron_h_moe": ("model.layers.", "backbone.layers."),
}
"""Families whose parameters have another name here than the package gguf knows: a part of it, and what it is there."""
_ALWAYS_FROM_1: Final = ("gemma", "gemma2", "gemma3", "nemotron")
_ROUTERS: Final = {"scale": "ffn_gate_inp", "per_expert_scale": "ffn_down_exps"}
_IN_FLOAT32: Final = (
    *("bailingmoe2", "deepseek2", "dots1", "ernie4_5-moe", "exaone-moe", "glm-dsa", "glm4moe", "hunyuan-moe"),
    *("kimi-linear", "mimo2", "nemotron_h_moe"),
)
"""Families whose routers are made float32 before they are multiplied with: what is packed cannot be."""
_HEADS_NORMS: Final = ("q_norm.weight", "k_norm.weight")
"""Norms with a row of weights for each head."""
_GATED_DELTA: Final = ("qwen3next", "qwen35", "qwen35moe")


def named(architecture: str, path: str) -> str:
    """As the package gguf knows the parameter at ``path``."""
    here, there = _CALLED.get(architecture, ("", ""))
    return path.replace(here, there, 1) if here else path


def part_of(path: str) -> str:
    """What the tensor is called in a block that is the parameter at ``path``, of queries, keys or values."""
    return f"attn_{path.split('.')[-2].removesuffix('_proj')}"


def layout_of(
    architecture: str, config: Any, path: str, tensors: Mapping[str, GgufTensor], rows: Mapping[str, int]
) -> Layout | None:
    """``None``: by its name, and as it is. ``path``: of a parameter in Transformers' model; all have ``rows``."""
    match = _PATH.fullmatch(path)
    if match is None:
        return altup_layout(path) if architecture == "gemma3n" else None
    block, own = f"blk.{match[1]}", match[2]
    if own in ("gate.weight", "gate.wg.weight") and architecture in _IN_FLOAT32:
        return Made((f"{block}.ffn_gate_inp.weight",), lambda found: found[0])
    if architecture in ("granitehybrid", "granitemoe") and own.startswith(("input_", "output_")):
        return shared_layout(block, own, tensors)
    if architecture == "command-r" and own in _HEADS_NORMS:
        return Made((f"{block}.attn_{own}",), lambda found: found[0])
    if (joined := _joined_heads(path, block, tensors, rows)) is not None:
        return joined
    if architecture == "apertus" and own.startswith("act_fn."):
        return Stated(f"xielu.{own.removeprefix('act_fn.')}", int(match[1]))
    if architecture in HYBRIDS:
        return mamba_layout(architecture, block, own)
    if architecture in ("deepseek2", "glm-dsa", "kimi-linear", "mistral4") and own == "kv_b_proj.weight":
        return _latents(config, block, tensors)
    if architecture == "kimi-linear":
        return delta_layout(block, own)
    if architecture == "gemma4" and own in _ROUTERS:
        return Made((f"{block}.{_ROUTERS[own]}.scale",), lambda found: found[0])
    return _gated_delta(architecture, config, block, own, tensors) if architecture in _GATED_DELTA else None


def adds_1(architecture: str, path: str) -> bool:
    """Whether Transformers multiplies by 1 and this norm's weights, of which the file has the sums."""
    if architecture in _GATED_DELTA:
        return path.endswith("norm.weight") and not path.endswith("linear_attn.norm.weight")
    return architecture in _ALWAYS_FROM_1 and path.endswith("norm.weight")


def _joined_heads(path: str, block: str, tensors: Mapping[str, GgufTensor], rows: Mapping[str, int]) -> Layout | None:
    """Queries, keys and values that are one tensor of the file, as converters may write them."""
    parent, _, last = path.rsplit(".", 2)
    whole, each = f"{block}.attn_qkv.{last}", [f"{parent}.{one}_proj.{last}" for one in "qkv"]
    if path not in each or whole not in tensors:
        return None
    begins = sum(rows.get(one, 0) for one in each[: each.index(path)])
    return Rows(((whole, begins, begins + rows[path]),), of=sum(rows.get(one, 0) for one in each))


def _latents(config: Any, block: str, tensors: Mapping[str, GgufTensor]) -> Layout:
    """What makes keys and values of latents: in new files apart, and keys' transposed, head by head."""
    if f"{block}.attn_kv_b.weight" in tensors:
        return Made((f"{block}.attn_kv_b.weight",), lambda found: found[0])
    heads, inputs = config.num_attention_heads, config.kv_lora_rank

    def merged(found: Sequence[Tensor]) -> Tensor:
        keys, values = (part.reshape(heads, -1, part.shape[-1]) for part in found)
        return torch.cat([keys.transpose(1, 2), values], dim=1).reshape(-1, inputs)

    return Made((f"{block}.attn_k_b.weight", f"{block}.attn_v_b.weight"), merged)


def _gated_delta(
    architecture: str, config: Any, block: str, own: str, tensors: Mapping[str, GgufTensor]
) -> Layout | None:
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    width, each, per_key = config.linear_value_head_dim, config.linear_key_head_dim, values // keys
    if architecture == "qwen3next":
        order = list(range(values))
        if own == "in_proj_qkvz.weight" and f"{block}.ssm_in.weight" not in tensors:
            return Rows(tuple(_by_key(block, keys, each, per_key * width)))
    else:
        order = [key + keys * number for key in range(keys) for number in range(per_key)]
    begin = 2 * keys * each
    match own:
        case "A_log":
            return Made((f"{block}.ssm_a",), lambda found: torch.log(-_picked(found[0], order, 1)))
        case "dt_bias":
            return Made((f"{block}.ssm_dt.bias",), lambda found: _picked(found[0], order, 1))
        case _ if order == sorted(order):
            return None
        case "conv1d.weight":
            name = f"{block}.ssm_conv1d.weight"
            return Made((name,), lambda found: torch.cat([found[0][:begin], _picked(found[0][begin:], order, width)]))
        case "out_proj.weight":
            return Made((f"{block}.ssm_out.weight",), lambda found: _picked(found[0].t(), order, width).t())
        case "in_proj_qkv.weight":
            return Rows(tuple(_moved(f"{block}.attn_qkv.weight", order, width, begin)))
        case "in_proj_z.weight":
            return Rows(tuple(_moved(f"{block}.attn_gate.weight", order, width)))
        case "in_proj_a.weight":
            return Rows(tuple(_moved(f"{block}.ssm_alpha.weight", order, 1)))
        case "in_proj_b.weight":
            return Rows(tuple(_moved(f"{block}.ssm_beta.weight", order, 1)))
    return None


def _by_key(block: str, heads: int, each: int, wide: int) -> list[tuple[str, int, int]]:
    """Of each key head: its query, its key, its values, their gates; in the file all queries come first."""
    qkv, gate = f"{block}.attn_qkv.weight", f"{block}.attn_gate.weight"
    begins = [(qkv, 0, each), (qkv, heads * each, each), (qkv, 2 * heads * each, wide), (gate, 0, wide)]
    of_heads = itertools.product(range(heads), begins)
    return [(name, begin + head * size, begin + (head + 1) * size) for head, (name, begin, size) in of_heads]


def _moved(name: str, order: Sequence[int], size: int, begin: int = 0) -> list[tuple[str, int, int]]:
    """Rows up to ``begin``, and after those heads of ``size`` rows in ``order``."""
    heads = [(name, begin + head * size, begin + (head + 1) * size) for head in order]
    return [(name, 0, begin), *heads] if begin else heads


def _picked(values: Tensor, order: Sequence[int], size: int) -> Tensor:
    """Heads of ``size`` rows each, in ``order``."""
    heads = values.reshape(len(order), size, *values.shape[1:])
    return heads[torch.tensor(order)].reshape(values.shape)
