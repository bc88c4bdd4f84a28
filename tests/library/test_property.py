"""Any lengths, any shared beginnings: the answer is the plain one, and the boundary is the longest that was kept."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stowage import PrefixCache
from stowage.testing import tiny_models
from tests.depth import mostly_rare
from tests.library.conftest import LOGIT_BOUND, answer, restored, same, tokens

BLOCK, CHUNK = 8, 16
GEOMETRY = {"block_size": BLOCK, "chunk_blocks": CHUNK // BLOCK, "group_block_size": {"recurrent": CHUNK}}


@functools.cache
def model_of(family: str) -> object:
    changes = {"gemma3": {"sliding_window": 21}, "llama4": {"attention_chunk_size": 19}}
    size = tiny_models.TinySize(hidden=32, layers=2, heads=2, kv_heads=1, context_tokens=256)
    if family == "gemma3":
        changes[family]["layer_types"] = ["sliding_attention", "full_attention"]
    return tiny_models.build(family, size, **changes.get(family, {}))


def longest_kept(prompt: list[int], kept: list[list[int]]) -> int:
    """The rule once more: whole chunks of a kept sequence that the prompt begins with, and at least one token left."""
    best = 0
    for sequence in kept:
        shared = next((i for i, (a, b) in enumerate(zip(prompt, sequence, strict=False)) if a != b), None)
        shared = min(len(prompt), len(sequence)) if shared is None else shared
        whole = shared // CHUNK * CHUNK
        best = max(best, min(whole, (len(prompt) - 1) // BLOCK * BLOCK))
    return best


@pytest.mark.parametrize("family", mostly_rare(["llama", "gemma3", "llama4"], ["llama", "gemma3"]))
@settings(max_examples=5)
@given(data=st.data())
def test_restore_finds_the_longest_prefix(family: str, data: st.DataObject) -> None:
    model = model_of(family)
    kept: list[list[int]] = []
    with PrefixCache(model, "8MiB", **GEOMETRY) as prefixes:
        prompt: list[int] = []
        for turn in range(data.draw(st.integers(2, 4))):
            shared = data.draw(st.integers(0, len(prompt)))
            prompt = prompt[:shared] + tokens(data.draw(st.integers(1, 70)), seed=turn + 31 * shared)[0].tolist()
            ids = torch.tensor([prompt])
            whole = torch.ones_like(ids)
            before = restored(prefixes)
            cache = (prefixes.prefill if data.draw(st.booleans()) else prefixes.restore)(ids, attention_mask=whole)
            assert restored(prefixes) - before == longest_kept(prompt, kept)
            new_tokens = data.draw(st.integers(1, 16))
            plain, plain_logits = answer(model, ids, None, new_tokens)
            out, logits = answer(model, ids, cache, new_tokens)
            assert torch.equal(out, plain) and float((logits - plain_logits).abs().max()) < LOGIT_BOUND
            seen = out[0, :-1].tolist()
            assert prefixes.keep(cache, out, attention_mask=torch.ones_like(out)) == len(seen) // CHUNK * CHUNK
            kept.append(seen)
            prompt = out[0].tolist()
        prefixes.check()


@settings(max_examples=5)
@given(data=st.data())
def test_recurrent_state_comes_back_where_it_stood(data: st.DataObject) -> None:
    """Whatever the cuts: a state that is restored is the one that a forward over exactly these tokens leaves."""
    model = model_of("qwen3_next")
    with PrefixCache(model, "8MiB", snapshot_tokens=data.draw(st.sampled_from([16, 32, 64])), **GEOMETRY) as prefixes:
        first = tokens(data.draw(st.integers(2, 150)), seed=1)
        shared = data.draw(st.integers(0, first.shape[1]))
        second = torch.cat([first[:, :shared], tokens(data.draw(st.integers(1, 40)), seed=2)], dim=1)
        cache = prefixes.prefill(first)
        out = answer(model, first, cache)[0]
        prefixes.keep(cache, out, attention_mask=torch.ones_like(out))
        back = prefixes.restore(second)
        boundary = back.get_seq_length()
        assert boundary % CHUNK == 0 and boundary <= min(shared, second.shape[1] - 1)
        if boundary == (first.shape[1] - 1) // CHUNK * CHUNK:  # the last place of the first prompt: kept for certain
            again = prefixes.restore(first)
            assert same([*_states(again)], [*_states(back)])
        plain, plain_logits = answer(model, second)
        out, logits = answer(model, second, back)
        assert torch.equal(out, plain) and float((logits - plain_logits).abs().max()) < LOGIT_BOUND


def _states(cache: object) -> list[torch.Tensor]:
    states = [layer.recurrent_states for layer in cache.layers if hasattr(layer, "recurrent_states")]
    return [tensor for each in states for tensor in each.values() if tensor is not None]
