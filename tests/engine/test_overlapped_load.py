"""A prefix whose front is computed while a tier brings its end: the same answer, and both sides have done a part.

The tier of these tests brings its k-th transfer once so many tokens were computed, whatever the time is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from docs.examples.dict_tier import DictTier
from stowage.cache import cost_model, flow, overlapped_load
from stowage.cache.prefix_planner import PrefixPlanner
from stowage.config.memory import Memory
from stowage.engine.engine import Engine
from stowage.errors import TransferError
from stowage.storage.protocol import Outcome, Transfer
from tests.depth import mostly_rare
from tests.engine.conftest import assert_nothing_is_pinned, assert_same, greedy, leave_only_disk, random_prompt
from tests.nursery import wait_until

PROMPT_TOKENS = 700
NEW = 12
FAMILIES = ["llama", "gemma3", "gpt_oss", "llama4", "qwen3_next", "jamba", "deepseek_v3", "falcon"]
"""Full, windows, windows with sinks, chunked-local, two kinds of states, latents, the fallback."""


class HeldTier(DictTier):
    """``computed``: tokens that the engine has computed by now. Transfers come in the order in which they were asked
    for, the k-th when ``computed`` has passed ``after[k]`` (the last of them is for all that follow).
    """

    after: Sequence[float] = (0,)
    computed: Callable[[], int]
    begun_at = 0
    asked = 0
    spoiled: frozenset[int] = frozenset()

    def begin(self, after: Sequence[float]) -> None:
        self.after, self.begun_at, self.asked, self._held = after, self.computed(), 0, []

    def load(self, transfer: Transfer) -> None:
        place, self.asked = self.asked, self.asked + 1
        self._held.append((self.after[min(place, len(self.after) - 1)], place, transfer))

    def poll(self) -> list[Outcome]:
        done = self.computed() - self.begun_at
        for item in [item for item in self._held if item[0] <= done]:
            self._held.remove(item)
            super().load(item[2])
            if item[1] in self.spoiled:
                self._outcomes[-1].ok[:] = False
                self._outcomes[-1].masks[:] = 0
        return super().poll()


@pytest.fixture
def met(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every prefix that a tier has is met, and speeds are what these tests say: a token takes as long to load as to
    compute, one millisecond, and a transfer is asked for with every chunk.
    """
    monkeypatch.setattr(cost_model.CostModel, "worth_overlapping", lambda *_: True)
    monkeypatch.setattr(cost_model.CostModel, "recompute_s", lambda _self, tokens: tokens / 1000)
    monkeypatch.setattr(cost_model.CostModel, "prefill_s", lambda _self, tokens: tokens / 1000)
    monkeypatch.setattr(cost_model.CostModel, "load_s", lambda _self, below: 0.5 if below else 0.0)
    monkeypatch.setattr(flow, "TRANSFER_BYTES_MAX", 1)


def engine_with(path: Any, tier: HeldTier, **memory: Any) -> Engine:
    sizes = {
        "kv_cache_memory": "16MiB",
        "host_memory": "32MiB",
        "snapshot_tokens": 128,
        "max_num_batched_tokens": 192,
        "load_timeout_s": 60,
    }
    deterministic = memory.pop("deterministic", False)
    engine = Engine(path, Memory(**(sizes | memory)), tiers=[tier], deterministic=deterministic)
    tier.computed = lambda: engine._kv_manager.counters.tokens_computed
    tier.begin((0,))
    return engine


@contextmanager
def stored(path: Any, tier: HeldTier, prompt: list[int], after: Sequence[float]) -> Iterator[Engine]:
    """An engine whose tier alone has the prompt, and brings it as ``after`` says."""
    with engine_with(path, tier) as engine:
        engine.generate([prompt], greedy(1))
        leave_only_disk(engine)
        tier.begin(after)
        yield engine


@pytest.mark.parametrize("family", mostly_rare(FAMILIES, ["llama", "gemma3", "qwen3_next", "deepseek_v3", "falcon"]))
@pytest.mark.usefixtures("met")
def test_front_computed_and_end_loaded(family, checkpoints, references):
    tier, prompt = HeldTier(64 << 20), random_prompt(PROMPT_TOKENS)
    expected = references(family).answer(prompt, NEW)
    with engine_with(checkpoints(family), tier) as engine:
        assert_same(engine.generate([prompt], greedy(NEW))[0], expected)
        leave_only_disk(engine)
        tier.begin((100,))
        before = engine._kv_manager.counters.tokens_computed
        (completion,) = engine.generate([prompt], greedy(NEW))
        assert_same(completion, expected)
        computed = engine._kv_manager.counters.tokens_computed - before
        reused = completion.reused_tokens["dict"]
        assert 100 <= computed < PROMPT_TOKENS, "the front was computed, the end was not"
        assert reused == sum(completion.reused_tokens.values()) > 0
        assert reused + computed == PROMPT_TOKENS + NEW - 1, "no token is done twice, none is left out"
        assert engine.stats()["engine"]["overlapped_loads"] == 1
        engine.check()
        assert not len(engine._scheduler._overlapped_loads)
        assert_nothing_is_pinned(engine)
        (again,) = engine.generate([prompt], greedy(NEW))  # what was joined is found on the device
        assert_same(again, expected)
        assert again.reused_tokens["device"] > PROMPT_TOKENS - 200


@pytest.mark.parametrize("family", mostly_rare(["llama", "gemma3", "qwen3_next"], ["gemma3"]))
@pytest.mark.usefixtures("met")
def test_deterministic_bits(family, checkpoints):
    tier, prompt = HeldTier(64 << 20), random_prompt(PROMPT_TOKENS)
    with engine_with(checkpoints(family), tier, deterministic=True) as engine:
        (alone,) = engine.generate([prompt], greedy(NEW))
        for after in (1, 200, 400):
            leave_only_disk(engine)
            tier.begin((after,))
            (completion,) = engine.generate([prompt], greedy(NEW))
            assert completion.token_ids == alone.token_ids
            assert [r.logprob for r in completion.logprobs] == [r.logprob for r in alone.logprobs]
            assert completion.reused_tokens["dict"] > 0


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next"])
@pytest.mark.usefixtures("met")
def test_what_never_comes_is_computed(family, checkpoints, references):
    """A tier that hangs costs no more than the recompute and a wait that is as long as a few of its steps."""
    tier, prompt = HeldTier(64 << 20), random_prompt(PROMPT_TOKENS)
    expected = references(family).answer(prompt, NEW)
    with stored(checkpoints(family), tier, prompt, (float("inf"),)) as engine:
        (completion,) = engine.generate([prompt], greedy(NEW))
        assert_same(completion, expected)
        assert sum(completion.reused_tokens.values()) == 0 and not len(engine._scheduler._overlapped_loads)
        assert tier.asked > 0
        for _, _, transfer in tier._held:
            DictTier.load(tier, transfer)


@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.usefixtures("met")
def test_a_piece_that_fails(place, checkpoints, references, monkeypatch):
    tier, prompt = HeldTier(64 << 20), random_prompt(PROMPT_TOKENS)
    expected = references("llama").answer(prompt, NEW)
    tier.spoiled = frozenset([place])
    with stored(checkpoints("llama"), tier, prompt, (1,)) as engine:
        ended: list[int] = []
        release = engine.store.release
        monkeypatch.setattr(engine.store, "release", lambda f: (release(f), ended.append(tier.computed())))
        before = tier.computed()
        (completion,) = engine.generate([prompt], greedy(NEW))
        assert_same(completion, expected)
        assert ended and max(ended) - before < PROMPT_TOKENS / 2, "what has come is held no longer than it is of use"
        engine.check()


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next"])
@pytest.mark.usefixtures("met")
def test_copies_that_fail_begin_anew(family, checkpoints, references, monkeypatch):
    tier, prompt = HeldTier(64 << 20), random_prompt(PROMPT_TOKENS)
    expected = references(family).answer(prompt, NEW)
    with stored(checkpoints(family), tier, prompt, (100,)) as engine:
        failed = []

        def fail(plan: Any, storage: Any) -> None:
            failed.append(plan)
            storage[plan.blocks] = 1
            raise TransferError("the copy was disturbed")

        monkeypatch.setattr(engine.parts.transfer, "load", fail)
        request = engine.submit(prompt, greedy(NEW))
        assert request.wait(60), "it is tried for ever"
        assert failed and engine.stats()["engine"]["copies_failed"] == len(failed)
        assert_same(request.result(), expected)
        engine.check()


@pytest.mark.usefixtures("met")
def test_cancelled_in_the_middle(checkpoints, references):
    tier, prompt = HeldTier(64 << 20), random_prompt(PROMPT_TOKENS)
    expected = references("llama").answer(prompt, NEW)
    with stored(checkpoints("llama"), tier, prompt, (float("inf"),)) as engine:
        request = engine.submit(prompt, greedy(NEW))
        wait_until(lambda: tier.asked > 0, "a piece is asked for")
        engine.cancel(request)
        assert request.wait(60)
        engine.check()
        assert not len(engine._scheduler._overlapped_loads)
        assert_nothing_is_pinned(engine)
        for _, _, transfer in list(tier._held):
            DictTier.load(tier, transfer)
        tier.begin((0,))
        assert_same(engine.generate([prompt], greedy(NEW))[0], expected)


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
@pytest.mark.usefixtures("met")
def test_preempted_in_the_middle(family, checkpoints, references):
    """It takes what it had computed along, and leaves what the tier was to bring."""
    tier, prompt = HeldTier(64 << 20), random_prompt(PROMPT_TOKENS)
    expected = references(family).answer(prompt, NEW)
    with stored(checkpoints(family), tier, prompt, (float("inf"),)) as engine:
        scheduler, schedule, preempted = engine._scheduler, engine._scheduler.schedule, []

        def preempting():  # by the engine itself: it computes on while somebody else waits for its lock
            if not preempted and tier.asked and len(scheduler._overlapped_loads):
                (sequence,) = scheduler.running
                scheduler._preempt(sequence)
                preempted.append(len(scheduler._overlapped_loads))
                for _, _, transfer in list(tier._held):
                    DictTier.load(tier, transfer)
                tier.begin((0,))
            return schedule()

        scheduler.schedule = preempting
        request = engine.submit(prompt, greedy(NEW))
        assert request.wait(60) and preempted == [0]
        assert_same(request.result(), expected)
        engine.check()
        assert_nothing_is_pinned(engine)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.usefixtures("met")
def test_what_host_has_is_where_it_begins(family, checkpoints, references):
    tier, prompt = HeldTier(64 << 20), random_prompt(PROMPT_TOKENS)
    expected = references(family).answer(prompt, NEW)
    with engine_with(checkpoints(family), tier) as engine:
        engine.generate([prompt], greedy(1))
        leave_only_disk(engine)
        engine.generate([prompt[:200]], greedy(1))  # three chunks come into host
        engine.drop_device_cache()
        tier.begin((100,))
        before = tier.computed()
        (completion,) = engine.generate([prompt], greedy(NEW))
        assert_same(completion, expected)
        computed = tier.computed() - before
        assert completion.reused_tokens["host"] == 192 and completion.reused_tokens["dict"] > 0
        assert 100 <= computed == PROMPT_TOKENS + NEW - 1 - sum(completion.reused_tokens.values())


@pytest.mark.parametrize("family", mostly_rare(["llama", "gemma3", "qwen3_next"], ["gemma3"]))
@pytest.mark.usefixtures("met")
def test_many_at_once_on_a_small_device(family, checkpoints, references, monkeypatch):
    """Preempted while they meet, and without room for what came. None would compute what it can load while others
    wait, so the rule is made to say otherwise.
    """
    plan = PrefixPlanner.plan
    monkeypatch.setattr(PrefixPlanner, "plan", lambda *given, overlaps: plan(*given, overlaps=True))
    tier = HeldTier(64 << 20)
    prompts = [random_prompt(400, seed=seed) for seed in range(5)]
    with engine_with(checkpoints(family), tier, kv_cache_memory="1MiB" if family != "qwen3_next" else "4MiB") as engine:
        for prompt in prompts:
            engine.generate([prompt], greedy(1))
        leave_only_disk(engine)
        tier.begin((50, 120, 200, 300, 420, 560))
        for prompt, completion in zip(prompts, engine.generate(prompts, greedy(NEW)), strict=True):
            assert_same(completion, references(family).answer(prompt, NEW))
        assert engine.stats()["engine"]["overlapped_loads"] > 1
        engine.check()
        assert not len(engine._scheduler._overlapped_loads)
        assert_nothing_is_pinned(engine)


@pytest.mark.usefixtures("met")
def test_nothing_is_computed_twice_while_others_wait(checkpoints, references):
    """What can be loaded is loaded: computing it would hold up those who can only compute."""
    tier = HeldTier(64 << 20)
    prompts = [random_prompt(400, seed=seed) for seed in range(3)]
    with engine_with(checkpoints("llama"), tier) as engine:
        for prompt in prompts:
            engine.generate([prompt], greedy(1))
        leave_only_disk(engine)
        tier.begin((0,))
        for prompt, completion in zip(prompts, engine.generate(prompts, greedy(NEW)), strict=True):
            assert_same(completion, references("llama").answer(prompt, NEW))
        assert engine.stats()["engine"]["overlapped_loads"] <= 1, "the last one, when the others are done"


@pytest.mark.usefixtures("met")
def test_pieces_are_asked_for_from_the_end(checkpoints, monkeypatch):
    """And those at the front not at all, where computing is there first."""
    tier, prompt = HeldTier(64 << 20), random_prompt(PROMPT_TOKENS)
    with engine_with(checkpoints("llama"), tier) as engine:
        engine.generate([prompt], greedy(1))
        leave_only_disk(engine)
        begins: list[list[int]] = []
        ask = overlapped_load.OverlappedLoad.ask

        def watched(self: overlapped_load.OverlappedLoad, computed: int, now_s: float) -> None:
            ask(self, computed, now_s)
            begins.append([piece.begin for piece in self.pieces if piece.fetch is not None])

        monkeypatch.setattr(overlapped_load.OverlappedLoad, "ask", watched)
        tier.begin((1,))
        engine.generate([prompt], greedy(1))
        first = begins[0]
        assert first == sorted(first, reverse=True), "the last tokens first"
        assert 0 < min(first) < PROMPT_TOKENS / 2, "as far as the two meet, and a piece more"
        assert min(begins[-1]) > 0
