"""Tiny models of every kind of cache, and plain ``generate()`` as what every answer is held against."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from stowage import PrefixCache
from stowage.testing import tiny_models

LOGIT_BOUND = 2e-4
"""float32 sums in another order, as for the engine."""
WAIT_S = 30.0
"""Longer than any load here takes on a busy machine: tests do not depend on speed."""
SIZE = tiny_models.TinySize(layers=2, context_tokens=1024)
COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_chunk_size": 32}
OTHERS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 72, "head_dim": 16},
    "falcon_h1": MAMBA | {"mamba_n_heads": 4, "mamba_d_ssm": 64, "head_dim": 16},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4, "use_mamba_kernels": False},
}
"""Families that the engine does not run: only sliding layers; both kinds of state in each layer; convolutions alone;
and one that Transformers cannot continue.
"""
FULL = ("llama", "qwen3", "deepseek_v3")
WINDOWED = ("gemma3", "llama4", "mistral")
RECURRENT = ("qwen3_next", "nemotron_h", "falcon_h1", "lfm2")


@functools.cache
def model_of(family: str) -> Any:
    """A tiny model, float32, the same for all tests of the run: none may change it."""
    if family not in OTHERS:
        size = tiny_models.TinySize(layers=4, context_tokens=1024) if family in ("gemma3", "nemotron_h") else SIZE
        return tiny_models.build(family, size)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **COMMON | OTHERS[family]))
        tiny_models.vary(model)
    return model.eval()


def tokens(length: int, seed: int = 0, rows: int = 1) -> Tensor:
    """Random tokens ``[rows, length]``, none of them special."""
    return torch.randint(5, 512, (rows, length), generator=torch.Generator().manual_seed(seed))


def answer(model: Any, ids: Tensor, cache: DynamicCache | None = None, new_tokens: int = 6) -> tuple[Tensor, Tensor]:
    """Greedy: all tokens ``[rows, length]`` and the new ones' logits ``[rows, new, vocab]``."""
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return out.sequences, torch.stack(out.logits, 1)


@functools.cache
def _plain(family: str, prompt: tuple[tuple[int, ...], ...], new_tokens: int) -> tuple[Tensor, Tensor]:
    return answer(model_of(family), torch.tensor(prompt), None, new_tokens)


def assert_as_plain(family: str, ids: Tensor, cache: DynamicCache, new_tokens: int = 6) -> Tensor:
    """What ``generate()`` answers with ``cache`` is what it answers without; all tokens."""
    plain, plain_logits = _plain(family, tuple(map(tuple, ids.tolist())), new_tokens)
    found, logits = answer(model_of(family), ids, cache, new_tokens)
    assert torch.equal(found, plain)
    assert float((logits - plain_logits).abs().max()) < LOGIT_BOUND
    return found


def contents(cache: DynamicCache) -> list[Tensor]:
    """Copies of every tensor that attention and recurrence will read."""
    found = []
    for layer in cache.layers:
        if isinstance(layer, CacheLayerMixin) and layer.is_initialized:
            found += [layer.keys, layer.values]
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            found += [t for t in (*layer.conv_states.values(), *layer.recurrent_states.values()) if t is not None]
    return [tensor.clone() for tensor in found]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b) for a, b in zip(one, other, strict=True)
    )


@pytest.fixture
def prefix_caches() -> Iterator[Callable[..., PrefixCache]]:
    """Prefix caches, closed at the test's end after checking their invariants."""
    opened: list[PrefixCache] = []

    def opener(family: str | Any, host_memory: str = "16MiB", disk: str = "", **settings: Any) -> PrefixCache:
        model = model_of(family) if isinstance(family, str) else family
        opened.append(PrefixCache(model, host_memory, disk, **settings))
        return opened[-1]

    yield opener
    for prefixes in opened:
        if not prefixes._background.closed:
            prefixes.check()
            prefixes.close()


def restored(prefixes: PrefixCache) -> int:
    """Tokens restored so far."""
    return int(prefixes.stats()["prefixes"]["tokens_restored"])
