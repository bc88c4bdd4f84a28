"""The fallback executor: what ``families`` asks of every family, and besides what only this one could get wrong."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, DynamicLayer

from stowage.config.memory import Memory
from stowage.core.geometry import Kind
from stowage.engine.engine import Engine
from stowage.engine.sampling_params import SamplingParams
from stowage.errors import BudgetError, UnsupportedModelError
from stowage.executor.block_pool import bytes_needed
from stowage.executor.fallback import runner, trial
from stowage.executor.fallback.cache_layers import PooledRows, TokenSpan
from stowage.models.namespace import block_tokens_of
from stowage.testing import tiny_models
from tests.depth import mostly_rare
from tests.engine.conftest import assert_same, greedy, leave_only_disk, random_prompt
from tests.engine.families.world import World
from tests.engine.test_prompt_logprobs import assert_scored

PROMPT = random_prompt(300)
BOTH = ("deepseek_v32", "deepseek_v4")
"""One that keeps all tokens, and one with everything: a window, entries for several tokens, states."""


def ask(engine, references, family, prompt=PROMPT, salt=""):
    """The tokens that were reused for a right answer, by tier."""
    (completion,) = engine.generate([prompt], greedy(4), salt=salt)
    assert_same(completion, references(family).answer(prompt, 4))
    return {tier: tokens for tier, tokens in completion.reused_tokens.items() if tokens}


@pytest.mark.slow
@pytest.mark.parametrize("family", mostly_rare(BOTH, ["deepseek_v32"]))
def test_a_checkpoint_with_disk(family, engines, references, tmp_path):
    """Tenants apart; part of a prompt from host; all of it from disk after a restart; damaged, it is computed anew."""
    memory = {
        "host_memory": "16MiB",
        "disk": f"{tmp_path / 'cache'}:64MiB",
        "snapshot_tokens": 64,
        "max_num_batched_tokens": 100,
    }
    engine = engines(family, **memory)
    assert engine.executor == engine.stats()["executor"] == "fallback"
    assert ask(engine, references, family) == {}
    assert ask(engine, references, family, salt="another") == {}
    engine.drop_device_cache()
    part = PROMPT[:180] + random_prompt(60, seed=7)
    assert ask(engine, references, family, part) == {"host": 128}
    leave_only_disk(engine)
    engine.close()
    engine = engines(family, **memory)
    assert ask(engine, references, family) == {"disk": 256}
    leave_only_disk(engine)
    for segment in (tmp_path / "cache").glob("**/*.seg"):
        data = bytearray(segment.read_bytes())
        data[8192:] = bytes(byte ^ 1 for byte in data[8192:])
        segment.write_bytes(data)
    assert ask(engine, references, family) == {}
    assert engine.stats()["store"]["disk.corrupt"] > 0


@pytest.mark.slow
def test_clients_get_on_in_turns(engines, references):
    """Each step computes a token of everybody; one who leaves is not waited for; pieces are as small as asked."""
    engine = engines("deepseek_v4", max_num_seqs=4)
    prompts = [random_prompt(40 + i, seed=i) for i in range(4)]
    came: list[int] = []
    requests = []
    for number, prompt in enumerate(prompts):

        def note(delta, number=number):
            came.append(number)
            if number == 3 and len([n for n in came if n == 3]) == 5:
                requests[3].cancelled = True

        requests.append(engine.submit(prompt, greedy(16 if number < 3 else 400), note))
    assert all(request.wait(60) for request in requests)
    for request, prompt in zip(requests[:3], prompts, strict=False):
        assert_same(request.result(), references("deepseek_v4").answer(prompt, 16))
    left = requests[3].result()
    assert left.finish_reason == "cancelled" and 5 <= len(left.token_ids) < 16
    first, last = came.index(2), len(came) - 1 - came[::-1].index(0)
    between = came[first:last]
    assert min(between.count(n) for n in range(3)) >= max(between.count(n) for n in range(3)) - 2


@pytest.mark.rare
def test_a_budget_for_one(engines, references):
    """A device with room for little more than one sequence: they take turns, and one that can never fit is told."""
    engine = engines("deepseek_v32", context_tokens=4096, kv_cache_memory="400KiB", max_num_batched_tokens=64)
    prompts = [random_prompt(60 + i, seed=i) for i in range(3)]
    for prompt, completion in zip(prompts, engine.generate(prompts, greedy(30)), strict=True):
        assert_same(completion, references("deepseek_v32").answer(prompt, 30))
    assert engine.stats()["engine"]["preemptions"] > 0
    assert sum(pool.nbytes for pool in engine.parts.pools) <= 400 << 10
    with pytest.raises(BudgetError, match="--kv-cache-memory"):
        engine.submit(random_prompt(3000), greedy(4))


@pytest.mark.rare
def test_longer_than_the_device(engines, references):
    """A third of the device that the sequence needs: older blocks are read in host memory."""
    sizes = {"max_num_batched_tokens": 64, "max_num_seqs": 4, "chunk_blocks": 2}
    need = bytes_needed(engines("deepseek_v32", **sizes).parts.layout.blocks, len(PROMPT) + 4, 64)
    engine = engines("deepseek_v32", kv_cache_memory=need // 3, host_memory="16MiB", **sizes)
    assert ask(engine, references, "deepseek_v32") == {}
    again = ask(engine, references, "deepseek_v32")
    assert sum(again.values()) == 288 and again["host"] > 0
    assert engine.stats()["engine"]["blocks_moved_out"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("family", mostly_rare(BOTH, ["deepseek_v4"]))
def test_the_same_bits(family):
    """``deterministic``: at once, or in pieces beside another prompt, or with a part from host memory."""
    model, prompt, found = tiny_models.build(family, tiny_models.TinySize(layers=3)), PROMPT[:200], []
    for max_num_batched_tokens in (300, 80):
        memory = Memory(
            kv_cache_memory="8MiB", host_memory="16MiB", max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=2
        )
        with Engine(model, memory, deterministic=True) as engine:
            asked = [prompt] if max_num_batched_tokens == 300 else [random_prompt(100), prompt]
            found += engine.generate(asked, greedy(6))[-1:]
            engine.drop_device_cache()
            found += engine.generate([prompt], greedy(6))
            assert sum(found[-1].reused_tokens.values()) == 192
    assert all((one.token_ids, one.logprobs) == (found[0].token_ids, found[0].logprobs) for one in found)


@pytest.mark.parametrize("family", mostly_rare(BOTH, ["deepseek_v32"]))
def test_scores_of_prompts(family, engines, references):
    engine = engines(family, host_memory="16MiB", max_num_batched_tokens=64)
    score = SamplingParams(max_new_tokens=1, prompt_logprobs=3, ignore_eos=True)
    for _ in range(2):
        (completion,) = engine.generate([PROMPT[:150]], score)
        assert_scored(completion, references(family), PROMPT[:150])


def test_scores_in_memory_have_a_limit(engines, references, monkeypatch):
    """A forward has no more tokens than its scores have room for; the last tokens of a long prompt go one by one."""
    monkeypatch.setattr(runner, "SCORES_BYTES_MAX", 4 * 16 * 400)
    engine = engines("deepseek_v4")
    counts = []
    model_forward = runner.forward

    def counted(model, tokens, begin, *rest, **options):
        counts.append((begin, len(tokens)))
        return model_forward(model, tokens, begin, *rest, **options)

    monkeypatch.setattr(runner, "forward", counted)
    prompt = random_prompt(90)
    ask(engine, references, "deepseek_v4", prompt)
    assert counts[0][1] > 1 and all(count * (begin + count) <= 400 or count == 1 for begin, count in counts)


def test_rows_come_back_as_they_went_in():
    """Any rows of blocks in any places, in pieces of any size."""
    generator = np.random.default_rng(5)
    for _ in range(200):
        per_block, heads, dim = (int(n) for n in generator.integers(1, 6, 3))
        blocks = int(generator.integers(1, 9))
        storage = torch.randn(2 * blocks, heads, per_block, dim + 1)
        pool = SimpleNamespace(views={7: (storage[..., 1:], storage[..., :dim])}, group=SimpleNamespace(index=1))
        table = generator.permutation(2 * blocks)[:blocks]
        table = np.sort(table) if generator.random() < 0.7 else table
        rows, at = PooledRows(pool, 7, 1), TokenSpan(0, 0, (np.zeros(0, np.int64), table.astype(np.int64)))
        length = int(generator.integers(1, blocks * per_block + 1))
        whole, begin = torch.randn(1, heads, length, dim), 0
        while begin < length:
            end = int(generator.integers(begin + 1, length + 1))
            rows.put(at, begin, whole[:, :, begin:end])
            begin = end
        first = int(generator.integers(0, length))
        found = rows.get(at, first, length)
        assert found.is_contiguous() and torch.equal(found, whole[:, :, first:])


def test_the_device_holds_no_more_than_a_layer_besides():
    """What a layer hands out is not kept, and Transformers' own classes are left as they were."""
    world = World("deepseek_v4")
    before = [type(layer) for layer in DynamicCache(config=world.model.config).layers]
    with Engine(world.model, Memory(kv_cache_memory="8MiB")) as engine:
        world.check(PROMPT, engine.generate([PROMPT], greedy(3))[0])
        for layer in engine.parts.runner._cache.cache.layers:
            fields = [v for value in vars(layer).values() for v in (value.values() if type(value) is dict else [value])]
            kept = [value for value in fields if isinstance(value, torch.Tensor)]
            assert sum(tensor.numel() for tensor in kept) <= 1
    assert [type(layer) for layer in DynamicCache(config=world.model.config).layers] == before
    with Engine(world.fresh(), Memory(kv_cache_memory="8MiB")) as again:
        world.check(PROMPT, again.generate([PROMPT], greedy(3))[0])


# what is refused


def probe(model):
    return trial.proved_layout(model, block_tokens_of(Memory()), 4)


def test_a_model_that_does_not_go_on_as_it_began():
    with pytest.raises(UnsupportedModelError, match="in one go"):
        probe(tiny_models.build("megatron_bert"))


def test_a_model_that_keeps_something_elsewhere(monkeypatch):
    model = tiny_models.build("bloom")
    plain, last = model.transformer.forward, SimpleNamespace(seen=0.0)

    def forward(*args, **options):
        out = plain(*args, **options)
        out.last_hidden_state, last.seen = out.last_hidden_state + last.seen, out.last_hidden_state.mean()
        return out

    monkeypatch.setattr(model.transformer, "forward", forward)
    with pytest.raises(UnsupportedModelError, match="keeps something elsewhere"):
        probe(model)


def test_a_cache_that_nobody_knows(monkeypatch):
    class Strange(DynamicLayer):
        pass

    monkeypatch.setitem(DYNAMIC_LAYER_TYPE_MAPPING, "full_attention", Strange)
    with pytest.raises(UnsupportedModelError, match="cache of class Strange"):
        probe(tiny_models.build("bloom"))


def test_a_window_that_keeps_more(monkeypatch):
    """A field that the engine would not store is not lost in silence."""
    model = tiny_models.build("deepseek_v4")
    plain = DYNAMIC_LAYER_TYPE_MAPPING["compressed_sparse_attention"]

    class More(plain):
        _layer_type = None

        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.more = torch.zeros(1)

    monkeypatch.setitem(DYNAMIC_LAYER_TYPE_MAPPING, "compressed_sparse_attention", More)
    with pytest.raises(UnsupportedModelError, match="cache of class More"):
        probe(model)


def test_entries_lie_in_blocks_of_whole_rows():
    """Blocks of 16 tokens and an entry for every 48: that group's have 48, and states stand where all have chunks."""
    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 48}
    layout = probe(tiny_models.build("deepseek_v4", compress_rates=rates))
    of = {(b.group.kind, b.layers[0].tensors[0].every): b.group for b in layout.blocks}
    assert of[Kind.FULL, 4].block_tokens == 16 and of[Kind.FULL, 48].block_tokens == 48
    assert of[Kind.RECURRENT, 1].block_tokens == 192
    assert all(192 % group.chunk_tokens == 0 for group in of.values())
