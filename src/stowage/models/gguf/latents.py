"""Families with latent attention: sizes of their latents, and which keys GLM-5's indexer chooses.

Sources: llama.cpp, ``src/models/deepseek2.cpp``, ``minicpm3.cpp`` and ``glm-dsa.cpp``; Mistral 4 is the first of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from stowage.models.gguf.fields import lacks_size, latent_sizes, layers_of, number, unsupported
from stowage.models.gguf.mixtures import SIGMOID, routed, sigmoid_routed
from stowage.weights.gguf import GgufFile

_FLASH_TOKENS: Final = 154880
_GROUPS: Final = {(60, 160): {"n_group": 8, "topk_group": 3}, (61, 256): {"n_group": 8, "topk_group": 4}}
"""Of DeepSeek-V2, and of V3 and R1, by layers and experts: groups that a router chooses from, which older files do not
say."""
_SHARING_CONTEXT: Final = 1 << 20
"""With so long a context a file of GLM-5 is of 5.2, of whose layers every fourth has an indexer, if it does not say."""


def scores_by_sigmoid(file: GgufFile) -> bool:
    """Of the experts of DeepSeek. Files that do not say it are of DeepSeek-V2, or early ones of GLM-4.7-Flash."""
    said = number(file, "expert_gating_func")
    vocabulary = file.tensors.get("token_embd.weight")
    flash = layers_of(file) in (46, 47, 48) and vocabulary is not None and vocabulary.shape[0] == _FLASH_TOKENS
    return said == SIGMOID or (not said and flash)


def deepseek(file: GgufFile, entries: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes of latents. New files say, as those of a head, what a head without heads of its own would have; what heads
    are made of stands beside that.
    """
    groups = {} if "n_group" in entries else _GROUPS.get((layers_of(file), number(file, "expert_count")), {})
    whole, value = (
        number(file, f"attention.{part}_length_mla") or number(file, f"attention.{part}_length")
        for part in ("key", "value")
    )
    if not value:
        raise lacks_size(file)
    sizes = latent_sizes(file, whole, number(file, "rope.dimension_count"), value)
    return {**routed(file, {**entries, **groups}), **groups, **sizes}


def deepseek_v2(file: GgufFile, entries: Mapping[str, Any]) -> dict[str, Any]:
    if file.fields.get("deepseek2.expert_weights_norm") is True:
        how = "makes the weights of experts that are chosen by softmax add up to one"
        raise unsupported(file, f"{how}, which is not computed from GGUF of deepseek2")
    found = deepseek(file, entries)
    grouped = {**entries, **found}["n_group"] > 1
    return {**found, "topk_method": "group_limited_greedy" if grouped else "greedy"}


def minicpm3(file: GgufFile, _: Mapping[str, Any]) -> dict[str, Any]:
    """By how much embeddings, residuals and logits are scaled stands in llama.cpp's code."""
    whole, rotated = number(file, "attention.key_length"), number(file, "rope.dimension_count")
    if not rotated or not number(file, "attention.kv_lora_rank"):
        raise lacks_size(file)
    sizes = latent_sizes(file, whole, rotated, number(file, "attention.value_length"))
    return {**sizes, "dim_model_base": 256, "scale_depth": 1.4, "scale_emb": 12}


def mistral4(file: GgufFile, entries: Mapping[str, Any]) -> dict[str, Any]:
    """Also of Mistral Large 3, whose files call themselves ``deepseek2``. Queries are scaled by where they stand beyond
    the length that the model was first trained with, and by no other. Raises CheckpointError.
    """
    begins = number(file, "attention.temperature_length")
    if begins and begins != number(file, "rope.scaling.original_context_length"):
        raise lacks_size(file, "from where on queries are scaled")
    return deepseek(file, entries)


def glm_dsa(file: GgufFile, entries: Mapping[str, Any]) -> dict[str, Any]:
    """Raises CheckpointError, UnsupportedModelError."""
    sizes = {key: number(file, f"attention.indexer.{key}") for key in ("head_count", "key_length", "top_k")}
    if not all(sizes.values()) or not number(file, "attention.q_lora_rank"):
        raise lacks_size(file, "which keys its queries read")
    return {
        **sigmoid_routed(file, entries),
        **deepseek(file, entries),
        "index_head_dim": sizes["key_length"],
        "index_n_heads": sizes["head_count"],
        "index_topk": sizes["top_k"],
        "indexer_types": ["full" if own else "shared" for own in _indexed(file)],
    }


def unindexed(file: GgufFile) -> list[int]:
    """Layers that read the keys which an earlier one's indexer has chosen."""
    own = _indexed(file) if file.architecture == "glm-dsa" else []
    return [layer for layer, is_own in enumerate(own) if not is_own]


def _indexed(file: GgufFile) -> list[bool]:
    """Of each layer whether it has an indexer of its own. Raises CheckpointError."""
    layers, said = layers_of(file), file.fields.get("glm-dsa.attention.indexer.types")
    if said is None:
        shares = number(file, "context_length") >= _SHARING_CONTEXT
        return [not shares or layer < 2 or layer % 4 == 2 for layer in range(layers)]
    if not isinstance(said, list) or len(said) < layers or not said[0] or any(one not in (0, 1) for one in said):
        raise lacks_size(file, "which of its layers have an indexer")
    return [bool(one) for one in said[:layers]]
