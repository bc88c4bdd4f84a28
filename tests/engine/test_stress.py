"""Everything at once: shared prefixes, a small pool, small tiers, preemption and cancellations. No answer changes,
nothing leaks.
"""

import random

import pytest

from stowage.engine.sampling_params import SamplingParams
from stowage.executor.block_pool import bytes_needed
from tests.depth import mostly_rare
from tests.engine.conftest import assert_same, greedy, random_prompt

REQUESTS, PREFIXES, CONTEXT = 36, 4, 256
MORE = [pytest.param(family, marks=pytest.mark.every_family) for family in ("llama", "llama4", "nemotron_h")]


@pytest.mark.slow
@pytest.mark.parametrize("family", mostly_rare(["gemma3", "deepseek_v3", "qwen3_next", *MORE], ["gemma3"]))
def test_many_requests(family, engines, references, tmp_path):
    draw = random.Random(family)
    layouts = engines(family, context_tokens=CONTEXT).parts.layout.blocks
    engine = engines(
        family,
        context_tokens=CONTEXT,
        kv_cache_memory=int(bytes_needed(layouts, CONTEXT, 48) * draw.uniform(1.3, 2.5)),
        host_memory=draw.choice(["256KiB", "1MiB"]),
        disk=f"{tmp_path / 'cache'}:4MiB",
        max_num_batched_tokens=48,
        snapshot_tokens=64,
        max_num_seqs=6,
        chunk_blocks=draw.choice([1, 2, 4]),
    )
    shared = [random_prompt(draw.randrange(20, 180), seed=100 + i) for i in range(PREFIXES)]
    asked = []
    for number in range(REQUESTS):
        prefix = draw.choice(shared)
        prompt = prefix[: draw.randrange(1, len(prefix))] + random_prompt(draw.randrange(1, 30), seed=number)
        new_tokens = draw.randrange(1, 30)
        asked.append((prompt, new_tokens, engine.submit(prompt, greedy(new_tokens))))
        if draw.random() < 0.2:
            engine.cancel(engine.submit(prompt, SamplingParams(max_new_tokens=200, ignore_eos=True)))
        if draw.random() < 0.2:
            asked[draw.randrange(len(asked))][2].wait(60)
            engine.check()
        if draw.random() < 0.1:
            engine.drop_device_cache()
        if draw.random() < 0.1:
            engine.drop_host()
    for prompt, new_tokens, request in asked:
        assert request.wait(120), "a request hangs"
        assert_same(request.result(), references(family, CONTEXT).answer(prompt, new_tokens))
    engine.check()
    assert all(pool["used"] == 0 for pool in engine.stats()["pools"])
    assert engine.stats()["engine"]["tokens_reused"] > 0
