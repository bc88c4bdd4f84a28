"""Families of which some layers have a window, and what their files say of it; and Command R's, which have none.

Source: llama.cpp, ``src/models/olmo2.cpp`` and ``exaone4.cpp``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stowage.models.gguf.fields import layers_of, sizeless
from stowage.weights.gguf import GgufFile


def kinds_of(file: GgufFile) -> list[str] | None:
    """Of each layer whether it has a window, where a file says it layer by layer, or that each n-th has none. Raises
    CheckpointError.
    """
    said = file.fields.get(f"{file.architecture}.attention.sliding_window_pattern")
    if type(said) is int:
        said = [not said or (layer + 1) % said > 0 for layer in range(layers_of(file))]
    if not isinstance(said, list):
        return None
    if len(said) < layers_of(file) or any(one not in (0, 1) for one in said):
        raise sizeless(file, "which layers have a window")
    return ["sliding_attention" if window else "full_attention" for window in said[: layers_of(file)]]


def every_layer(file: GgufFile, _: Mapping[str, Any]) -> dict[str, Any]:
    """Of families whose configs have a pattern of their own, which holds unless a file says another one."""
    kinds = kinds_of(file)
    return {} if kinds is None else {"layer_types": kinds}


def mistral(_: GgufFile, entries: Mapping[str, Any]) -> dict[str, Any]:
    """A config that says nothing of a window would have one."""
    return {"sliding_window": entries.get("sliding_window")}


def exaone4(file: GgufFile, entries: Mapping[str, Any]) -> dict[str, Any]:
    if entries.get("sliding_window"):
        return every_layer(file, entries)
    return {"sliding_window": None, "layer_types": ["full_attention"] * layers_of(file)}


def cohere(file: GgufFile, entries: Mapping[str, Any]) -> dict[str, Any]:
    scale = entries.get("logit_scale", 1.0)
    return {"logit_scale": scale, "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors}
