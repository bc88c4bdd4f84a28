"""Families that the engine refuses, for what its probe finds in them; ``engine.families`` says it in a user's words."""

from __future__ import annotations

from typing import Any

from stowage.testing.tiny_models.family import Family, TinySize, common
from stowage.testing.tiny_models.recurrent import mamba2


def _minimax(size: TinySize) -> dict[str, Any]:
    return common(size) | {
        "layer_types": size.pattern("linear_attention", "full_attention"),
        "block_size": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }


def _recurrent_gemma(size: TinySize) -> dict[str, Any]:
    return common(size) | {
        "attention_window_size": 72,
        "lru_width": size.hidden,
        "block_types": ["recurrent", "attention"],
    }


def _mamba2(size: TinySize) -> dict[str, Any]:
    return mamba2(size) | {"num_heads": 2 * size.heads, "head_dim": size.head_dim, "state_size": 16, "n_groups": 1}


REFUSED: tuple[Family, ...] = (
    Family("doge", "doge", common, "Doge", refused="changes its mask by itself"),
    Family("minimax", "minimax", _minimax, "MiniMax-Text-01, M1", refused="own dynamic cache"),
    Family("recurrent_gemma", "recurrent_gemma", _recurrent_gemma, "RecurrentGemma", refused="state of its own"),
    Family("mamba", "mamba", common, "Mamba", refused="keeps no state between tokens"),
    Family("mamba2", "mamba2", _mamba2, "Mamba 2", refused="keeps no state between tokens"),
    Family("falcon_mamba", "falcon_mamba", common, "Falcon Mamba", refused="keeps no state between tokens"),
)
