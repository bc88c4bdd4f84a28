"""Families of which some layers have a window, and what their files say of it; and Command R's, which have none.

Source: llama.cpp, ``src/models/olmo2.cpp`` and ``exaone4.cpp``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stowage.models.gguf.fields import layers_of, sizeless
from stowage.weights.gguf import GgufFile

__all__ = ["cohere", "exaone4", "kinds_of", "olmo3"]


def kinds_of(file: GgufFile) -> list[str] | None:
    """Of each layer whether it has a window, where a file says it layer by layer. Raises CheckpointError."""
    said = file.fields.get(f"{file.architecture}.attention.sliding_window_pattern")
    if not isinstance(said, list):
        return None
    if len(said) < layers_of(file) or any(one not in (0, 1) for one in said):
        raise sizeless(file, "which layers have a window")
    return ["sliding_attention" if window else "full_attention" for window in said[: layers_of(file)]]


def exaone4(file: GgufFile, entries: Mapping[str, Any]) -> dict[str, Any]:
    if entries.get("sliding_window") is not None:
        kinds = kinds_of(file)
        return {} if kinds is None else {"layer_types": kinds}
    return {"sliding_window": None, "layer_types": ["full_attention"] * layers_of(file)}


def olmo3(file: GgufFile, _: Mapping[str, Any]) -> dict[str, Any]:
    """Every fourth layer has none, unless a file says which."""
    kinds = kinds_of(file)
    return {} if kinds is None else {"layer_types": kinds}


def cohere(file: GgufFile, _: Mapping[str, Any]) -> dict[str, Any]:
    return {"use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors}
