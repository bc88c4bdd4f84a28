"""A machine dies in the middle of storing: others get the right tokens, nothing hangs, what is missing is stored."""

from __future__ import annotations

import random
import time

import pytest

from tests.depth import few_or_all
from tests.engine.conftest import random_prompt
from tests.machines.conftest import Open, Start
from tests.machines.network import Network
from tests.machines.stores import KINDS
from tests.nursery import wait_until

PROMPT_TOKENS = 1300
CHUNKS = PROMPT_TOKENS // 64
KILLS = few_or_all({"valkey": 5, "s3": 4, "directory": 4}, {"valkey": 10, "s3": 5, "directory": 6})
LINK_RATE = {"valkey": 4_000_000, "s3": 700_000, "directory": 4_000_000}
"""Bytes a second: what a prompt leaves behind takes a third of one, and two where counting what is there is slow."""


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_a_machine_dies_in_the_middle_of_storing(kind: str, store: Open, start: Start, network: Network, alone) -> None:
    """Killed when so many chunks, drawn at random, are there; or some milliseconds after it began."""
    chance = random.Random(f"kills {kind}")
    shared = store(kind)
    survivor = start("b", shared)
    prompts = [random_prompt(PROMPT_TOKENS, seed=seed) for seed in range(KILLS[kind])]
    left: list[int] = []
    network.slow("a", LINK_RATE[kind])
    for prompt in prompts:
        before = shared.count()
        victim = start("a", shared)
        victim.say("ask", prompt, 12)
        if chance.random() < 0.2:
            time.sleep(chance.random() * 0.3)
        else:
            wanted = before + chance.randrange(1, CHUNKS)
            wait_until(lambda wanted=wanted: shared.count() >= wanted, "as many chunks as that")
        victim.kill()
        left.append(shared.count() - before)  # more may follow: what the dead process had handed to its sockets
        answer = survivor.ask(prompt)
        assert answer.tokens == alone(prompt)
        survivor.flush()
        assert shared.count() == before + CHUNKS, "repaired: each chunk is there once"
    assert any(0 < count < CHUNKS for count in left), f"no kill fell into the middle: {left}"
    network.mend("a")
    newcomer = start("a", shared)
    for prompt in prompts:
        answer = newcomer.ask(prompt)
        assert answer.tokens == alone(prompt) and answer.reused == {shared.tier: 64 * CHUNKS}
    for machine in (survivor, newcomer):
        stats = machine.stats()
        assert stats[f"{shared.tier}.corrupt"] == stats[f"{shared.tier}.faults"] == 0
        machine.close()
