"""A family that has a tiny model: what it is called, what its config says, what is known about running it.

Owns the shape of the table; ``full``, ``windowed``, ``recurrent`` and ``other`` hold its rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stowage.errors import ConfigError
from stowage.testing.tiny_models.vocabulary import SPECIAL_TOKENS

_MOST = {"hidden": 1 << 15, "layers": 1 << 10, "vocab": 1 << 20, "heads": 1 << 10}
"""Above them it is no tiny model, and would be written for hours."""
VOCAB_LEAST = 256 + len(SPECIAL_TOKENS)


@dataclass(frozen=True, slots=True)
class TinySize:
    """Sizes shared by all families; a family derives the rest from them."""

    hidden: int = 64
    layers: int = 4
    vocab: int = 512
    heads: int = 4
    kv_heads: int = 2
    context_tokens: int = 4096

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "kv_heads", "context_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}")
        for name, most in _MOST.items():
            if getattr(self, name) > most:
                raise ConfigError(f"--{name} must be at most {most:,}, not {getattr(self, name):,}")
        if self.heads % self.kv_heads:
            raise ConfigError(f"--heads must be a multiple of {self.kv_heads} key-value heads, not {self.heads}")
        if self.hidden <= 0 or self.hidden % (2 * self.heads):
            raise ConfigError(f"--hidden must be a positive multiple of {2 * self.heads}, not {self.hidden}")
        if self.vocab < VOCAB_LEAST:
            raise ConfigError(
                f"--vocab must be at least {VOCAB_LEAST} (256 bytes and the special tokens), not {self.vocab}"
            )

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    def pattern(self, *kinds: str) -> list[str]:
        """``kinds`` over and over, one for each layer."""
        return [kinds[i % len(kinds)] for i in range(self.layers)]


@dataclass(frozen=True, slots=True)
class Family:
    """One row. ``name``: as ``stowage tiny`` takes it; ``model_type``: Transformers' name of the config.

    ``fields``: the config's entries. ``models``: who uses it. ``note``: what to know when running it. ``layers``: the
    least that show all it does. ``refused``: what the error says that refuses it for what is found in it; empty where
    it runs, and where it is refused by name alone.
    """

    name: str
    model_type: str
    fields: Callable[[TinySize], dict[str, Any]]
    models: str
    note: str = ""
    layers: int = 2
    refused: str = ""


def common(size: TinySize) -> dict[str, Any]:
    """What nearly every config has. The range is wide, so that greedy tokens of untrained weights vary."""
    return {
        "hidden_size": size.hidden,
        "num_hidden_layers": size.layers,
        "vocab_size": size.vocab,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "intermediate_size": 2 * size.hidden,
        "max_position_embeddings": size.context_tokens,
        "initializer_range": 0.2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }


def with_heads(size: TinySize) -> dict[str, Any]:
    """``common``, for families that state the size of a head."""
    return common(size) | {"head_dim": size.head_dim}


def shared_experts(size: TinySize) -> dict[str, Any]:
    """Small experts, of which some are used by every token, behind a first layer without."""
    return {
        "num_experts": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": size.hidden // 2,
        "n_shared_experts": 1,
        "shared_expert_intermediate_size": size.hidden // 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    }
