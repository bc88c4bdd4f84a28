"""Contexts longer than the device: their oldest blocks are read from host memory, and no answer changes by it."""

from __future__ import annotations

import random
import re
import threading
from functools import partial

import pytest
import torch

from stowage.config.memory import Memory
from stowage.core.geometry import Kind
from stowage.engine.capacity import blocks_at_work
from stowage.engine.engine import Engine
from stowage.errors import BudgetError, TransferError
from stowage.executor import streamed_attention
from stowage.executor.attention_scores import Scores, attend
from stowage.executor.batch import StreamStep
from stowage.executor.block_pool import blocks_needed
from stowage.executor.block_table import OFFLOADED
from stowage.native import is_wanted
from tests.answers import answer_bits
from tests.depth import mostly_rare
from tests.engine.conftest import assert_nothing_is_pinned, check_and_close, greedy, random_prompt
from tests.engine.families.world import World
from tests.engine.test_failures import FailingTransfer

FAMILIES = ("llama", "gemma3", "deepseek_v3", "qwen3_next", "gpt_oss", "gemma2")
"""Full attention; windows; latents; recurrent state; sinks; soft-capping."""
PROMPT, NEW_TOKENS = random_prompt(300, seed=3), 24
SMALL = {"block_size": 16, "chunk_blocks": 2, "snapshot_tokens": 64, "max_num_batched_tokens": 96}
WORLDS: dict[str, World] = {}


def world_of(family):
    if family not in WORLDS:
        WORLDS[family] = World(family)
    return WORLDS[family]


@pytest.fixture
def opened():
    """Engines of a family on a device that holds ``percent`` of what the prompt and its answer need."""
    engines = []

    def engine(family, percent=100, *, deterministic=False, **memory):
        world = world_of(family)
        sizes = SMALL | {"host_memory": "8MiB"} | memory
        # Without kernels the bits of keys that are offloaded depend on how much of them is: exact answers are refused
        # there.
        how = {"deterministic": deterministic, "batch_dependent": not is_wanted()}
        if "kv_cache_memory" not in sizes:
            with Engine(world.model, Memory(kv_cache_memory="8MiB", **SMALL), **how) as roomy:
                sizes["kv_cache_memory"] = device_bytes(roomy.parts.layout.blocks, percent)
        made = Engine(world.model, Memory(**sizes), **how)
        engines.append(made)
        return made

    yield engine
    check_and_close(engines)


def device_bytes(layouts, percent):
    """Windows and states have what they need; full groups ``percent`` of it, at least what an engine can open with."""
    least = max(layout.group.block_tokens for layout in layouts)
    total = 0
    for layout in layouts:
        group = layout.group
        blocks = blocks_needed(layout.group, len(PROMPT) + NEW_TOKENS, SMALL["max_num_batched_tokens"])
        if group.kind is Kind.FULL:
            blocks = max(blocks * percent // 100, blocks_at_work(group, 1), -(-least // group.block_tokens))
        total += (blocks + 1) * group.bytes_per_block
    return total


def moved(engine):
    return engine.stats()["engine"]["blocks_moved_out"]


@pytest.mark.parametrize("kernels", mostly_rare([True, False], [True]))
@pytest.mark.parametrize("family", FAMILIES)
def test_larger_than_the_device(family, kernels, opened, monkeypatch):
    """A prompt and its answer on half, a quarter and a tenth of the device that they need: nothing is computed twice,
    and the device's own limit holds. Then the same prompt again, most of it from host memory.
    """
    if not kernels:
        monkeypatch.setenv("STOWAGE_PURE_PYTHON", "1")
        monkeypatch.setattr(streamed_attention, "PIECE_KEYS_MAX", 80)
    for percent in (50, 10) if kernels else (25,):
        engine = opened(family, percent)
        (completion,) = engine.generate([PROMPT], greedy(NEW_TOKENS))
        world_of(family).check(PROMPT, completion)
        assert moved(engine) > 0
        assert engine.stats()["engine"]["tokens_computed"] == len(PROMPT) + NEW_TOKENS - 1
        engine.drop_device_cache()
        asked = PROMPT[:261] + random_prompt(30, seed=percent)
        (again,) = engine.generate([asked], greedy(NEW_TOKENS))
        world_of(family).check(asked, again)
        assert again.reused_tokens["host"] == 256
        assert all(pool["used"] == 0 for pool in engine.stats()["pools"])
        assert_nothing_is_pinned(engine)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("tokens", "start"), [(1, 70), (20, 60)])
def test_pieces_are_summed_as_the_whole(softcap, sinks, tokens, start, monkeypatch):
    """Keys in pieces of 32, every other block offloaded, against softmax over all of them at once."""
    monkeypatch.setattr(streamed_attention, "PIECE_KEYS_MAX", 32)
    length, size = start + tokens, 16
    pool, arena = torch.randn(2, 6, size, 2, 8), torch.randn(2, 6, size, 2, 8)
    query = torch.randn(tokens, 4, 8)
    scores = Scores(0.6, softcap, torch.tensor([3.0, -1.0, 0.5, 6.0]) if sinks else None)
    step = StreamStep(0, tokens, start, torch.tensor([OFFLOADED - 3, 2, OFFLOADED, 4, OFFLOADED - 1]))
    found = streamed_attention.attend(None, query, tuple(pool), tuple(arena), step, scores)
    blocks = torch.stack([arena[:, 3], pool[:, 2], arena[:, 0], pool[:, 4], arena[:, 1]], 1)
    keys, values = blocks.flatten(1, 2)[:, :length].transpose(1, 2)[:, None]
    bias = torch.zeros(tokens, length).masked_fill_(
        torch.arange(length) > start + torch.arange(tokens)[:, None], float("-inf")
    )
    expected = attend(query.transpose(0, 1)[None], keys, values, bias, scores)[0].transpose(0, 1)
    assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES[:5])
def test_the_same_bits(family, opened):
    """Deterministic: as on a device with room for all of it, cold and from host memory."""
    expected = answer_bits(opened(family, deterministic=True).generate([PROMPT], greedy(NEW_TOKENS))[0])
    engine = opened(family, 50, deterministic=True)
    for where in ("cold", "host"):
        (completion,) = engine.generate([PROMPT], greedy(NEW_TOKENS))
        assert answer_bits(completion) == expected
        assert bool(completion.reused_tokens["host"]) == (where == "host")
        engine.drop_device_cache()
    assert moved(engine) > 0


@pytest.mark.parametrize("host", ["8MiB", "192KiB"])
def test_two_long_ones_and_a_short_one(host, opened):
    """With host memory for both they run side by side, and the short one does not wait; else the second does."""
    engine = opened("llama", 40, host_memory=host)
    asked = [(PROMPT, 24), (random_prompt(310, seed=4), 14), (random_prompt(20, seed=5), 4)]
    ended = []
    with engine._lock:
        requests = [
            engine.submit(prompt, greedy(count), lambda delta, n=n: delta.completion and ended.append(n))
            for n, (prompt, count) in enumerate(asked)
        ]
    assert all(request.wait(60) for request in requests), "a request hangs"
    world_of("llama").check_all([prompt for prompt, _ in asked], [request.result() for request in requests])
    assert ended[0] == (2 if host == "8MiB" else 0)
    counters = engine.stats()["engine"]
    assert counters["blocks_moved_out"] > 0
    assert counters["tokens_computed"] == sum(len(prompt) + count - 1 for prompt, count in asked)


def test_preempted_by_an_older_one(opened):
    """A short sequence that is older and grows to the whole device: the long one leaves with what is offloaded already,
    and comes back; nothing is computed twice.
    """
    engine = opened("llama", 40)
    prompts = [random_prompt(60, seed=6), PROMPT]
    handles = [engine.submit(p, greedy(c)) for p, c in zip(prompts, (69, 60), strict=True)]
    assert all(handle.wait(60) for handle in handles), "a request hangs"
    completions = [handle.result() for handle in handles]
    world_of("llama").check_all(prompts, completions)
    counters = engine.stats()["engine"]
    assert completions[1].preemptions > 0 == counters["preemptions_recomputed"]
    assert counters["tokens_computed"] == sum(map(len, prompts)) + 68 + 59


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v3", "qwen3_next"])
def test_preempted_again_and_again(family, opened):
    """While its prompt is computed, and while it answers; once it has to be computed again."""
    engine = opened(family, 40)
    scheduler, schedule, steps = engine._scheduler, engine._scheduler.schedule, []

    def interrupted():
        steps.append(len(steps))
        if len(steps) in (3, 5, 10, 15):
            sequence = scheduler.running[0]
            scheduler._preempt(sequence)
            for pool, spilled in zip(
                engine.parts.pools, scheduler._preemption_swap._swapped[sequence.id][1], strict=True
            ):
                if pool.group.kind is Kind.FULL:
                    assert len(spilled.held.blocks) <= pool.group.blocks_per_chunk, "it could come back to less"
            engine.check()
            if len(steps) == 10:
                scheduler._preemption_swap.drop_newest()
                engine.check()
        return schedule()

    scheduler.schedule = interrupted
    (completion,) = engine.generate([PROMPT], greedy(NEW_TOKENS))
    world_of(family).check(PROMPT, completion)
    counters = engine.stats()["engine"]
    assert (counters["preemptions"], counters["preemptions_recomputed"]) == (4, 1)
    assert moved(engine) > 0
    assert_nothing_is_pinned(engine)


def test_what_others_hold_in_host_memory_is_given_up(opened):
    """A preempted short sequence holds slots that the long one, which alone runs, comes to need: it is recomputed."""
    engine = opened("llama", 40, host_memory="192KiB", max_num_seqs=1)
    scheduler, schedule, steps = engine._scheduler, engine._scheduler.schedule, []

    def interrupted():
        steps.append(len(steps))
        if len(steps) == 4:
            scheduler._preempt(scheduler.running[0])
            scheduler.waiting.rotate()  # the long one first
        return schedule()

    scheduler.schedule = interrupted
    asked = [(random_prompt(50, seed=7), 20), (PROMPT, 200)]
    with engine._lock:
        handles = [engine.submit(prompt, greedy(count)) for prompt, count in asked]
    assert all(handle.wait(60) for handle in handles), "a request hangs"
    world_of("llama").check_all([prompt for prompt, _ in asked], [handle.result() for handle in handles])
    assert engine.stats()["engine"]["preemptions_recomputed"] == 1


def test_a_short_one_grows_beside_a_long_one(opened):
    """The long one, which is older, makes room and computes in smaller pieces: nobody is preempted."""
    engine = opened("llama", 40)
    asked = [(PROMPT, 70), (random_prompt(20, seed=8), 60)]
    with engine._lock:
        handles = [engine.submit(prompt, greedy(count)) for prompt, count in asked]
    assert all(handle.wait(60) for handle in handles), "a request hangs"
    world_of("llama").check_all([prompt for prompt, _ in asked], [handle.result() for handle in handles])
    assert engine.stats()["engine"]["preemptions"] == 0
    assert handles[1].progress().finished_s < handles[0].progress().finished_s


def test_an_open_end_makes_nothing_long(opened):
    """Two short prompts whose answers might outgrow the device, and then host memory: they run beside each other."""
    engine = opened("llama", 40, host_memory="96KiB")
    came, both = [], threading.Event()

    def take(number, delta):
        came.append((number, delta.completion is not None))
        if {(0, False), (1, False)} <= set(came):
            both.set()

    handles = [engine.submit(random_prompt(20, seed=n), greedy(300), partial(take, n)) for n in range(2)]
    assert both.wait(30) and not any(ended for _, ended in came), "one waited for the other"
    for handle in handles:
        engine.cancel(handle)
    assert all(handle.wait(30) for handle in handles)


def test_two_that_become_long(opened):
    """Short prompts with answers that outgrow the device, and host memory together: they end one after the other."""
    engine = opened("llama", 40, host_memory="192KiB")
    prompts = [random_prompt(40, seed=n) for n in range(2)]
    world_of("llama").check_all(prompts, engine.generate(prompts, greedy(280)))
    assert moved(engine) > 0


def test_pieces_fill_the_device(opened):
    """A step of 150 tokens, and a device of 128: two pieces of 128 tokens and one of 44."""
    engine = opened("llama", 40, max_num_batched_tokens=150)
    (completion,) = engine.generate([PROMPT], greedy(1))
    world_of("llama").check(PROMPT, completion)
    assert engine._scheduler._admissions.forwards == 3


def test_from_disk(opened, tmp_path):
    """A stored prompt larger than the device, after a restart: read from host memory, no block of it is copied."""
    stored = {"host_memory": "8MiB", "disk": f"{tmp_path / 'cache'}:32MiB"}
    first = opened("llama", **stored)
    first.generate([PROMPT], greedy(1))
    assert first.flush()
    first.close()
    engine = opened("llama", 25, **stored)
    copied = []
    transfer = FailingTransfer(engine)
    transfer.load = lambda plan, storage: copied.append(plan.copies)
    (completion,) = engine.generate([PROMPT], greedy(NEW_TOKENS))
    world_of("llama").check(PROMPT, completion)
    assert completion.reused_tokens["disk"] == 288 and not copied
    engine._kv_manager.transfer = transfer.real


def test_cancelled(opened):
    """Its slots and blocks are free again."""
    engine = opened("llama", 25)
    handle = engine.submit(PROMPT, greedy(200))
    while not handle.progress().new_tokens and not handle.done:
        handle.wait(0.001)
    engine.check()
    engine.cancel(handle)
    assert handle.wait(30)
    engine.check()
    assert moved(engine) > 0
    assert_nothing_is_pinned(engine)


def test_host_memory_too_small(opened):
    """The error names both budgets, and what it says is the least that works."""
    for host in ("0", "96KiB"):
        engine = opened("llama", 40, host_memory=host)
        with pytest.raises(BudgetError) as refused:
            engine.submit(PROMPT, greedy(200))
        assert "--kv-cache-memory 264KiB" in str(refused.value)
        least = re.search(r"--host-memory (\d+KiB)", str(refused.value))[1]
    engine = opened("llama", 40, host_memory=least)
    (completion,) = engine.generate([PROMPT], greedy(200))
    world_of("llama").check(PROMPT, completion)
    with pytest.raises(BudgetError):
        opened("llama", 40, host_memory=f"{int(least[:-3]) - 16}KiB").submit(PROMPT, greedy(200))


def test_copies_that_fail(opened):
    """Nothing can be stored in host memory: a short prompt is answered, the long one's request ends in a clear error,
    and once copies work again it is answered too.
    """
    engine = opened("llama", 25)
    transfer = FailingTransfer(engine, "store")
    long, short = engine.submit(PROMPT, greedy(NEW_TOKENS)), engine.submit(PROMPT[:20], greedy(4))
    assert long.wait(30) and short.wait(30), "a request hangs"
    world_of("llama").check(PROMPT[:20], short.result())
    with pytest.raises(TransferError, match="could not be copied to host memory"):
        long.result()
    engine.check()
    transfer.failing = set()
    (completion,) = engine.generate([PROMPT], greedy(NEW_TOKENS))
    world_of("llama").check(PROMPT, completion)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("seed", mostly_rare(range(2), [0]))
def test_any_schedule(family, seed, opened, tmp_path):
    """Long and short prompts that begin alike, at random moments, some cancelled, caches dropped, little memory."""
    draw = random.Random(f"{family}{seed}")
    host = draw.choice(["256KiB", "384KiB", "1MiB"])
    engine = opened(
        family, draw.choice([20, 35, 60]), host_memory=host, disk=f"{tmp_path / 'cache'}:4MiB", max_num_seqs=4
    )
    trunks = [random_prompt(320, seed=50 + n) for n in range(2)]
    asked, cancelled = [], []
    for number in range(12):
        length = draw.choice([draw.randrange(1, 60), draw.randrange(200, 320)])
        prompt = draw.choice(trunks)[:length] + random_prompt(draw.randrange(1, 20), seed=number)
        asked.append((prompt, engine.submit(prompt, greedy(draw.randrange(1, 30)))))
        if draw.random() < 0.3:
            cancelled.append(engine.submit(prompt, greedy(100)))
            engine.cancel(cancelled[-1])
        if draw.random() < 0.3:
            draw.choice(asked)[1].wait(30)
            engine.check()
        if draw.random() < 0.2:
            engine.drop_device_cache()
        if draw.random() < 0.2:
            engine.drop_host()
    for prompt, request in asked:
        assert request.wait(60), "a request hangs"
        world_of(family).check(prompt, request.result())
    assert all(request.wait(60) for request in cancelled), "a request hangs"
    engine.check()
    assert_nothing_is_pinned(engine)


def test_without_kernels_exact_answers_need_the_device(opened, monkeypatch):
    """torch sums keys that are offloaded in another order; the message says what helps."""
    monkeypatch.setenv("STOWAGE_PURE_PYTHON", "1")
    with (
        Engine(world_of("llama").model, Memory(kv_cache_memory="160KiB", host_memory="8MiB", **SMALL)) as engine,
        pytest.raises(BudgetError, match="Only --batch-dependent lets a sequence be longer than the device"),
    ):
        engine.submit([5] * 450, greedy(1))


def test_without_kernels_a_length_beyond_the_device_does_not_cost_exactness(opened, monkeypatch):
    """Host memory would hold the length without exact answers; the engine opens so where that is asked for."""
    monkeypatch.setenv("STOWAGE_PURE_PYTHON", "1")
    memory = Memory(kv_cache_memory="160KiB", host_memory="8MiB", max_model_len=450, **SMALL)
    told = "max_model_len is 450, and a KV cache of 160 KiB holds .* Only --batch-dependent lets a sequence be longer"
    with pytest.raises(BudgetError, match=told):
        Engine(world_of("llama").model, memory)
    with Engine(world_of("llama").model, memory, batch_dependent=True) as engine:
        assert engine.sequence_tokens_max >= 450
