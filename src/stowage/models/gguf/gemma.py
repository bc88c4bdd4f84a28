"""Gemma's config entries that are no plain copy of a GGUF field: layers with and without a window, shared keys, AltUp.

Sources: llama.cpp, ``conversion/gemma.py`` and ``src/models/gemma3n.cpp``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import torch

from stowage.errors import CheckpointError
from stowage.models.gguf.fields import lacks_size, layers_of, number
from stowage.models.gguf.tensor_layout import Made
from stowage.models.gguf.windows import every_layer, kinds_of
from stowage.weights.gguf import GgufFile

_SCALED_BY_HEADS: Final = {"gemma2": 46, "gemma3": 62}
"""Layers of the one size of each family whose scores are scaled by hidden size / heads, which no field says
(``llama-model.cpp``: ``LLM_TYPE_27B``)."""
_ALTUP: Final = re.compile(r"model\.altup_(projections|unembed_projections)\.(\d+)\.weight")
_ALTUP_NAMES: Final = {"projections": "altup_proj", "unembed_projections": "altup_unembd_proj"}


def gemma(file: GgufFile, entries: Mapping[str, Any]) -> dict[str, Any]:
    scalar = int(entries.get("head_dim", 256))
    if entries.get("num_hidden_layers") == _SCALED_BY_HEADS[file.architecture]:
        hidden, heads = number(file, "embedding_length"), number(file, "attention.head_count")
        scalar = hidden // max(heads, 1)
    return {"query_pre_attn_scalar": scalar, **every_layer(file, entries)}


def gemma4(file: GgufFile, entries: Mapping[str, Any]) -> dict[str, Any]:
    """Layers with a window and without it have heads of two sizes, and may have two numbers of them."""
    layers, windows = layers_of(file), file.fields.get("gemma4.attention.sliding_window_pattern")
    if not isinstance(windows, list) or not windows or len(windows) != layers:
        raise CheckpointError(f"{file.paths[0]} does not say which layers have a window; download it again.")
    heads, wide = (_of_layers(entries.get(name), layers) for name in ("num_key_value_heads", "intermediate_size"))
    full = next((layer for layer, window in enumerate(windows) if not window), layers - 1)
    table, experts = file.tensors.get("per_layer_token_embd.weight"), number(file, "expert_count")
    return {
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in file.tensors,
        "enable_moe_block": bool(experts),
        "global_head_dim": number(file, "attention.key_length"),
        "head_dim": number(file, "attention.key_length_swa"),
        "hidden_size_per_layer_input": number(file, "embedding_length_per_layer_input"),
        "intermediate_size": wide[0],
        "layer_types": ["sliding_attention" if window else "full_attention" for window in windows],
        "num_experts": experts or None,
        "num_global_key_value_heads": heads[full],
        "num_key_value_heads": next((heads[at] for at, window in enumerate(windows) if window), heads[full]),
        "num_kv_shared_layers": number(file, "attention.shared_kv_layers"),
        "top_k_experts": number(file, "expert_used_count") or None,
        "use_double_wide_mlp": wide[-1] == 2 * wide[0],
        **({"vocab_size_per_layer_input": table.shape[0]} if table is not None else {}),
    }


def _of_layers(value: Any, layers: int) -> list[int]:
    """What is said of each layer, or of all at once."""
    each = value if isinstance(value, list) else [value] * layers
    return each if each and len(each) == layers and all(isinstance(number, int) for number in each) else [0] * layers


def gemma3n(file: GgufFile, entries: Mapping[str, Any]) -> dict[str, Any]:
    table, low = (file.tensors.get(f"{name}.weight") for name in ("per_layer_token_embd", "blk.0.laurel_l"))
    kinds = kinds_of(file)
    if table is None or low is None or kinds is None:
        raise lacks_size(file, "which layers have a window, or how large its inner layers are")
    return {
        "activation_sparsity_pattern": _sparsities(file),
        "altup_active_idx": number(file, "altup.active_idx"),
        "altup_num_inputs": number(file, "altup.num_inputs"),
        "hidden_size_per_layer_input": number(file, "embedding_length_per_layer_input"),
        "laurel_rank": low.shape[0],
        "layer_types": kinds,
        "num_kv_shared_layers": number(file, "attention.shared_kv_layers"),
        "vocab_size_per_layer_input": table.shape[0],
    }


def _sparsities(file: GgufFile) -> list[float]:
    """Which part of a layer's gates is left out. A file says how many standard deviations that is, where a checkpoint
    has the part itself, in few digits.
    """
    scales, layers = file.fields.get(f"{file.architecture}.activation_sparsity_scale"), layers_of(file)
    if not isinstance(scales, list) or len(scales) != layers or not all(isinstance(one, float) for one in scales):
        raise lacks_size(file, "how sparse its layers are")
    given = torch.tensor(scales, dtype=torch.float32)
    normal: Any = torch.distributions.normal.Normal(0, 1)
    parts = [round(float(part), 4) for part in normal.cdf(given)]
    again = normal.icdf(torch.tensor(parts, dtype=torch.float32))
    if not torch.allclose(again, given, rtol=1e-5):
        raise lacks_size(file, "how sparse its layers are")
    return parts


def altup_layout(path: str) -> Made | None:
    """One of the matrices that lie in a stack in a file."""
    match = _ALTUP.fullmatch(path)
    if match is None:
        return None
    number_of = int(match[2])
    return Made((f"{_ALTUP_NAMES[match[1]]}.weight",), lambda found: found[0][number_of])
