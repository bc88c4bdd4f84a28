"""Attention with caps and sinks is what the formula says, however it is cut and folded."""

import pytest
import torch

from stowage.executor import attention_scores as module
from stowage.executor.attention_scores import Scores, attend

HEADS, KV_HEADS, WIDTH, VALUE_WIDTH, QUERIES, KEYS = 4, 2, 16, 24, 5, 9
SINKS = torch.tensor([-1.0, 0.5, 2.0, 6.0])


def by_formula(query, keys, values, bias, scores):
    keys, values = (t.repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (keys, values))
    raw = query @ keys.transpose(2, 3) * scores.scale
    if scores.softcap is not None:
        raw = scores.softcap * torch.tanh(raw / scores.softcap)
    raw = raw if bias is None else raw + bias
    if scores.sinks is not None:
        raw = torch.cat((raw, scores.sinks.view(1, -1, 1, 1).expand(*raw.shape[:3], 1)), dim=-1)
    return raw.softmax(-1)[..., : keys.shape[2]] @ values


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sinks", [None, SINKS], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("masked", ["all", "bias", "causal"])
def test_runs_of_tokens(softcap, sinks, masked, monkeypatch):
    monkeypatch.setattr(module, "SCORES_BYTES_MAX", 4 * HEADS * KEYS * 2)  # two queries at a time
    length = QUERIES if masked == "causal" else KEYS
    query, keys = drawn(1, HEADS, QUERIES, WIDTH), drawn(1, KV_HEADS, length, WIDTH)
    values = drawn(1, KV_HEADS, length, VALUE_WIDTH)
    bias = torch.full((QUERIES, length), float("-inf")).triu(length - QUERIES + 1) if masked != "all" else None
    scores = Scores(0.3, softcap, sinks)
    found = attend(query, keys, values, None if masked == "causal" else bias, scores, causal=masked == "causal")
    torch.testing.assert_close(found, by_formula(query, keys, values, bias, scores))


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sinks", [None, SINKS], ids=["no sinks", "sinks"])
def test_single_tokens_with_folded_heads(softcap, sinks):
    """Each row of a kv head is another query head, with a sink of its own; sequences are padded to the longest."""
    query, keys = drawn(3, HEADS, 1, WIDTH), drawn(3, KV_HEADS, KEYS, WIDTH)
    values = drawn(3, KV_HEADS, KEYS, VALUE_WIDTH)
    bias = torch.zeros(3, 1, 1, KEYS)
    bias[1, ..., 4:] = float("-inf")
    scores = Scores(0.3, softcap, sinks)
    found = attend(query.view(3, KV_HEADS, HEADS // KV_HEADS, WIDTH), keys, values, bias, scores)
    torch.testing.assert_close(found.reshape(3, HEADS, 1, VALUE_WIDTH), by_formula(query, keys, values, bias, scores))
