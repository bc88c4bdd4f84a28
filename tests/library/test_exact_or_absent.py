"""A stored prefix is found only for the model, the salt and the settings that it was kept under; what is damaged, late
or gone makes a prefix shorter and never an answer another; budgets are hard.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from stowage import Engine, Memory, PrefixCache, SamplingParams
from stowage.storage.protocol import Outcome, Transfer
from stowage.testing import tiny_models
from tests.depth import mostly_rare
from tests.library.conftest import SIZE, WAIT_S, answer, assert_as_plain, contents, model_of, restored, same, tokens

PROMPT = tokens(300)


def kept(prefixes: PrefixCache, family: str, prompt: torch.Tensor = PROMPT) -> None:
    cache = prefixes.prefill(prompt)
    prefixes.keep(cache, assert_as_plain(family, prompt, cache))
    assert prefixes.flush()


def segments(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file() and path.stat().st_size > 8192]


def flip(path: Path, places: Iterable[int]) -> None:
    """Flip one bit of each of these bytes."""
    data = bytearray(path.read_bytes())
    for place in places:
        data[place] ^= 0x10
    path.write_bytes(data)


# damaged


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next"])
def test_a_corrupt_chunk_is_a_shorter_prefix(family, prefix_caches, tmp_path):
    """One bit of token 130 is flipped on disk: the chunks before it are as good as they were."""
    prefixes = prefix_caches(family, disk=f"{tmp_path / 'cache'}:64MiB", snapshot_tokens=64, compression="off")
    kept(prefixes, family)
    (layer,) = [layer for layer in prefixes.restore(PROMPT).layers if type(layer) is DynamicLayer][:1]
    needle = layer.keys[0, 0, 130].numpy().tobytes()
    prefixes.drop_host()
    (path,) = [path for path in segments(tmp_path / "cache") if needle in path.read_bytes()]
    flip(path, [path.read_bytes().index(needle) + 5])
    before = restored(prefixes)
    cache = prefixes.restore(PROMPT, timeout_s=WAIT_S)
    assert restored(prefixes) - before == 128
    assert prefixes.stats()["store"]["load_failures"] == 1
    prefixes.keep(cache, assert_as_plain(family, PROMPT, cache))
    kept(prefixes, family)  # what was bad is written anew
    prefixes.drop_host()
    before = restored(prefixes)
    assert_as_plain(family, PROMPT, prefixes.restore(PROMPT, timeout_s=WAIT_S))
    assert restored(prefixes) - before == 256


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next"])
def test_everything_corrupt_is_a_cold_start(family, prefix_caches, tmp_path):
    prefixes = prefix_caches(family, disk=f"{tmp_path / 'cache'}:64MiB")
    kept(prefixes, family)
    prefixes.drop_host()
    for path in segments(tmp_path / "cache"):
        flip(path, range(4096 + 200, path.stat().st_size, 512))
    assert_as_plain(family, PROMPT, prefixes.restore(PROMPT, timeout_s=WAIT_S))
    assert restored(prefixes) == 0


# not this model's


def test_another_model_salt_or_setting_is_a_miss(prefix_caches, tmp_path):
    disk = f"{tmp_path / 'cache'}:64MiB"
    kept(prefix_caches("llama", disk=disk), "llama")
    one_bit = copy.deepcopy(model_of("llama"))
    with torch.no_grad():
        one_bit.model.norm.weight.view(torch.int32)[0] ^= 1
    eager = copy.deepcopy(model_of("llama"))
    eager.set_attn_implementation("eager")
    half = copy.deepcopy(model_of("llama")).to(torch.bfloat16)
    others = [
        prefix_caches(one_bit, disk=disk),
        prefix_caches(eager, disk=disk),
        prefix_caches(half, disk=disk),
        prefix_caches(tiny_models.build("llama", SIZE, seed=1), disk=disk),
        prefix_caches(tiny_models.build("llama", SIZE, rms_norm_eps=1e-3), disk=disk),
        prefix_caches("llama", disk=disk, salt="acme"),
        prefix_caches("llama", disk=disk, block_size=32),
    ]
    names = {other._namespace for other in others}
    assert len(names) == len(others)
    for other in others:
        other.restore(PROMPT, timeout_s=WAIT_S)
        assert restored(other) == 0
    same_one = prefix_caches(tiny_models.build("llama", SIZE), disk=disk)
    assert_as_plain("llama", PROMPT, same_one.restore(PROMPT, timeout_s=WAIT_S))
    assert restored(same_one) == 256


def test_an_engine_in_the_same_directory_meets_nothing_of_ours(prefix_caches, tmp_path):
    """Its chunks are laid out in another way, under another namespace."""
    disk = f"{tmp_path / 'cache'}:64MiB"
    prefixes = prefix_caches("llama", disk=disk)
    kept(prefixes, "llama")
    expected = answer(model_of("llama"), PROMPT)[0][0, 300:].tolist()
    with Engine(
        tiny_models.build("llama", SIZE), Memory(kv_cache_memory="4MiB", host_memory="8MiB", disk=disk)
    ) as engine:
        (done,) = engine.generate([PROMPT[0].tolist()], SamplingParams(max_new_tokens=6, ignore_eos=True))
        assert done.token_ids == expected and sum(done.reused_tokens.values()) == 0
        assert engine.flush()
    prefixes.drop_host()
    assert_as_plain("llama", PROMPT, prefixes.restore(PROMPT, timeout_s=WAIT_S))
    assert restored(prefixes) == 256


@pytest.mark.parametrize("family", ["gemma3", "qwen3_next"])
def test_a_shared_store_serves_another_machine(family, prefix_caches, tmp_path):
    """One keeps; another, opened after that with nothing of its own, asks the shared store and finds it."""
    pytest.importorskip("obstore")
    shared = f"file://{tmp_path / 'bucket'}"
    kept(prefix_caches(family, object=shared), family)
    other = prefix_caches(family, object=shared, lookup_timeout_s=WAIT_S)
    assert_as_plain(family, PROMPT, other.restore(PROMPT, timeout_s=WAIT_S))
    assert restored(other) == 256


# the caller goes on


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next"])
def test_keep_has_copied_when_it_returns(family, prefix_caches):
    prefixes = prefix_caches(family)
    cache = prefixes.prefill(PROMPT)
    expected = contents(prefixes.restore(PROMPT))
    out = answer(model_of(family), PROMPT, cache)[0]
    prefixes.keep(cache, out)
    back = prefixes.restore(PROMPT)
    for tensor in [t for layer in cache.layers + back.layers for t in vars(layer).values() if torch.is_tensor(t)]:
        tensor.fill_(7)
    for layer in [*cache.layers, *back.layers]:
        for state in [*getattr(layer, "conv_states", {}).values(), *getattr(layer, "recurrent_states", {}).values()]:
            state.fill_(7)
    assert same(contents(prefixes.restore(PROMPT)), expected)


def test_keeping_what_is_stored_copies_nothing(prefix_caches, tmp_path):
    """Also when it is on disk only."""
    prefixes = prefix_caches("gemma3", disk=f"{tmp_path / 'cache'}:64MiB")
    cache = prefixes.restore(PROMPT)
    out = assert_as_plain("gemma3", PROMPT, cache)
    prefixes.keep(cache, out)
    copied = prefixes.stats()["prefixes"]["bytes_kept"]
    assert copied > 0
    assert prefixes.keep(cache, out) == 256
    assert prefixes.flush()
    for forget in (lambda: None, prefixes.drop_host):
        cache = prefixes.restore(PROMPT)
        out = assert_as_plain("gemma3", PROMPT, cache)
        forget()
        assert prefixes.keep(cache, out) == 256
        assert prefixes.stats()["prefixes"]["bytes_kept"] == copied


def test_a_cache_of_the_callers_own(prefix_caches):
    """Of a plain DynamicCache full attention is kept; a window that has passed is gone, and nothing is made up."""
    for family, expected in (("llama", 256), ("gemma3", 0)):
        prefixes = prefix_caches(family)
        cache = DynamicCache(config=model_of(family).config)
        assert prefixes.keep(cache, assert_as_plain(family, PROMPT, cache)) == expected
        assert_as_plain(family, PROMPT, prefixes.restore(PROMPT))
        assert restored(prefixes) == expected
    short = PROMPT[:, :136]  # its window begins five tokens after a chunk did: that chunk is not there whole
    prefixes = prefix_caches("gemma3")
    cache = DynamicCache(config=model_of("gemma3").config)
    out = assert_as_plain("gemma3", short, cache, new_tokens=5)
    assert cache.get_seq_length() == 140 and prefixes.keep(cache, out) == 0
    cache = prefixes.restore(PROMPT)
    assert prefixes.keep(cache, assert_as_plain("gemma3", PROMPT, cache)) == 256
    assert_as_plain("gemma3", PROMPT, prefixes.restore(PROMPT))
    assert_as_plain("gemma3", PROMPT[:, :130], prefixes.restore(PROMPT[:, :130]))
    assert restored(prefixes) == 256 + 128
    prefixes = prefix_caches("gemma3")
    cache = DynamicCache()  # without the config Transformers keeps every token of every layer
    assert prefixes.keep(cache, assert_as_plain("gemma3", PROMPT, cache)) == 256
    assert_as_plain("gemma3", PROMPT, prefixes.restore(PROMPT))


def test_what_left_the_window_is_let_go_once_it_is_stored(prefix_caches):
    prefixes = prefix_caches("gemma3")
    cache = prefixes.restore(PROMPT)
    out = answer(model_of("gemma3"), PROMPT, cache)[0]
    windows = [layer for layer in cache.layers if isinstance(layer, DynamicSlidingWindowLayer)]
    assert {layer.recorded()[1].shape[2] for layer in windows} == {305}
    prefixes.keep(cache, out)
    assert {layer.recorded()[1].shape[2] for layer in windows} == {305 - 256}


def test_a_cropped_or_copied_cache(prefix_caches):
    """What was taken back is not stored under the tokens that came after."""
    prefixes = prefix_caches("gemma3")
    cache = prefixes.restore(PROMPT[:, :60])
    out = answer(model_of("gemma3"), PROMPT[:, :60], cache, new_tokens=10)[0]
    copied = copy.deepcopy(cache)
    cache.crop(-9)
    longer = torch.cat([PROMPT[:, :60], tokens(80, seed=3)], dim=1)
    prefixes.keep(cache, assert_as_plain("gemma3", longer, cache))
    assert_as_plain("gemma3", longer, prefixes.restore(longer))
    assert restored(prefixes) == 128
    prefixes.keep(copied, out)
    again = torch.cat([out, tokens(9, seed=4)], dim=1)
    assert_as_plain("gemma3", again, prefixes.restore(again))
    assert restored(prefixes) == 128 + 64


# budgets and waiting


@pytest.mark.parametrize("family", mostly_rare(["llama", "gemma3", "qwen3_next"], ["gemma3"]))
def test_budgets_are_hard(family, prefix_caches, tmp_path):
    """Many prompts through little room: what is lost is absent, and the limits hold."""
    prefixes = prefix_caches(family, host_memory="1MiB", disk=f"{tmp_path / 'cache'}:4MiB", snapshot_tokens=128)
    assert prefixes.stats()["store"]["host_bytes"] <= 1 << 20
    for seed in range(12):
        cache = prefixes.prefill(tokens(400, seed=seed), timeout_s=WAIT_S)
        prefixes.keep(cache, answer(model_of(family), tokens(400, seed=seed), cache)[0])
        prefixes.flush()
        used = sum(path.stat().st_blocks * 512 for path in (tmp_path / "cache").rglob("*") if path.is_file())
        assert used <= 4 << 20
    for seed in (11, 0):
        prompt = tokens(400, seed=seed)
        assert_as_plain(family, prompt, prefixes.restore(prompt, timeout_s=WAIT_S))


def test_a_prefix_longer_than_host_memory_comes_as_far_as_it_fits(prefix_caches, tmp_path):
    prompt = tokens(900)
    prefixes = prefix_caches("llama", host_memory="8MiB", disk=f"{tmp_path / 'cache'}:64MiB")
    kept(prefixes, "llama", prompt)
    prefixes.close()
    small = prefix_caches("llama", host_memory="256KiB", disk=f"{tmp_path / 'cache'}:64MiB")
    assert_as_plain("llama", prompt, small.restore(prompt, timeout_s=WAIT_S))
    assert 0 < restored(small) < 896


class HungTier:
    """Has every chunk and never brings one, until it is told to give up."""

    name = "hung"

    def __init__(self) -> None:
        self._transfers: list[Transfer] = []
        self.loads = 0
        self.give_up = False

    def lookup(self, keys: list[bytes]) -> np.ndarray:
        return np.full(len(keys), 15, np.uint64)

    def load(self, transfer: Transfer) -> None:
        self.loads += 1
        self._transfers.append(transfer)

    def store(self, transfer: Transfer) -> None:
        self._transfers.append(transfer)

    def poll(self) -> list[Outcome]:
        if not self.give_up:
            return []
        ended, self._transfers = self._transfers, []
        return [Outcome(t.id, np.zeros(len(t.keys), np.bool_), t.masks, "hung") for t in ended]

    def discard(self, keys: list[bytes]) -> None: ...

    def close(self, deadline_s: float) -> None: ...


def test_a_load_that_hangs_is_given_up(prefix_caches):
    """By the caller's limit, and without one by what computing would take: both end, with what host memory has."""
    tier = HungTier()
    prefixes = prefix_caches("llama", tiers=[tier], load_timeout_s=20)
    assert_as_plain("llama", PROMPT, prefixes.restore(PROMPT, timeout_s=0.05))
    assert tier.loads == 1 and restored(prefixes) == 0
    began_s = time.monotonic()
    other = tokens(300, seed=5)
    assert_as_plain("llama", other, prefixes.restore(other))
    assert tier.loads == 2 and restored(prefixes) == 0
    assert time.monotonic() - began_s < 20, "the load limit was reached, not the recompute rule"
    tier.give_up = True


def test_stats_are_plain_numbers(prefix_caches):
    prefixes = prefix_caches("llama")
    kept(prefixes, "llama")
    stats = json.loads(json.dumps(prefixes.stats()))
    assert stats["prefixes"]["restores"] == 1 and stats["prefixes"]["keeps"] == 1
    assert stats["prefixes"]["tokens_kept"] == stats["prefixes"]["tokens_prefilled"] == 256
    assert stats["store"]["host_bytes"] > 0
