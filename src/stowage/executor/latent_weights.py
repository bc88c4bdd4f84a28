"""The weights that latent attention multiplies queries and mixed latents with, as the kernels take them.

    kv_b_proj   (heads, nope + value, latent)   ->   for queries   (heads, latent, nope): turned, in memory of its own
                                                     for values    (heads, value, latent): where it lies

Owns what is turned, where it is kept from step to step: half of what ``kv_b_proj`` takes, of models whose weights stay
where they are. For DeepSeek-V3 turning it takes as long as reading it several times over.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import Parameter

__all__ = ["LatentWeights"]


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
        rank, nope, width = module.kv_lora_rank, module.qk_nope_head_dim, module.v_head_dim
        own: Tensor = module.kv_b_proj.weight
        weight = own.view(heads, nope + width, rank)
        return self._for_queries(own, weight[:, :nope]), weight[:, nope:]

    def _for_queries(self, own: Tensor, part: Tensor) -> Tensor:
        if not self._keeps or not isinstance(own, Parameter) or own.is_inference():  # others may be new in each step
            return part.transpose(1, 2).contiguous()
        found = self._turned.get(id(own))
        state = own.data_ptr(), own._version
        if found is None or found[1] != state:
            found = self._turned[id(own)] = own, state, part.transpose(1, 2).contiguous()
        return found[2]
