"""How fast this machine could prefill at the very best: operations per token against the speed of a matrix product.

A bound for the time in which nothing was measured yet: a load that hangs right after a start must not cost more than
the recompute that it would have saved (case F6). Real prefill is slower than this, so the bound never lets a load wait
too long. Owns nothing; takes a few milliseconds.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from stowage.executor import kernels

_SIZES = {"cpu": (64, 512), "cuda": (4096, 4096)}
"""Rows and width of the product: it fits into a processor's caches; a GPU is not even busy with less."""
_TRIES, _TRIES_S_MAX = 4, 0.01


def prefill_tokens_per_s_most(model: Any) -> float:
    """Tokens per second that no prefill of ``model`` exceeds on this machine (as far as matrix products decide)."""
    return matmul_operations_per_s(model.dtype, model.device) / max(operations_per_token(model), 1)


def operations_per_token(model: Any) -> int:
    """Multiplications and additions with weights for one token of a prompt, at least.

    Embeddings are looked up and logits are computed for one token of a prompt only. Of experts, which lie stacked in
    one parameter, a token meets ``num_experts_per_tok``; where the config does not say how many, they do not count.
    """
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    apart = {id(p) for module in ends if module is not None for p in module.parameters()}
    per_token = getattr(model.config, "num_experts_per_tok", None) or 0
    total = 0
    for name, parameter in model.named_parameters():
        if id(parameter) in apart or parameter.dim() < 2:
            continue
        stacked = ".experts." in name and parameter.dim() == 3
        total += parameter.numel() * per_token // parameter.shape[0] if stacked else parameter.numel()
    return 2 * total


@torch.inference_mode()
def matmul_operations_per_s(dtype: torch.dtype, device: torch.device) -> float:
    """Speed of one large matrix product; the best of some tries, since others may be at work."""
    product = kernels.product if kernels.wanted(device, dtype) else torch.matmul
    count, width = _SIZES.get(device.type, _SIZES["cpu"])
    rows = torch.ones(count, width, dtype=dtype, device=device)
    weights = torch.ones(width, width, dtype=dtype, device=device)
    tries_s: list[float] = []
    while len(tries_s) < _TRIES and sum(tries_s) < _TRIES_S_MAX:
        began_s = time.perf_counter()
        float(product(rows, weights)[0, 0])  # waits for a device that computes in the background
        tries_s.append(time.perf_counter() - began_s)
    return 2 * count * width * width / max(min(tries_s), 1e-9)
