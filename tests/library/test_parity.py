"""With a restored cache ``generate()`` answers what it answers without, and the cache holds the bytes that were kept:
for every kind of layer, from host memory and from disk.
"""

import copy

import pytest
import torch

from stowage.testing import tiny_models
from tests.depth import mostly_rare
from tests.library.conftest import (
    FULL,
    RECURRENT,
    WAIT_S,
    WINDOWED,
    answer,
    assert_as_plain,
    contents,
    model_of,
    restored,
    same,
    tokens,
)

SHARED = 200
LONG = tokens(300)
MIDDLE = torch.cat([LONG[:, :SHARED], tokens(45, seed=1)], dim=1)
"""Shares what is behind every window here, and ends in the middle of what was kept."""


def restore(prefixes, prompt, expected, **options):
    """The cache, of which so many tokens were restored."""
    before = restored(prefixes)
    cache = prefixes.restore(prompt, **options)
    assert restored(prefixes) - before == expected
    return cache


@pytest.mark.parametrize("family", mostly_rare(FULL + WINDOWED, ["llama", "gemma3", "deepseek_v3"]))
def test_restore_generate_keep(family, prefix_caches, tmp_path):
    """The loop of the README: cold, again, in the middle, and from disk in a new process's place."""
    prefixes = prefix_caches(family, disk=f"{tmp_path / 'cache'}:64MiB")
    cache = prefixes.restore(LONG)
    out = assert_as_plain(family, LONG, cache)
    assert restored(prefixes) == 0
    assert prefixes.keep(cache, out) == 256
    for prompt, expected in ((LONG, 256), (MIDDLE, 192), (LONG[:, :64], 48), (LONG[:, :65], 64), (LONG[:, :30], 0)):
        cache = restore(prefixes, prompt, expected)
        assert cache.get_seq_length() == expected
        prefixes.keep(cache, assert_as_plain(family, prompt, cache))
    prefixes.close()
    again = prefix_caches(family, disk=f"{tmp_path / 'cache'}:64MiB")
    for prompt, expected in ((LONG, 256), (MIDDLE, 192)):
        assert_as_plain(family, prompt, restore(again, prompt, expected, timeout_s=WAIT_S))


@pytest.mark.parametrize("family", mostly_rare(RECURRENT, ["nemotron_h", "lfm2"]))
def test_prefill_generate_keep(family, prefix_caches, tmp_path):
    """Recurrent state is kept where it stands: at every 128 tokens and at the prompt's last boundary."""
    prefixes = prefix_caches(family, disk=f"{tmp_path / 'cache'}:64MiB", snapshot_tokens=128)
    cache = prefixes.prefill(LONG)
    assert cache.get_seq_length() == 256
    assert prefixes.keep(cache, assert_as_plain(family, LONG, cache)) == 256
    for prompt, expected in ((LONG, 256), (MIDDLE, 128), (LONG[:, :128], 0), (LONG[:, :129], 128)):
        cache = restore(prefixes, prompt, expected)
        prefixes.keep(cache, assert_as_plain(family, prompt, cache))
    prefixes.close()
    again = prefix_caches(family, disk=f"{tmp_path / 'cache'}:64MiB")
    for prompt, expected in ((LONG, 256), (MIDDLE, 128)):
        assert_as_plain(family, prompt, restore(again, prompt, expected, timeout_s=WAIT_S))


@pytest.mark.parametrize("family", mostly_rare(["llama", "gemma3", "qwen3_next"], ["llama", "qwen3_next"]))
def test_a_conversation(family, prefix_caches):
    """Each turn finds the one before it; with ``prefill`` for every kind of model."""
    prefixes = prefix_caches(family)
    ids = tokens(130)
    found = []
    for turn in range(3):
        before = restored(prefixes)
        cache = prefixes.prefill(ids)
        found.append(restored(prefixes) - before)
        out = assert_as_plain(family, ids, cache, new_tokens=20)
        prefixes.keep(cache, out)
        ids = torch.cat([out, tokens(50, seed=turn)], dim=1)
    assert found == [0, 128, 192]  # of 130, 200 and 270 tokens


@pytest.mark.parametrize("family", mostly_rare(["llama", "gemma3", "llama4", "qwen3_next"], ["llama", "gemma3"]))
def test_one_cache_that_lives_on(family, prefix_caches):
    """The same cache goes through several turns and is kept after each; a cold start finds all of them."""
    prefixes = prefix_caches(family)
    ids = tokens(101)
    cache = prefixes.prefill(ids)
    for turn in range(4):
        out = assert_as_plain(family, ids, cache, new_tokens=7 + turn)
        prefixes.keep(cache, out)
        ids = torch.cat([out, tokens(40 + turn, seed=turn)], dim=1)
    for length in (101, 140, 200, ids.shape[1]):
        assert_as_plain(family, ids[:, :length], prefixes.restore(ids[:, :length]))
    if family != "qwen3_next":
        assert restored(prefixes) == 64 + 128 + 192 + 256


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "gemma3", "llama4", "qwen3_next", "falcon_h1", "lfm2"])
@pytest.mark.parametrize("dtype", mostly_rare([torch.float32, torch.bfloat16], [torch.bfloat16]), ids=["fp32", "bf16"])
def test_what_is_restored_is_what_was_kept(family, dtype, prefix_caches, tmp_path):
    """Bit for bit, every tensor of every layer, from host memory and from disk."""
    model = copy.deepcopy(model_of(family)).to(dtype)
    prefixes = prefix_caches(model, disk=f"{tmp_path / 'cache'}:64MiB")
    kept = prefixes.prefill(LONG)
    expected = contents(kept)
    assert same(contents(prefixes.restore(LONG)), expected)
    assert prefixes.flush()
    prefixes.drop_host()
    back = prefixes.restore(LONG, timeout_s=WAIT_S)
    assert same(contents(back), expected)
    for one, other in zip(back.layers, kept.layers, strict=True):
        assert type(one) is type(other)
        plain = ("cumulative_length", "has_previous_state", "conv_kernel_size", "device", "dtype", "is_initialized")
        assert {n: getattr(one, n, None) for n in plain} == {n: getattr(other, n, None) for n in plain}


@pytest.mark.parametrize("family", mostly_rare(["llama", "gemma3", "qwen3_next", "falcon_h1"], ["llama", "qwen3_next"]))
def test_a_batch_of_prompts_of_one_length(family, prefix_caches):
    """All rows resume at the longest boundary that all have; each row is stored by itself."""
    prefixes = prefix_caches(family)
    one, two, three = LONG, tokens(300, seed=7), torch.cat([LONG[:, :256], tokens(44, seed=8)], dim=1)
    both = torch.cat([one, two])
    cache = prefixes.prefill(both)
    prefixes.keep(cache, assert_as_plain(family, both, cache))
    assert_as_plain(family, one, prefixes.restore(one))
    assert restored(prefixes) == 256
    assert_as_plain(family, both, prefixes.restore(both))
    assert restored(prefixes) == 3 * 256
    assert_as_plain(family, torch.cat([one, three]), prefixes.restore(torch.cat([one, three])))
    assert restored(prefixes) == 5 * 256
    strange = torch.cat([one, tokens(300, seed=9)])
    assert_as_plain(family, strange, prefixes.restore(strange))
    assert restored(prefixes) == 5 * 256


@pytest.mark.parametrize("family", ["llama", "qwen3_next", "gemma3"])
def test_inference_mode_on_either_side(family, prefix_caches):
    """Restored in inference mode and used outside of it, and the other way round."""
    prefixes = prefix_caches(family)
    with torch.inference_mode():
        cache = prefixes.prefill(LONG)
        prefixes.keep(cache, answer(model_of(family), LONG, cache)[0])
        cache = prefixes.restore(LONG)
    assert_as_plain(family, LONG, cache)
    cache = prefixes.restore(LONG)
    with torch.inference_mode():
        assert_as_plain(family, LONG, cache)
    assert restored(prefixes) == 512


def test_hidden_states_may_be_asked_for(prefix_caches):
    """Transformers puts hooks into the model then, for good: they only record, so it is no other model."""
    model = tiny_models.build("llama")
    prefixes = prefix_caches(model)
    cache = prefixes.restore(LONG)
    asked = {"output_hidden_states": True, "output_attentions": True, "return_dict_in_generate": True}
    out = model.generate(LONG, past_key_values=cache, max_new_tokens=2, pad_token_id=0, **asked)
    assert out.hidden_states
    prefixes.keep(cache, out)
    assert prefixes.restore(LONG).get_seq_length() == 256


def test_sampling_draws_the_same_tokens(prefix_caches):
    model, prefixes = model_of("llama"), prefix_caches("llama")
    drawn = []
    for cache in (None, prefixes.prefill(LONG), prefixes.restore(LONG)):
        torch.manual_seed(3)
        options = {"attention_mask": torch.ones_like(LONG), "max_new_tokens": 12, "do_sample": True, "pad_token_id": 0}
        drawn.append(model.generate(LONG, past_key_values=cache, **options).tolist())
    assert drawn[0] == drawn[1] == drawn[2]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next"])
def test_on_a_cuda_device(family, prefix_caches, tmp_path):
    """A cache comes back to its device, bit for bit."""
    model = copy.deepcopy(model_of(family)).to("cuda")
    prefixes = prefix_caches(model, disk=f"{tmp_path / 'cache'}:64MiB")
    ids = LONG.to("cuda")
    plain, _ = answer(model, ids)
    kept = prefixes.prefill(ids)
    expected = contents(kept)
    assert torch.equal(answer(model, ids, kept)[0], plain)
    assert prefixes.flush()
    prefixes.drop_host()
    cache = prefixes.restore(ids, timeout_s=WAIT_S)
    assert all(tensor.is_cuda for tensor in contents(cache)) and same(contents(cache), expected)
    assert torch.equal(answer(model, ids, cache)[0], plain)


@pytest.mark.parametrize(
    "family",
    mostly_rare(
        ["llama", "gemma3", "llama4", "deepseek_v3", "qwen3_next", "falcon_h1", "lfm2"], ["llama", "gemma3", "lfm2"]
    ),
)
def test_exact(family, prefix_caches, tmp_path):
    """In bfloat16, whatever was stored: the bits of every tensor and every score of a run with nothing stored; of a
    longer prompt, of one that parts, after a restart, and as two rows.
    """
    model = copy.deepcopy(model_of(family)).bfloat16()
    longer, parted = torch.cat([LONG, tokens(90, seed=3)], dim=1), torch.cat([LONG[:, :170], tokens(80, seed=4)], dim=1)
    asked = [LONG, longer, parted, torch.cat([LONG, tokens(LONG.shape[1], seed=5)])]
    expected = []
    for number, prompt in enumerate(asked):
        cold = prefix_caches(model, exact=True, salt=f"{number}")
        expected.append(scored(model, prompt, cold.prefill(prompt)))
        assert restored(cold) == 0
    prefixes = prefix_caches(model, exact=True, disk=f"{tmp_path / 'cache'}:64MiB")
    for turn in range(2):
        for prompt, (scores, out) in zip(asked, expected, strict=True):
            cache = prefixes.prefill(prompt, timeout_s=WAIT_S)
            found = scored(model, prompt, cache)
            assert torch.equal(found[0], scores) and torch.equal(found[1], out)
            prefixes.keep(cache, out)
        assert restored(prefixes) >= 128 * (1 + 3 * turn)
        prefixes.close()
        prefixes = prefix_caches(model, exact=True, disk=f"{tmp_path / 'cache'}:64MiB")


@pytest.mark.parametrize("change", ["threads", "instructions", "torch"])
def test_exact_where_torch_rounds_otherwise(change, prefix_caches, tmp_path, monkeypatch):
    """Another number of threads adds up in another order: what was stored with one is not read with the other."""
    prefixes = prefix_caches("llama", exact=True, disk=f"{tmp_path / 'cache'}:64MiB")
    prefixes.prefill(LONG)
    prefixes.prefill(LONG)
    assert restored(prefixes) > 0
    prefixes.close()
    with monkeypatch.context() as changed:
        if change == "threads":
            changed.setattr(torch, "get_num_threads", lambda: 77)
        elif change == "instructions":
            changed.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "VSX")
        else:
            changed.setattr(torch, "__version__", "2.99.0")
        prefixes = prefix_caches("llama", exact=True, disk=f"{tmp_path / 'cache'}:64MiB")
        prefixes.prefill(LONG, timeout_s=WAIT_S)
        assert restored(prefixes) == 0
    prefixes.prefill(LONG, timeout_s=WAIT_S)
    assert restored(prefixes) > 0


def scored(model, prompt, cache):
    """The scores of all new tokens, and all tokens."""
    out = model.generate(
        prompt,
        past_key_values=cache,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=12,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    return torch.stack(out.scores), out.sequences
