"""The weights that latent attention multiplies queries and mixed latents with, by torch or as the kernels take them.

    kv_b_proj   (heads, nope + value, latent)   ->   for queries   (heads, latent, nope): turned, in memory of its own
                                                     for values    (heads, value, latent): where it lies

Owns what is turned, where it is kept from step to step: half of what ``kv_b_proj`` takes, of models whose weights stay
where they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

__all__ = ["LatentWeights", "absorbed"]


class LatentWeights:
    """Of one model. ``keeps``: what was turned is kept until the weight is another one, or has other numbers."""

    def __init__(self, keeps: bool = False) -> None:
        self._keeps = keeps
        self._turned: dict[int, tuple[Tensor, tuple[int, int], Tensor]] = {}
        """By the ``id`` of a weight: itself, so that no other one gets that; where it lies, and how often it was
        changed; turned.
        """

    def of(self, module: Any, heads: int) -> tuple[Tensor, Tensor]:
        """For the queries of ``module``, an attention, and for its values."""
        own: Tensor = module.kv_b_proj.weight
        for_queries, for_values = _parts(module, own, heads)
        return self._for_queries(own, for_queries), for_values

    def _for_queries(self, own: Tensor, part: Tensor) -> Tensor:
        if not self._keeps or not isinstance(own, Parameter) or own.is_inference():  # others may be new in each step
            return part.transpose(1, 2).contiguous()
        found = self._turned.get(id(own))
        state = own.data_ptr(), own._version
        if found is None or found[1] != state:
            found = self._turned[id(own)] = own, state, part.transpose(1, 2).contiguous()
        return found[2]


def absorbed(module: Any, query: Tensor) -> tuple[Tensor, Tensor]:
    """The query as latents see it ``[tokens, heads, latent + rope]``, and what expands a mixed latent into a value
    ``[heads, value_dim, latent]``.
    """
    for_queries, for_values = _parts(module, module.kv_b_proj.weight, query.shape[1])
    nope = module.qk_nope_head_dim
    seen = torch.einsum("bhn,hnr->bhr", query[..., :nope], for_queries)
    return torch.cat((seen, query[..., nope:]), dim=-1), for_values


def _parts(module: Any, weight: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Views of ``weight`` for queries, ``[heads, nope, latent]``, and for values, ``[heads, value, latent]``."""
    nope = module.qk_nope_head_dim
    whole = weight.view(heads, nope + module.v_head_dim, module.kv_lora_rank)
    return whole[:, :nope], whole[:, nope:]
