"""Config entries that all families make of the same GGUF fields: counts, layers, the size of a head."""

from __future__ import annotations

from typing import Any

from stowage.errors import CheckpointError, UnsupportedModelError
from stowage.weights.gguf import GgufFile


def number(file: GgufFile, key: str) -> int:
    """0: there is none."""
    value = uniform(file.fields.get(f"{file.architecture}.{key}"))
    return value if isinstance(value, int) and value > 0 else 0


def uniform(value: Any) -> Any:
    """A list that says the same of every layer, as that."""
    return value[0] if isinstance(value, list) and value and all(one == value[0] for one in value) else value


def layers_of(file: GgufFile) -> int:
    """Those that a text is computed by, without those that guess tokens ahead. 0: it is not said."""
    return max(0, number(file, "block_count") - number(file, "nextn_predict_layers"))


def head_size(file: GgufFile) -> int:
    """0: it is not said."""
    heads, hidden = number(file, "attention.head_count"), number(file, "embedding_length")
    return (number(file, "attention.key_length") or hidden // heads) if heads and hidden else 0


def of_layers(file: GgufFile, key: str) -> list[int]:
    """What is said of each layer, or of all at once; else zeros. Without the last layers, which guess ahead."""
    layers, value = layers_of(file), file.fields.get(f"{file.architecture}.{key}")
    each: list[Any] = value[:layers] if isinstance(value, list) else [value] * layers
    whole = len(each) == layers and all(isinstance(one, int) and one >= 0 for one in each)
    return each if whole else [0] * layers


def lacks_size(file: GgufFile, what: Any = "how large its heads are") -> CheckpointError:
    """For a file that does not state what every file of its architecture states."""
    return CheckpointError(f"{file.paths[0]} does not say {what}, or nothing that fits; download it again.")


def unsupported(file: GgufFile, what: str) -> UnsupportedModelError:
    """For a file that is whole, and that the engine would compute otherwise. ``what``: it is, has or does."""
    return UnsupportedModelError(f"{file.paths[0]} {what}. Give the Hugging Face checkpoint that it was made from.")


def latent_sizes(file: GgufFile, whole: int, rotated: int, value: int) -> dict[str, Any]:
    """Of a config with latent attention, whose heads' keys have ``whole`` numbers, and values ``value``; 0: as many as
    the config takes it for. Raises CheckpointError.
    """
    heads = number(file, "attention.head_count")
    if not heads or whole <= rotated:
        raise lacks_size(file)
    return {
        "kv_lora_rank": number(file, "attention.kv_lora_rank"),
        "num_key_value_heads": heads,
        "q_lora_rank": number(file, "attention.q_lora_rank") or None,
        "qk_nope_head_dim": whole - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": value or None,
    }
