"""Families of which some layers have a window, and what their files say of it; and Command R's, which have none.

Source: llama.cpp, ``src/models/olmo2.cpp`` and ``exaone4.cpp``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from stowage.models.gguf.fields import lacks_size, layers_of, number
from stowage.weights.gguf import GgufFile

_UNSAID: Final = 4096
"""The window of StarCoder2 and of the first Mistral 7B, which converters leave out, and llama.cpp too."""
_FIRST_MISTRAL: Final = {
    "attention.head_count": 32,
    "attention.head_count_kv": 8,
    "block_count": 32,
    "context_length": 32768,
    "embedding_length": 4096,
    "expert_count": 0,
    "feed_forward_length": 14336,
}
"""Sizes of Mistral 7B. Its later versions, which have no window, are rotated by another base than its 10,000."""


def kinds_of(file: GgufFile) -> list[str] | None:
    """Which layers have a window, where a file says it by layer, or by each n-th. Raises CheckpointError."""
    said = file.fields.get(f"{file.architecture}.attention.sliding_window_pattern")
    if type(said) is int:
        said = [not said or (layer + 1) % said > 0 for layer in range(layers_of(file))]
    if not isinstance(said, list):
        return None
    if len(said) < layers_of(file) or any(one not in (0, 1) for one in said):
        raise lacks_size(file, "which layers have a window")
    return ["sliding_attention" if window else "full_attention" for window in said[: layers_of(file)]]


def every_layer(file: GgufFile, _: Mapping[str, Any]) -> dict[str, Any]:
    """Of families whose configs have a pattern of their own, which holds unless a file says another one."""
    kinds = kinds_of(file)
    return {} if kinds is None else {"layer_types": kinds}


def is_first_mistral(file: GgufFile) -> bool:
    """Whether a file that calls itself ``llama`` is of Mistral 7B 0.1, or of what was trained from it."""
    sizes = {key: number(file, key) for key in _FIRST_MISTRAL}
    return sizes == _FIRST_MISTRAL and file.fields.get("llama.rope.freq_base", 10000.0) == 10000.0


def mistral(file: GgufFile, entries: Mapping[str, Any]) -> dict[str, Any]:
    """A config that says nothing of a window would have one."""
    return {"sliding_window": entries.get("sliding_window") or (_UNSAID if is_first_mistral(file) else None)}


def starcoder2(_: GgufFile, entries: Mapping[str, Any]) -> dict[str, Any]:
    return {"sliding_window": entries.get("sliding_window", _UNSAID)}


def exaone4(file: GgufFile, entries: Mapping[str, Any]) -> dict[str, Any]:
    if entries.get("sliding_window"):
        return every_layer(file, entries)
    return {"sliding_window": None, "layer_types": ["full_attention"] * layers_of(file)}


def cohere(file: GgufFile, entries: Mapping[str, Any]) -> dict[str, Any]:
    scale = entries.get("logit_scale", 1.0)
    return {"logit_scale": scale, "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors}
