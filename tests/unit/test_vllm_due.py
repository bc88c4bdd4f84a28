"""Which requests of a step the vLLM plugin looks at: those that complete a chunk, and few others."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from stowage.core.geometry import Group, Kind
from stowage.plugins.vllm.due import Due
from stowage.plugins.vllm.namespace import Namespaces
from stowage.plugins.vllm.requests import Tracked

GROUPS = [Group(0, Kind.FULL, 16, 8, 64), Group(1, Kind.SLIDING, 16, 4, 64, 40)]
CHUNK = 64


class Request:
    def __init__(self, name: str, prompt: int) -> None:
        self.request_id, self.prompt, self.num_computed_tokens, self.num_preemptions = name, prompt, 0, 0
        self.prompt_token_ids = [1] * prompt
        self.mm_features: list[Any] = []
        self.lora_request = self.cache_salt = None


class Engine:
    """Requests as vLLM schedules them: a prompt in pieces, then ``step_tokens`` at a time."""

    def __init__(self, count: int, step_tokens: int, chance: random.Random) -> None:
        self.step_tokens, self.chance = step_tokens, chance
        self.due = Due(step_tokens)
        requests = [Request(f"r{number}", chance.randrange(1, 200)) for number in range(count)]
        names = Namespaces(bytes(32))
        self.tracked = {one.request_id: Tracked(one, names, GROUPS) for one in requests}
        self.known: set[str] = set()
        self.begun: set[str] = set()

    def step(self, skipped: float = 0.0) -> None:
        """One step, in which exactly those are found that a look at all of them finds."""
        counts = {}
        for name, tracked in self.tracked.items():
            request = tracked.request
            if name in self.begun and self.chance.random() < skipped:
                continue
            left = request.prompt - request.num_computed_tokens
            counts[name] = min(left, 90) if left > 0 else self.chance.randint(1, self.step_tokens)
        new = [name for name in counts if name not in self.known]
        back = {name for name in counts if name in self.known and name not in self.begun}
        before = {name: self.tracked[name].request.num_computed_tokens for name in counts}
        scheduled = SimpleNamespace(
            num_scheduled_tokens=counts,
            total_num_scheduled_tokens=sum(counts.values()),
            scheduled_new_reqs=[SimpleNamespace(req_id=name, num_computed_tokens=before[name]) for name in new],
            scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=back),
        )
        expected = {name for name, count in counts.items() if before[name] + count >= self.tracked[name].due}
        found = self.due.of(scheduled, self.tracked)
        assert {tracked.request.request_id for tracked, _, _ in found} == expected
        for tracked, begin, end in found:
            name = tracked.request.request_id
            assert (begin, end) == (before[name], before[name] + counts[name])
            tracked.begin_at(end)
            self.due.watch(tracked, end)
        for name, count in counts.items():
            self.tracked[name].request.num_computed_tokens += count
        self.known |= set(counts)
        self.begun |= set(counts)


def test_looks_do_not_grow_with_what_runs() -> None:
    """1,000 requests generate 640 tokens: each is looked at about as often as it completes a chunk."""
    engine = Engine(1000, 1, random.Random(0))
    while any(one.request.num_computed_tokens < one.request.prompt for one in engine.tracked.values()):
        engine.step()
    looks = engine.due.looks
    for _ in range(640):
        engine.step()
    assert engine.due.looks - looks <= 1000 * (640 // CHUNK + 1), "of 640,000 tokens"


@pytest.mark.parametrize("step_tokens", [1, 4])
@pytest.mark.parametrize("skipped", [0.0, 0.3])
def test_exactly_those_are_found_that_are_due(step_tokens: int, skipped: float) -> None:
    """Whatever is drafted, left out of a step, preempted, ended, or begins later."""
    chance = random.Random(step_tokens)
    engine = Engine(40, step_tokens, chance)
    for number in range(300):
        engine.step(skipped)
        if number % 7 == 0:
            tracked = engine.tracked[chance.choice(list(engine.tracked))]
            if (
                tracked.request.request_id in engine.begun
            ):  # it loses its blocks, and resumes when it is asked for again
                tracked.request.num_computed_tokens = 0
                tracked.request.num_preemptions += 1
                tracked.preemptions = tracked.request.num_preemptions
                tracked.begin_at(0)
                engine.begun.discard(tracked.request.request_id)
        if number % 50 == 0:
            del engine.tracked[chance.choice(list(engine.tracked))]
            engine.known &= set(engine.tracked)
