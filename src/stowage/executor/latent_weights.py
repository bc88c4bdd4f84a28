"""The absorbed weights of multi-head latent attention (MLA), for torch or for the kernels.

    kv_b_proj   (heads, nope + value, latent)   ->   for queries   (heads, latent, nope): transposed, a copy
                                                     for values    (heads, value, latent): a view

Owns when latents are expanded to keys and values: models ask for it in each step, but attention seldom reads them. Also
owns the transposed copies, half the size of ``kv_b_proj``, which are kept between steps if weights stay in memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter


class LatentWeights:
    """One model's absorbed weights. ``keeps``: transposed copies, until a weight is replaced or changed in place."""

    def __init__(self, keeps: bool = False) -> None:
        self._keeps = keeps
        self._turned: dict[int, tuple[Tensor, tuple[int, int], Tensor]] = {}
        """By a weight's ``id``: the weight (so that no other gets it), its address and version, the transposed copy."""

    def of(self, module: Any, heads: int) -> tuple[Tensor, Tensor]:
        """The weights for queries and for values of the attention ``module``."""
        own: Tensor = module.kv_b_proj.weight
        for_queries, for_values = _parts(module, own, heads)
        return self._for_queries(own, for_queries), for_values

    def stays(self, module: Any) -> bool:
        """Whether the result of ``of`` for ``module`` is kept between steps."""
        return self._keeps and _is_plain(module.kv_b_proj.weight)

    def _for_queries(self, own: Tensor, part: Tensor) -> Tensor:
        if not self._keeps or not _is_plain(own):
            return part.transpose(1, 2).contiguous()
        found = self._turned.get(id(own))
        state = own.data_ptr(), own._version
        if found is None or found[1] != state:
            found = self._turned[id(own)] = own, state, part.transpose(1, 2).contiguous()
        return found[2]


def absorbed(module: Any, query: Tensor) -> tuple[Tensor, Tensor]:
    """The absorbed query ``[tokens, heads, latent + rope]``, and the weight that expands an attention-weighted latent
    to a value, ``[heads, value_dim, latent]``.
    """
    for_queries, for_values = _parts(module, module.kv_b_proj.weight, query.shape[1])
    nope = module.qk_nope_head_dim
    seen = torch.einsum("bhn,hnr->bhr", query[..., :nope], for_queries)
    return torch.cat((seen, query[..., nope:]), dim=-1), for_values


def _is_plain(weight: Any) -> bool:
    """Whether it is an ordinary parameter; other tensors may be new in each step."""
    return isinstance(weight, Parameter) and not weight.is_inference()


def unexpanded(module: Any, latent: Tensor) -> tuple[Tensor, Tensor]:
    """Placeholders with the shapes of ``module.expand_kv``'s keys and values: paged attention reads latents."""
    nope, value = module.qk_nope_head_dim, module.v_head_dim
    shape = latent.shape[0], module.kv_b_proj.out_features // (nope + value), latent.shape[2]
    one = latent[..., :1]
    return one.expand(*shape, nope + module.qk_rope_head_dim), one.expand(*shape, value)


def expanded(module: Any, latents: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of ``latents`` ``[batch, 1, tokens, latent + rope]``, as the module expands them."""
    rank = module.kv_lora_rank
    keys, values = type(module).expand_kv(module, latents[..., :rank], latents[..., rank:])
    return keys, values


def _parts(module: Any, weight: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Views of ``weight`` for queries, ``[heads, nope, latent]``, and for values, ``[heads, value, latent]``."""
    nope = module.qk_nope_head_dim
    whole = weight.view(heads, nope + module.v_head_dim, module.kv_lora_rank)
    return whole[:, :nope], whole[:, nope:]
