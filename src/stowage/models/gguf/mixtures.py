"""Families with experts: what their GGUF files say of routers; a router that computes otherwise is refused.

Sources: llama.cpp, ``conversion`` for what is written and ``src/models`` for what is done where nothing is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from stowage.errors import UnsupportedModelError
from stowage.models.gguf.fields import lacks_size, layers_of, number, of_layers, unsupported
from stowage.models.gguf.windows import kinds_of
from stowage.weights.gguf import GgufFile

SIGMOID: Final = 2
_LLAMA4_TOKENS: Final = 8192
"""Of a piece that most layers attend within, and of a step of what the others scale queries by."""
_MAVERICK_EXPERTS: Final = 128


def routed(_: GgufFile, entries: Mapping[str, Any]) -> dict[str, Any]:
    """What a router does where a file is silent, which is not what Transformers' configs take for it."""
    silent: dict[str, Any] = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "norm_topk_prob": False}
    silent |= {"routed_scaling_factor": 1.0, "n_shared_experts": 0}
    return {name: value for name, value in silent.items() if name not in entries}


def sigmoid_routed(file: GgufFile, entries: Mapping[str, Any]) -> dict[str, Any]:
    """Of families whose routers score by sigmoid in Transformers. Raises UnsupportedModelError."""
    if number(file, "expert_gating_func") not in (0, SIGMOID):
        how = "scores experts in another way than by sigmoid"
        raise unsupported(file, f"{how}, which is not read from GGUF {file.architecture}")
    return routed(file, entries)


def refuse_other_sums(file: GgufFile, *, said: bool = False) -> None:
    """Of families that always make the weights of chosen experts add up to one. ``said``: only those files mean it that
    say it. Raises UnsupportedModelError.
    """
    if file.fields.get(f"{file.architecture}.expert_weights_norm", not said) is False:
        how = "does not make the weights of chosen experts add up to one"
        raise unsupported(file, f"{how}, which is not read from GGUF of {file.architecture}")


def afmoe(file: GgufFile, entries: Mapping[str, Any]) -> dict[str, Any]:
    """Embeddings are always scaled."""
    refuse_other_sums(file, said=True)
    sigmoid_routed(file, entries)
    return {"mup_enabled": True, "global_attn_every_n_layers": 4}


def ernie_moe(file: GgufFile, _: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "moe_intermediate_size": number(file, "expert_feed_forward_length"),
        "moe_k": number(file, "expert_used_count"),
        "moe_layer_interval": number(file, "interleave_moe_layer_step") or 1,
        "moe_layer_start_index": number(file, "leading_dense_block_count"),
        "moe_num_experts": number(file, "expert_count"),
        "moe_num_shared_experts": number(file, "expert_shared_count"),
    }


def exaone_moe(file: GgufFile, entries: Mapping[str, Any]) -> dict[str, Any]:
    kinds = kinds_of(file)
    if kinds is None:
        raise lacks_size(file, "which layers have a window")
    return {**sigmoid_routed(file, entries), "layer_types": kinds}


def hunyuan_moe(file: GgufFile, _: Mapping[str, Any]) -> dict[str, Any]:
    """One size is that of the shared expert and of the others."""
    return {
        "intermediate_size": number(file, "expert_feed_forward_length") or number(file, "feed_forward_length"),
        "moe_topk": number(file, "expert_used_count"),
    }


def llama4(file: GgufFile, entries: Mapping[str, Any]) -> dict[str, Any]:
    """What no field says is the same in all models with experts, but for norms of queries and keys, which those with
    128 do not have. Raises UnsupportedModelError.
    """
    sigmoid_routed(file, entries)
    if not number(file, "expert_count") or file.fields.get("llama4.attention.sliding_window", 1) == 0:
        lacking = "has no experts, or no layers that attend within pieces of a text"
        raise unsupported(file, f"{lacking}, which is not read from GGUF of llama4")
    return {
        "attention_chunk_size": _LLAMA4_TOKENS,
        "attn_scale": 0.1,
        "attn_temperature_tuning": True,
        "floor_scale": _LLAMA4_TOKENS,
        "interleave_moe_layer_step": number(file, "interleave_moe_layer_step") or 1,
        "intermediate_size": number(file, "expert_feed_forward_length"),
        "intermediate_size_mlp": number(file, "feed_forward_length"),
        "no_rope_layer_interval": 4,
        "use_qk_norm": number(file, "expert_count") != _MAVERICK_EXPERTS,
    }


def mimo2(file: GgufFile, entries: Mapping[str, Any]) -> dict[str, Any]:
    """MiMo-V2: layers with a window have twice as many heads of keys. Raises CheckpointError, UnsupportedModelError."""
    refuse_other_sums(file)
    kinds, heads = kinds_of(file), of_layers(file, "attention.head_count_kv")
    layers, scale = range(layers_of(file)), file.fields.get("mimo2.attention.value_scale")
    full = next((count for count, kind in zip(heads, kinds or (), strict=False) if kind == "full_attention"), 0)
    expected = [full * (1 + (kind == "sliding_attention")) for kind in kinds or ()]
    if not full or not number(file, "attention.value_length"):
        raise lacks_size(file)
    if heads != expected:
        found = " and ".join(map(str, sorted(set(heads))))
        raise unsupported(
            file,
            f"has layers of {found} heads of keys, where those with a window have twice as many as others in "
            "MiMo-V2-Flash: it is a variant that is not read from GGUF",
        )
    if not isinstance(scale, float):
        raise UnsupportedModelError(
            f"{file.paths[0]} does not say by how much values are scaled (attention.value_scale), though the model "
            "scales them: it is of an older converter. Give a newer file, or the Hugging Face checkpoint it was made "
            "from."
        )
    return {
        **sigmoid_routed(file, entries),
        "attention_value_scale": scale or None,
        "layer_types": kinds,
        "mlp_layer_types": [
            "sparse" if f"blk.{layer}.ffn_gate_inp.weight" in file.tensors else "dense" for layer in layers
        ],
        "norm_topk_prob": True,
        "num_key_value_heads": full,
        "v_head_dim": number(file, "attention.value_length"),
    }
