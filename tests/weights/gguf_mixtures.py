"""What converters write of families with experts (llama.cpp: `conversion/ernie.py`, `exaone.py` and others), and of
those that Transformers has under another name.
"""

from __future__ import annotations

from typing import Any

import numpy as np

SIGMOID = ("afmoe", "bailingmoe2", "dots1", "exaone-moe", "glm4moe", "lfm2moe", "mimo2", "minimax-m2")
"""Families whose routers score by sigmoid."""


def fields(config: Any, arch: str) -> dict[str, Any]:
    """Beside what every decoder has."""
    found: dict[str, Any] = {"expert_gating_func": 2} if arch in SIGMOID else {}
    if arch in ("bailingmoe2", "dots1", "exaone-moe", "glm4moe"):
        found["expert_weights_norm"] = config.norm_topk_prob
    if arch.startswith(("qwen2vl", "qwen3vl")):
        pairs = (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads) // 2
        found["rope.dimension_sections"] = [*(-(-(pairs - first) // 3) for first in range(3)), 0]
    match arch:
        case "afmoe":
            found |= {"expert_shared_count": config.num_shared_experts, "expert_weights_norm": True}
            found["expert_weights_scale"] = config.route_scale
        case "bailingmoe2":
            found["expert_shared_feed_forward_length"] = config.moe_intermediate_size
        case "ernie4_5-moe":
            found |= {
                "expert_count": config.moe_num_experts,
                "expert_used_count": config.moe_k,
                "expert_feed_forward_length": config.moe_intermediate_size,
                "expert_shared_count": config.moe_num_shared_experts,
                "expert_shared_feed_forward_length": config.intermediate_size // config.num_key_value_heads,
                "interleave_moe_layer_step": config.moe_layer_interval,
                "leading_dense_block_count": config.moe_layer_start_index,
            }
        case "exaone-moe":
            found |= {
                "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in config.layer_types],
                "expert_shared_count": config.num_shared_experts,
                "expert_shared_feed_forward_length": config.moe_intermediate_size * config.num_shared_experts,
                "leading_dense_block_count": config.mlp_layer_types.index("sparse"),
            }
        case "glm-dsa":
            found |= {
                "attention.indexer.head_count": config.index_n_heads,
                "attention.indexer.key_length": config.index_head_dim,
                "attention.indexer.top_k": config.index_topk,
                "attention.indexer.types": [kind == "full" for kind in config.indexer_types],
            }
        case "llama4":
            found |= {
                "expert_count": config.num_local_experts,
                "expert_feed_forward_length": config.intermediate_size,
                "feed_forward_length": config.intermediate_size_mlp,
                "interleave_moe_layer_step": config.interleave_moe_layer_step,
            }
        case "mimo2":
            windows = [int(kind == "sliding_attention") for kind in config.layer_types]
            found |= {
                "attention.head_count_kv": [config.num_key_value_heads * (1 + window) for window in windows],
                "attention.sliding_window_pattern": windows,
                "attention.value_length": config.v_head_dim,
                "attention.value_scale": config.attention_value_scale,
                "rope.freq_base_swa": config.rope_parameters["sliding_attention"]["rope_theta"],
            }
        case "minicpm3":
            found |= {
                "attention.key_length": config.qk_nope_head_dim + config.qk_rope_head_dim,
                "attention.value_length": config.v_head_dim,
                "attention.kv_lora_rank": config.kv_lora_rank,
                "attention.q_lora_rank": config.q_lora_rank,
            }
        case "hunyuan-moe":
            found |= {
                "expert_feed_forward_length": config.intermediate_size,
                "expert_shared_feed_forward_length": config.intermediate_size,
                "expert_shared_count": 1,
                "expert_used_count": config.moe_topk,
            }
    return {f"{arch}.{key}": value for key, value in found.items()}


def written(arch: str, block: str, own: str, values: np.ndarray) -> list[tuple[str, np.ndarray]] | None:
    """What `merged` puts together."""
    part = own.removeprefix("self_attn.").removesuffix("_proj.weight")
    return [(f"{block}.attn_{part}.weight", values)] if arch == "bailingmoe2" and part in ("q", "k", "v") else None


def merged(config: Any, arch: str, tensors: list[tuple[str, np.ndarray]]) -> list[tuple[str, np.ndarray]]:
    """Queries, keys and values of Ling 2 as one tensor."""
    if arch != "bailingmoe2":
        return tensors
    each, found = dict(tensors), []
    for name, values in tensors:
        if ".attn_q.weight" in name:
            parts = [each[name.replace("attn_q.", f"attn_{part}.")] for part in "qkv"]
            found.append((name.replace("attn_q.", "attn_qkv."), np.concatenate(parts)))
        elif ".attn_k.weight" not in name and ".attn_v.weight" not in name:
            found.append((name, values))
    return found


def parted(config: Any, arch: str, values: dict[str, Any]) -> dict[str, Any]:
    """What `merged` put together, apart again; and matrices of AltUp."""
    for part in ("altup_proj", "altup_unembd_proj"):
        values |= {f"{part}.{at}": one for at, one in enumerate(values.get(f"{part}.weight", []))}
    if arch == "bailingmoe2":
        size = config.hidden_size // config.num_attention_heads
        counts = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
        for name in [name for name in values if "attn_qkv" in name]:
            parts = values[name].split([count * size for count in counts])
            values |= {name.replace("attn_qkv", f"attn_{own}"): part for own, part in zip("qkv", parts, strict=True)}
    return values
