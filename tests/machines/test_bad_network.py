"""The link of a machine is cut, slow, or loses packets: requests end with the right tokens, and all is well afterwards.

No test measures how quick anything is: bounds are many times what a request may take.
"""

from __future__ import annotations

import time

import pytest

from tests.depth import mostly_rare
from tests.engine.conftest import random_prompt
from tests.machines.conftest import Open, Start
from tests.machines.machine import Machine
from tests.machines.network import Network
from tests.tiers.servers import wait_until

PROMPT_TOKENS = 690
BOUNDS = {"lookup_timeout_s": 0.3, "load_timeout_s": 0.3}
"""What a request may wait for the store, on top of computing."""
ALLOWED_S = 10.0
REMOTE = ("valkey", "s3")


def known_prompts(first: Machine, second: Machine, tier: str, alone, count: int) -> list[list[int]]:
    """Prompts that the second machine has loaded once; nothing of them is left in its own memory."""
    prompts = [random_prompt(PROMPT_TOKENS, seed=seed) for seed in range(count)]
    for prompt in prompts:
        first.ask(prompt)
    first.flush()
    for prompt in prompts:
        comes_back(second, tier, prompt, alone(prompt))
    second.forget()
    return prompts


def ask_in_time(machine: Machine, prompt: list[int], expected: list[int]) -> dict[str, int]:
    began_s = time.monotonic()
    answer = machine.ask(prompt)
    assert answer.tokens == expected
    assert time.monotonic() - began_s < ALLOWED_S, "it waited for the store"
    return answer.reused


def comes_back(machine: Machine, tier: str, prompt: list[int], expected: list[int]) -> None:
    def hits() -> bool:
        machine.forget()
        return tier in ask_in_time(machine, prompt, expected)

    wait_until(hits, 60, "a hit")
    wait_until(lambda: machine.stats()[f"{tier}.breaker"] == "closed", 60, "the breaker")
    assert machine.stats()[f"{tier}.corrupt"] == machine.stats()[f"{tier}.faults"] == 0


@pytest.mark.rare
@pytest.mark.slow
@pytest.mark.parametrize("kind", REMOTE)
def test_a_cut_link(kind: str, store: Open, start: Start, network: Network, alone) -> None:
    """What was known to be there cannot be had, nor asked for, nor stored; the breaker opens, and closes again."""
    shared = store(kind)
    first, second = start("a", shared), start("b", shared, **BOUNDS)
    prompts = known_prompts(first, second, shared.tier, alone, 6)
    network.cut("b")
    for prompt in prompts:
        assert not ask_in_time(second, prompt, alone(prompt))
    stranger = random_prompt(PROMPT_TOKENS, seed=99)
    assert not ask_in_time(second, stranger, alone(stranger))
    stats = second.stats()
    assert stats[f"{shared.tier}.breaker_opened"] >= 1 and stats[f"{shared.tier}.breaker"] != "closed"
    assert first.ask(prompts[0]).tokens == alone(prompts[0]), "the others notice nothing"
    network.mend("b")
    comes_back(second, shared.tier, prompts[1], alone(prompts[1]))
    for machine in (first, second):
        machine.close()


@pytest.mark.slow
def test_a_link_that_is_cut_in_the_middle_of_a_load(store: Open, start: Start, network: Network, alone) -> None:
    """And for a moment only: what has come is used or not, and the rest is computed."""
    shared = store("valkey")
    first, second = start("a", shared), start("b", shared, **(BOUNDS | {"load_timeout_s": 1.0}))
    prompts = known_prompts(first, second, shared.tier, alone, 2)
    network.slow("b", 400_000)
    for number, prompt in enumerate(prompts):
        second.say("ask", prompt, 12)
        time.sleep(0.1 + 0.4 * number)
        network.cut("b")
        assert second.hear().tokens == alone(prompt)
        network.mend("b")
        network.slow("b", 400_000)
    network.mend("b")
    comes_back(second, shared.tier, prompts[0], alone(prompts[0]))
    for machine in (first, second):
        machine.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", mostly_rare(REMOTE, ["valkey"]))
def test_a_slow_link(kind: str, store: Open, start: Start, network: Network, alone) -> None:
    """Too slow for its deadline: computed. Slow, and there is time: loaded. Storing over it ends, too."""
    shared = store(kind)
    first, second = start("a", shared), start("b", shared, **BOUNDS)
    prompts = known_prompts(first, second, shared.tier, alone, 2)
    network.slow("b", 50_000)
    for prompt in prompts:
        reused = ask_in_time(second, prompt, alone(prompt))
        assert reused.get(shared.tier, 0) < PROMPT_TOKENS // 2, "faster than its link"
    network.mend("b")
    comes_back(second, shared.tier, prompts[0], alone(prompts[0]))
    second.close()
    patient = start("b", shared)
    network.slow("b", 1_000_000)
    answer = patient.ask(prompts[0])
    assert answer.tokens == alone(prompts[0]) and answer.reused[shared.tier] >= PROMPT_TOKENS - 64
    new = random_prompt(PROMPT_TOKENS, seed=98)
    patient.ask(new)
    patient.flush()
    first.forget()
    assert first.ask(new).reused[shared.tier] >= PROMPT_TOKENS - 64
    for machine in (first, patient):
        machine.close()


@pytest.mark.rare
def test_a_link_that_loses_packets(store: Open, start: Start, network: Network, alone) -> None:
    """Of many connections at the same time."""
    shared = store("s3")
    first, second = start("a", shared), start("b", shared)
    network.lossy("b")
    for seed in range(2):
        prompt = random_prompt(PROMPT_TOKENS, seed=seed)
        for one, other in ((first, second), (second, first)):
            one.forget()
            assert one.ask(prompt).tokens == alone(prompt)
            one.flush()
            other.forget()
            assert other.ask(prompt).tokens == alone(prompt)
    assert network.lost("b") > 0, "it lost nothing"
    network.mend("b")
    comes_back(second, shared.tier, prompt, alone(prompt))
    assert first.stats()[f"{shared.tier}.corrupt"] == 0
    for machine in (first, second):
        machine.close()
