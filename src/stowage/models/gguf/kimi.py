"""Kimi-Linear: latent attention beside layers of Kimi's delta rule.

Layers without heads of keys keep a state (llama.cpp, ``src/models/kimi-linear.cpp``). A file has three convolutions
where Transformers has one of all their channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from stowage.models.gguf.fields import lacks_size, latent_sizes, layers_of, number, of_layers
from stowage.models.gguf.mixtures import refuse_other_sums, sigmoid_routed
from stowage.models.gguf.tensor_layout import Layout, Made
from stowage.weights.gguf import GgufFile


def kimi_linear(file: GgufFile, entries: Mapping[str, Any]) -> dict[str, Any]:
    """Raises CheckpointError, UnsupportedModelError."""
    refuse_other_sums(file)
    heads, rotated = number(file, "attention.head_count"), number(file, "rope.dimension_count")
    whole, value = (number(file, f"attention.{part}_length_mla") for part in ("key", "value"))
    if not value or not rotated or not number(file, "kda.head_dim"):
        raise lacks_size(file)
    dense = number(file, "leading_dense_block_count")
    return {
        **sigmoid_routed(file, entries),
        **latent_sizes(file, whole, rotated, value),
        "layer_types": [
            "full_attention" if n else "linear_attention" for n in of_layers(file, "attention.head_count_kv")
        ],
        "linear_conv_kernel_dim": number(file, "ssm.conv_kernel"),
        "linear_head_dim": number(file, "kda.head_dim"),
        "linear_num_heads": heads,
        "mlp_layer_types": ["dense" if layer < dense else "sparse" for layer in range(layers_of(file))],
        "norm_topk_prob": True,
    }


def delta_layout(block: str, own: str) -> Layout | None:
    """Of parameters of a layer that keeps a state."""
    match own:
        case "conv1d.weight":
            names = tuple(f"{block}.ssm_conv1d_{part}.weight" for part in "qkv")
            return Made(names, lambda found: torch.cat([part.reshape(-1, part.shape[-1]) for part in found]))
        case "forget_gate.A_log":
            return Made((f"{block}.ssm_a",), lambda found: torch.log(-found[0]))
        case "forget_gate.dt_bias":
            return Made((f"{block}.ssm_dt.bias",), lambda found: found[0])
    return None
