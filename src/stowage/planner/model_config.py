"""Fields of a config.json, for models that Transformers does not know, and names of dtypes.

A required field that is missing raises a ``ModelError`` that names it; nothing is guessed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stowage.errors import CheckpointError, ConfigError, ModelError
from stowage.models.published.hf_quant_config import hf_quant_config

ITEM_BYTES: Mapping[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8, "float8_e4m3fn": 1}
"""Bytes of one element, by name of the type."""
LOSSLESS = "stowage-lossless"
"""The metadata key of a file with losslessly packed tensors (``weights.lossless``)."""
PACKED = "stowage_pack"
"""The quantization method of checkpoints that `stowage pack` wrote: tensors are in memory as in the file."""
_ALIASES: Mapping[str, tuple[str, ...]] = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "n_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "max_position_embeddings": ("n_positions", "max_seq_len"),
    "num_experts": ("num_local_experts", "n_routed_experts", "moe_num_experts"),
    "num_experts_per_tok": ("top_k_experts", "num_experts_per_token", "moe_k", "moe_topk", "moe_top_k"),
}


class Fields:
    """The entries of one language model's config, under any of their aliases."""

    def __init__(self, entries: Mapping[str, Any]) -> None:
        self._entries = entries

    def number(self, name: str, otherwise: int | None = None) -> int:
        """A whole number of 0 or more; of a list, one for each layer, its largest."""
        known = (name, *_ALIASES.get(name, ()))
        value = next((self._entries[n] for n in known if self._entries.get(n) is not None), otherwise)
        if isinstance(value, list) and value and all(isinstance(n, int) for n in value):
            value = max(value)
        if value is None:
            raise ModelError(f"config.json states no {name}, and without it the size of this model is not known.")
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ModelError(f"{name} in config.json is {value!r}: it must be a whole number of 0 or more.")
        return value

    @property
    def family(self) -> str:
        return str(self._entries.get("model_type") or "unknown")

    @property
    def dtype(self) -> str:
        """The dtype that the model is meant to run in; empty where that is not said."""
        name = str(self._entries.get("dtype") or self._entries.get("torch_dtype") or "").removeprefix("torch.")
        return "bfloat16" if name.startswith("float8") else name if name in ITEM_BYTES or not name else "float32"

    @property
    def packed_as(self) -> str:
        """How the checkpoint's weights are packed; empty where they are not."""
        stated = self._entries.get("quantization_config")
        return str(stated.get("quant_method") or "packed") if isinstance(stated, Mapping) else ""


def read_config(path: Path) -> Fields:
    """The entries of a config file. Where the language model is one part of several, its own entries take precedence,
    except for dtype and quantization where the outer config states them.

    Raises ``CheckpointError`` for what cannot be read.
    """
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error}); download it again.") from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path} is no config: it holds a {type(entries).__name__}, not an object.")
    nested = entries.get("text_config") or entries.get("llm_config")
    parts = (entries, nested) if isinstance(nested, Mapping) else (entries,)
    if all(part.get("quantization_config") is None for part in parts):
        entries["quantization_config"] = hf_quant_config(path.parent)
    if not isinstance(nested, Mapping):
        return Fields(entries)
    around = {k: entries[k] for k in ("dtype", "torch_dtype", "quantization_config") if entries.get(k) is not None}
    return Fields({**entries, **nested, **around})


def run_dtype(stated: str, asked: str) -> str:
    """The type that a model is run in: ``asked`` unless that is ``auto``. Raises ``ConfigError`` for an unknown one."""
    if asked == "auto":
        return stated
    if asked not in ("float32", "bfloat16", "float16"):
        raise ConfigError(f"dtype {asked!r} is unknown; choose one of: auto, float32, bfloat16, float16.")
    return asked
