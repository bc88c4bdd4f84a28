"""Families with layers of Mamba, the first and 2: their configs, and how the parameters of such a layer lie in a file.

Which layer is what stands in the number of its heads and of its feed-forward's rows (llama.cpp, ``src/models/
granite-hybrid.cpp`` and ``nemotron-h.cpp``). Granite 4 has a feed-forward behind each, Nemotron-H is one or the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from stowage.models.gguf.fields import head_size, lacks_size, layers_of, number, of_layers
from stowage.models.gguf.tensor_layout import Layout, Made, Rows
from stowage.weights.gguf import GgufFile, GgufTensor

HYBRIDS: Final = ("falcon-h1", "granitehybrid", "jamba", "mamba", "mamba2", "nemotron_h", "nemotron_h_moe")


def granite(file: GgufFile, entries: Mapping[str, Any]) -> dict[str, Any]:
    """Also of MiniCPM, whose files do not say how scores are scaled: as everywhere."""
    scales = {"embedding_multiplier", "logits_scaling", "residual_multiplier"}
    if file.architecture == "minicpm" and not scales <= entries.keys():
        raise lacks_size(file, "by how much it scales embeddings, residuals and logits")
    return {} if entries.get("attention_multiplier") else {"attention_multiplier": max(head_size(file), 1) ** -0.5}


def granite_moe(file: GgufFile, entries: Mapping[str, Any]) -> dict[str, Any]:
    shared = number(file, "expert_shared_feed_forward_length") or number(file, "feed_forward_length")
    own = {"num_local_experts": number(file, "expert_count"), "shared_intermediate_size": shared}
    return {**granite(file, entries), **own}


def granite_hybrid(file: GgufFile, entries: Mapping[str, Any]) -> dict[str, Any]:
    heads, states, hidden = of_layers(file, "attention.head_count_kv"), _states(file), number(file, "embedding_length")
    return {
        **granite_moe(file, entries),
        "layer_types": ["full_attention" if count else "linear_attention" for count in heads],
        **_mamba(file, states),
        "mamba_expand": states["size"] * states["heads"] // max(hidden, 1),
        "num_key_value_heads": max(heads, default=0),
        "position_embedding_type": "rope" if _rotates(file) else None,
    }


def nemotron_h(file: GgufFile, entries: Mapping[str, Any]) -> dict[str, Any]:
    heads, wide, states = (
        of_layers(file, "attention.head_count_kv"),
        of_layers(file, "feed_forward_length"),
        _states(file),
    )
    if number(file, "expert_group_count") > 1 and not number(file, "expert_group_used_count"):
        raise lacks_size(file, "how many groups of experts a router chooses")
    behind = [
        "moe" if f"blk.{layer}.ffn_gate_inp.weight" in file.tensors else "mlp" if wide[layer] else "linear_attention"
        for layer in range(layers_of(file))
    ]
    silent = {"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "routed_scaling_factor": 1.0}
    return {
        **{name: value for name, value in silent.items() if name not in entries},
        "attention_bias": _has(file, "attn_q.bias"),
        "conv_kernel": number(file, "ssm.conv_kernel"),
        "intermediate_size": max((wide[at] for at, kind in enumerate(behind) if kind == "mlp"), default=0),
        "layer_norm_epsilon": file.fields.get(f"{file.architecture}.attention.layer_norm_rms_epsilon"),
        "layers_block_type": ["full_attention" if heads[at] else kind for at, kind in enumerate(behind)],
        "mamba_head_dim": states["size"],
        "mamba_num_heads": states["heads"],
        "mlp_bias": _has(file, "ffn_up.bias"),
        "moe_latent_size": number(file, "moe_latent_size") or None,
        "moe_shared_expert_intermediate_size": number(file, "expert_shared_feed_forward_length"),
        "n_groups": states["groups"],
        "num_key_value_heads": max(heads, default=0),
        "ssm_state_size": states["state"],
        "use_conv_bias": _has(file, "ssm_conv1d.bias"),
    }


def falcon_h1(file: GgufFile, _: Mapping[str, Any]) -> dict[str, Any]:
    """Its multipliers are in a file's weights already (``conversion/falcon_h1.py``), so none is left here."""
    states = _states(file)
    return {
        **_mamba(file, states),
        "mamba_d_ssm": states["size"] * states["heads"],
        "mamba_norm_before_gate": False,
        "mamba_rms_norm": _has(file, "ssm_norm.weight"),
    }


def mamba2(file: GgufFile, _: Mapping[str, Any]) -> dict[str, Any]:
    states, hidden = _states(file), number(file, "embedding_length")
    return {
        "conv_kernel": number(file, "ssm.conv_kernel"),
        "expand": states["size"] * states["heads"] // max(hidden, 1),
        "head_dim": states["size"],
        "layer_norm_epsilon": file.fields.get(f"{file.architecture}.attention.layer_norm_rms_epsilon"),
        "n_groups": states["groups"],
        "num_heads": states["heads"],
        "state_size": states["state"],
        "use_conv_bias": _has(file, "ssm_conv1d.bias"),
    }


def mamba(file: GgufFile, _: Mapping[str, Any]) -> dict[str, Any]:
    """Also of Falcon-Mamba."""
    states, hidden = _first_states(file), number(file, "embedding_length")
    return {
        "conv_kernel": number(file, "ssm.conv_kernel"),
        "expand": states["inner"] // hidden,
        "layer_norm_epsilon": file.fields.get(f"{file.architecture}.attention.layer_norm_rms_epsilon"),
        "state_size": states["state"],
        "time_step_rank": states["rank"],
        "use_bias": _has(file, "ssm_in.bias"),
        "use_conv_bias": _has(file, "ssm_conv1d.bias"),
    }


def jamba(file: GgufFile, _: Mapping[str, Any]) -> dict[str, Any]:
    states, heads = _first_states(file), of_layers(file, "attention.head_count_kv")
    layers, hidden = range(layers_of(file)), number(file, "embedding_length")
    routed = [f"blk.{layer}.ffn_gate_inp.weight" in file.tensors for layer in layers]
    attention, experts = _every(file, [bool(count) for count in heads]), _every(file, routed)
    return {
        "attn_layer_offset": attention[0],
        "attn_layer_period": attention[1],
        "expert_layer_offset": experts[0],
        "expert_layer_period": experts[1],
        "mamba_conv_bias": _has(file, "ssm_conv1d.bias"),
        "mamba_d_conv": number(file, "ssm.conv_kernel"),
        "mamba_d_state": states["state"],
        "mamba_dt_rank": states["rank"],
        "mamba_expand": states["inner"] // hidden,
        "mamba_proj_bias": _has(file, "ssm_in.bias"),
        "num_experts": number(file, "expert_count") or 1,
        "num_key_value_heads": max(heads, default=0),
        "use_mamba_kernels": False,
    }


def _every(file: GgufFile, layers: Sequence[bool]) -> tuple[int, int]:
    """The first of those that are set, and every how many layers another is. Raises CheckpointError."""
    own = [at for at, known in enumerate(layers) if known]
    first, period = (own[0] if own else len(layers)), (own[1] - own[0] if len(own) > 1 else len(layers) + 1)
    if first >= period or layers != [at % period == first for at in range(len(layers))]:
        raise lacks_size(file, "which of its layers are alike")
    return first, period


def _first_states(file: GgufFile) -> dict[str, int]:
    """Sizes of a layer of the first Mamba. Raises CheckpointError."""
    found = {
        "inner": number(file, "ssm.inner_size"),
        "rank": number(file, "ssm.time_step_rank"),
        "state": number(file, "ssm.state_size"),
    }
    hidden = number(file, "embedding_length")
    if not all(found.values()) or not hidden or found["inner"] % hidden:
        raise lacks_size(file, "how large its states are")
    return found


def mamba_layout(architecture: str, block: str, own: str) -> Layout | None:
    """Of parameters of a layer of Mamba: the file has what states decay by, where a checkpoint has its logarithm."""
    match own:
        case "dt_proj.weight" if architecture in ("jamba", "mamba"):  # models multiply with it by themselves
            return Made((f"{block}.ssm_dt.weight",), lambda found: found[0])
        case "A_log":
            return Made((f"{block}.ssm_a",), lambda found: torch.log(-found[0]))
        case "D":
            return Made((f"{block}.ssm_d",), lambda found: found[0])
        case "dt_bias":
            return Made((f"{block}.ssm_dt.bias",), lambda found: found[0])
    return None


def shared_layout(block: str, own: str, tensors: Mapping[str, GgufTensor]) -> Layout | None:
    """Of Granite's shared expert, or its only feed-forward: gates and what they gate are one parameter."""
    last = "" if f"{block}.ffn_gate.weight" in tensors else "_shexp"
    names = {"input_linear.weight": ("gate", "up"), "output_linear.weight": ("down",)}.get(own, ())
    whole = [f"{block}.ffn_{part}{last}.weight" for part in names]
    if not whole or not all(name in tensors for name in whole):
        return None
    return Rows(tuple((name, 0, tensors[name].shape[0]) for name in whole))


def _states(file: GgufFile) -> dict[str, int]:
    """Sizes of what a layer keeps: heads, and groups that share what is written and read."""
    heads, inner = number(file, "ssm.time_step_rank"), number(file, "ssm.inner_size")
    groups, state = number(file, "ssm.group_count"), number(file, "ssm.state_size")
    if not heads or not groups or not state or not inner or inner % heads or heads % groups:
        raise lacks_size(file, "how large its states are")
    return {"heads": heads, "size": inner // heads, "groups": groups, "state": state}


def _mamba(file: GgufFile, states: Mapping[str, int]) -> dict[str, Any]:
    """As configs name it whose layers of Mamba stand among others."""
    return {
        "mamba_conv_bias": _has(file, "ssm_conv1d.bias"),
        "mamba_d_conv": number(file, "ssm.conv_kernel"),
        "mamba_d_head": states["size"],
        "mamba_d_state": states["state"],
        "mamba_n_groups": states["groups"],
        "mamba_n_heads": states["heads"],
    }


def _rotates(file: GgufFile) -> bool:
    return file.fields.get(f"{file.architecture}.rope.scaling.finetuned", True) is True


def _has(file: GgufFile, last: str) -> bool:
    return any(name.endswith(f".{last}") for name in file.tensors)
