"""Rotary embeddings of a step's queries and keys, in one pass over them and with torch's very bits.

Owns which calls these are; ``recurrent_layers`` puts them in the place of Transformers' own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from stowage.executor import kernels
from stowage.native import extension as _kernel

NAME: Final = "apply_rotary_pos_emb"


class Rotary:
    """Llama's and its likes'."""

    parameters = frozenset("q k cos sin unsqueeze_dim".split())

    @staticmethod
    def takes(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **more: Any) -> bool:
        return not rest and not more and _is_known(q, k, cos, sin)

    @staticmethod
    def compute(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return rotated(q, k, cos, sin)

    @staticmethod
    def agrees(own: Callable[..., Any]) -> bool:
        """To the bit."""
        for dtype in kernels.DTYPES:
            for width in (6, 64):
                q, k, cos, sin = (numbers(1, heads, 9, width, seed=heads).to(dtype) for heads in (4, 2, 1, 3))
                cos, sin = cos[:, 0], sin[:, 0]
                if not all(map(torch.equal, own(q, k, cos, sin), rotated(q, k, cos, sin))):
                    return False
        return True


def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """``q`` and ``k`` ``[1, heads, tokens, width]`` times ``cos``, plus what is there when their halves change places
    and the second one its sign, times ``sin`` ``[1, tokens, width]``.
    """
    tokens, width = q.shape[2:]
    cos, sin = cos.contiguous(), sin.contiguous()
    q, k = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k))
    queries, keys = (x.new_empty((1, tokens, x.shape[1], width)) for x in (q, k))
    each: list[int] = []
    for x, out in ((q, queries), (k, keys)):
        each += [x.data_ptr(), out.data_ptr(), x.shape[1], x.stride(2), x.stride(1)]
    half, threads = q.dtype is torch.bfloat16, torch.get_num_threads()
    _kernel.rotate(cos.data_ptr(), sin.data_ptr(), tokens, width, half, threads, *each)
    return queries.transpose(1, 2), keys.transpose(1, 2)


def alike(*tensors: Tensor | None) -> bool:
    """Whether all are on a CPU and of one type that the kernels take."""
    there = [tensor for tensor in tensors if tensor is not None]
    return all(t.device.type == "cpu" and t.dtype is there[0].dtype for t in there) and there[0].dtype in kernels.DTYPES


def _is_known(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    one = all(x.dim() == 4 and x.shape[0] == 1 and x.shape[2:] == q.shape[2:] for x in (q, k))
    return alike(q, k, cos, sin) and one and q.shape[3] % 2 == 0 and cos.shape == sin.shape == (1, *q.shape[2:])


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Random ones, to try functions with."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
