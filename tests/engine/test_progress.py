"""A request says how far it is, and where its prefix came from, while it runs and after; and the engine adds up what
that saved.
"""

from __future__ import annotations

import threading

import pytest

from stowage.engine.request import Progress
from tests.engine.conftest import greedy, random_prompt

MEMORY = {"host_memory": "32MiB", "snapshot_tokens": 128}


def in_order(progress: Progress) -> bool:
    times = [progress.admitted_s, progress.started_s, progress.first_token_s, progress.finished_s, progress.now_s]
    return None not in times and times == sorted(times) and times[0] >= 0


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next"])
def test_where_a_prefix_came_from(family, engines, tmp_path):
    """Of each prompt token either its place or that it was computed is told; both add up, over all requests too."""
    engine = engines(family, **MEMORY, disk=f"{tmp_path / 'cache'}:64MiB")
    prompt, told = random_prompt(400), []

    def ask(tokens: list[int]) -> Progress:
        request = engine.submit(tokens, greedy(3))
        assert request.wait(60)
        progress, completion = request.progress(), request.result()
        assert progress.reused_tokens == completion.reused_tokens and progress.phase == "finished"
        assert progress.prompt_tokens == len(tokens) == progress.computed_tokens + sum(progress.reused_tokens.values())
        assert progress.new_tokens == 3 and progress.preemptions == 0 and in_order(progress)
        told.append(progress)
        return progress

    assert ask(prompt).computed_tokens == 400
    assert ask(prompt).reused_tokens["device"] >= 320
    engine.drop_device_cache()
    assert ask(prompt).reused_tokens["host"] >= 320
    assert engine.flush()
    engine.drop_device_cache()
    engine.drop_host()
    assert ask(prompt).reused_tokens["disk"] >= 320
    ask(random_prompt(100, seed=3))
    counters = engine.stats()["engine"]
    assert counters["prompt_tokens_computed"] == sum(one.computed_tokens for one in told)
    assert counters["tokens_reused"] == sum(sum(one.reused_tokens.values()) for one in told)
    assert counters["tokens_computed"] == counters["prompt_tokens_computed"] + 2 * len(told)


def test_what_reuse_saved_is_what_computing_would_have_taken(engines):
    """By the engine's own measurements at that moment; and only waits for tiers are taken off."""
    engine = engines("llama", **MEMORY)
    prompt = random_prompt(400)
    engine.generate([prompt], greedy(1))
    before = engine.stats()["engine"]
    assert before["recompute_saved_s"] == before["tiers_waited_s"] == 0
    predicted_s = engine._cost_model.recompute_s(384)
    (completion,) = engine.generate([prompt], greedy(1))
    assert sum(completion.reused_tokens.values()) == 384
    after = engine.stats()["engine"]
    assert after["recompute_saved_s"] == pytest.approx(predicted_s) and after["tiers_waited_s"] == 0
    engine.drop_device_cache()
    engine.generate([prompt], greedy(1))
    last = engine.stats()["engine"]
    assert last["recompute_saved_s"] > after["recompute_saved_s"]
    assert last["tiers_waited_s"] > 0, "copying from the host is part of it"


def test_phases(engines):
    """One request is held in the middle of its answer; the next waits for it, and says so from another thread."""
    engine = engines("llama", max_num_seqs=1)
    holding, go_on = threading.Event(), threading.Event()

    def hold(_delta: object) -> None:
        holding.set()
        assert go_on.wait(60)

    first = engine.submit(random_prompt(100), greedy(3), hold)
    second = engine.submit(random_prompt(200, seed=1), greedy(1))
    assert holding.wait(60)
    seen = first.progress()
    assert (seen.phase, seen.computed_tokens, seen.new_tokens) == ("answering", 100, 1)
    assert seen.finished_s is None and seen.first_token_s is not None
    waiting = second.progress()
    assert (waiting.phase, waiting.computed_tokens, waiting.new_tokens) == ("waiting", 0, 0)
    assert waiting.reused_tokens == {} and waiting.admitted_s is waiting.started_s is waiting.first_token_s is None
    go_on.set()
    assert first.wait(60) and second.wait(60)
    assert second.progress().admitted_s >= waiting.now_s, "the queue's time is told"


def test_a_preempted_request_keeps_where_its_prefix_came_from(engines):
    """What it reuses of itself when it comes back is no news."""
    engine = engines("llama", kv_cache_memory="512KiB", host_memory="8MiB")
    prompts = [random_prompt(200, seed=n) for n in range(4)]
    requests = [engine.submit(prompt, greedy(150)) for prompt in prompts]
    assert all(request.wait(120) for request in requests)
    found = [request.progress() for request in requests]
    assert sum(one.preemptions for one in found) == engine.stats()["engine"]["preemptions"] > 0
    for one in found:
        assert sum(one.reused_tokens.values()) == 0 and one.computed_tokens == 200 and one.new_tokens == 150
        assert in_order(one)


def test_a_cancelled_request_stays_where_it_was(engines):
    engine = engines("llama", max_num_seqs=1)
    requests = [engine.submit(random_prompt(50, seed=n), greedy(200)) for n in range(2)]
    for request in reversed(requests):
        engine.cancel(request)
        assert request.wait(60)
    progress = requests[1].progress()
    assert progress.phase == "finished" and progress.new_tokens == 0 and progress.first_token_s is None
