"""A model's config.json as fields: read without Transformers, under the names that formulas use.

Owns where the file is, which of its parts is the language model, how a family's fields are called elsewhere, and what
they are where the file leaves them out. A field that a formula needs and nobody states is a ``ModelError`` that names
it; never a guess.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stowage.errors import CheckpointError, ConfigError, ModelError, UnsupportedModelError

ITEM_BYTES: Mapping[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8, "float8_e4m3fn": 1}
"""Bytes of one element, by name of the type."""
PACKED = "stowage_pack"
"""How a checkpoint that `stowage pack` wrote is quantised: its tensors are in memory as they are in its file."""
_ALIASES: Mapping[str, tuple[str, ...]] = {
    "hidden_size": ("n_embd",),
    "num_hidden_layers": ("n_layer",),
    "num_attention_heads": ("n_head",),
    "max_position_embeddings": ("n_positions",),
    "intermediate_size": ("block_ff_dim",),
    "num_experts": ("num_local_experts", "n_routed_experts"),
    "num_experts_per_tok": ("top_k_experts", "num_experts_per_token"),
    "layer_types": ("layers_block_type",),
    "tie_word_embeddings": ("tie_embedding",),
    "n_groups": ("mamba_n_groups",),
    "conv_kernel": ("mamba_d_conv",),
    "use_conv_bias": ("mamba_conv_bias",),
}
_LAYER_TYPES: Mapping[str, str] = {
    "conv": "linear_attention",
    "mamba": "linear_attention",
    "attention": "full_attention",
}
"""Older names of kinds of layers."""
_NAMES: Mapping[str, str] = {
    "kimi_k2": "deepseek_v3",
    "kimi_k25": "deepseek_v3",
    "gemma4_unified_text": "gemma4_text",
    **dict.fromkeys(("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"), "qwen2"),
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
"""Model types of checkpoints whose code is another family's, or with text alone computes what that one's does."""
_TEXT: Mapping[str, str] = {
    **dict.fromkeys(("llava", "llava_next", "idefics3", "smolvlm", "voxtral"), "llama"),
    **dict.fromkeys(("llava_onevision", "internvl"), "qwen2"),
    "mistral3": "mistral",
    "lfm2_vl": "lfm2",
    "kimi_k25": "deepseek_v3",
}
"""What lies in models of these types where their text config does not say."""
CLASS_SIZES: Mapping[str, Mapping[str, int]] = {
    "llama": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
    },
    "mistral": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "max_position_embeddings": 131072,
    },
}
"""What a config class fills in where a text config within another one is sparse, as LLaVA 1.5's and Pixtral's are."""
_LEFT_OUT: Mapping[str, Mapping[str, Any]] = {"gemma4_unified_text": {"hidden_size_per_layer_input": 0}}
"""Fields that say something in the family whose code it is, and nothing here."""


class Fields:
    """The fields of one language model. ``family``: its model type; ``defaults``: what its config class fills in."""

    def __init__(self, entries: Mapping[str, Any], family: str, defaults: Mapping[str, Any] | None = None) -> None:
        self._entries = entries
        self.family = family
        self._defaults = defaults or {}

    def with_defaults(self, defaults: Mapping[str, Any]) -> Fields:
        return Fields(self._entries, self.family, defaults)

    def get(self, name: str, otherwise: Any = None) -> Any:
        """The field, under its own or another of its names. Where the file says null, ``otherwise``; where it says
        nothing, what the config class fills in.
        """
        stated = [known for known in (name, *_ALIASES.get(name, ())) if known in self._entries]
        for known in stated:
            if self._entries[known] is not None:
                return self._entries[known]
        default = None if stated else self._defaults.get(name)
        return otherwise if default is None else default

    def number(self, name: str, otherwise: int | None = None) -> int:
        """A whole number of 0 or more."""
        value = self.get(name, otherwise)
        if value is None:
            raise ModelError(f"config.json states no {name}, and without it the size of this model is not known.")
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ModelError(f"{name} in config.json is {value!r}: it must be a whole number of 0 or more.")
        return value

    def flag(self, name: str | bool) -> bool:
        """A switch by its name; one that is decided by the family is given as itself."""
        return name if isinstance(name, bool) else bool(self.get(name, False))

    def of_layer(self, index: int) -> Fields | None:
        """With what the config says of one layer alone; ``None`` where it says nothing of single layers."""
        single = self._entries.get("per_layer_config")
        if not isinstance(single, Mapping):
            return None
        own: Mapping[str, Any] = next(
            (given for name, given in single.items() if name.isdecimal() and int(name) == index), {}
        )
        return Fields({**self._entries, **own}, self.family, self._defaults)

    @property
    def head_dim(self) -> int:
        return self.number("head_dim", self.number("hidden_size") // max(1, self.number("num_attention_heads")))

    @property
    def kv_heads(self) -> int:
        return self.number("num_key_value_heads", self.number("num_attention_heads"))

    @property
    def layer_types(self) -> list[str] | None:
        """As stated, under today's names; ``None`` where the config leaves them to the family."""
        stated = self.get("layer_types")
        if stated is None:
            return None
        if not isinstance(stated, list) or not all(isinstance(name, str) for name in stated):
            raise ModelError("layer_types in config.json is no list of names.")
        return [_LAYER_TYPES.get(name, name) for name in stated]

    @property
    def dtype(self) -> str:
        """Of the weights as they are meant to be run; float32 where nothing is said, as Transformers takes it."""
        name = str(self.get("dtype") or self.get("torch_dtype") or "float32").removeprefix("torch.")
        return name if name in ITEM_BYTES else "float32"

    @property
    def quantization(self) -> str:
        """How the checkpoint's weights are packed; empty where they are not."""
        stated = self.get("quantization_config")
        return str(stated.get("quant_method") or "packed") if isinstance(stated, Mapping) else ""


def read_config(model: str | Path) -> Fields:
    """The fields of a config file, or of the one in a directory.

    Raises ``CheckpointError`` for what cannot be read, ``UnsupportedModelError`` for what names no model.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise CheckpointError(
            f"{path} does not exist. Give a directory with a config.json, or such a file; weights are not needed. Of a "
            "model on the hub: huggingface-cli download NAME config.json --local-dir DIR"
        )
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error}); download it again.") from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path} is no config: it holds a {type(entries).__name__}, not an object.")
    return fields_of(entries)


def fields_of(entries: Mapping[str, Any]) -> Fields:
    """The fields of the language model in a config: those of ``text_config`` where there is one. Of both, the outer
    config says how weights are kept.
    """
    outer = str(entries.get("model_type") or "")
    nested = entries.get("text_config") or entries.get("llm_config")
    if isinstance(nested, Mapping):
        family = str(nested.get("model_type") or _TEXT.get(outer) or f"{outer.removesuffix('_text')}_text")
        names = ("dtype", "torch_dtype", "quantization_config", "tie_word_embeddings")
        around = {k: entries[k] for k in names if entries.get(k) is not None}
        if outer.startswith("gemma"):
            around.setdefault("tie_word_embeddings", True)
        return _of_family({**CLASS_SIZES.get(family, {}), **nested, **around}, family)
    if not outer:
        raise UnsupportedModelError(
            "config.json states no model_type, so it is not known what the model is made of. Transformers writes one: "
            "download the config again, or save it with config.save_pretrained(DIR)."
        )
    return _of_family(entries, outer)


def _of_family(entries: Mapping[str, Any], family: str) -> Fields:
    return Fields({**entries, **_LEFT_OUT.get(family, {})}, _NAMES.get(family, family))


def run_dtype(stated: str, asked: str) -> str:
    """The type that a model is run in: ``asked`` unless that is ``auto``. Raises ``ConfigError`` for an unknown one."""
    if asked == "auto":
        return stated
    if asked not in ("float32", "bfloat16", "float16"):
        raise ConfigError(f"dtype {asked!r} is unknown; choose one of: auto, float32, bfloat16, float16.")
    return asked
