"""Chooses the executor of a model, the paged one or the fallback, and finds out what the model caches.

Owns the choice between the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stowage.core.geometry import Kind
from stowage.executor.fallback import trial
from stowage.models import layout, paged_layout
from stowage.models.families import ALONE
from stowage.models.layout import ModelLayout


def probe(model: Any, block_tokens: Mapping[Kind, int], chunk_blocks: int, identity: str = "") -> ModelLayout:
    """Classify ``model``'s layers and lay out one block per group; see ``models.paged_layout.probe``.

    Raises ``UnsupportedModelError`` when what the model does, does not fit its config, or when the fallback does not
    give the answers of Transformers' own cache.
    """
    layout.refuse_unsupported(model.config)
    if model.config.model_type in ALONE:
        return trial.proved_layout(model, block_tokens, chunk_blocks)
    return paged_layout.probe(model, block_tokens, chunk_blocks, identity)
