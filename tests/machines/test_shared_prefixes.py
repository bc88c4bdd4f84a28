"""What one machine has computed, another answers with: the same tokens as if nothing were shared, from its store."""

from __future__ import annotations

import pytest

from tests.depth import mostly_rare
from tests.engine.conftest import random_prompt
from tests.machines.conftest import Open, Start
from tests.machines.machine import MEMORY, Machine, live
from tests.machines.network import Loopback, Network
from tests.machines.stores import KINDS, Store

PROMPT_TOKENS = 690
LEAST = PROMPT_TOKENS - 128 - 64
"""Tokens that must come from the store: all but what is no whole chunk, or came after the last snapshot."""


@pytest.mark.parametrize(
    ("kind", "family"),
    mostly_rare(
        [*((kind, "llama") for kind in KINDS), ("valkey", "gemma3"), ("s3", "qwen3_next")],
        [(kind, "llama") for kind in KINDS],
    ),
)
def test_another_machine_answers_with_the_firsts_prefix(kind, family, store: Open, start: Start, alone) -> None:
    """Full attention, sliding windows and recurrent state."""
    shared, prompt = store(kind), random_prompt(PROMPT_TOKENS)
    expected = alone(prompt, family=family)
    first = start("a", shared, family)
    answer = first.ask(prompt)
    assert answer.tokens == expected and not answer.reused
    first.flush()
    second = start("b", shared, family)
    answer = second.ask(prompt)
    assert answer.tokens == expected
    assert answer.reused.keys() == {shared.tier} and answer.reused[shared.tier] >= LEAST
    other = prompt[:450] + random_prompt(200, seed=7)
    first.forget()
    answer = first.ask(other)
    assert answer.tokens == alone(other, family=family) and answer.reused[shared.tier] >= 450 - 128 - 64
    for machine in (first, second):
        stats = machine.stats()
        assert stats[f"{shared.tier}.corrupt"] == stats[f"{shared.tier}.faults"] == 0
        machine.close()


@pytest.mark.parametrize("kind", mostly_rare(KINDS, ["valkey"]))
def test_a_store_that_has_lost_everything(kind: str, store: Open, start: Start, alone) -> None:
    """Both a machine that knows what was there and one that does not: misses, right answers, and all is kept anew."""
    shared, prompt = store(kind), random_prompt(PROMPT_TOKENS)
    expected = alone(prompt)
    first, second = start("a", shared), start("b", shared)
    first.ask(prompt)
    first.flush()
    chunks = shared.count()
    assert second.ask(prompt).reused
    shared.lose_everything()
    assert shared.count() == 0
    second.forget()
    answer = second.ask(prompt)
    assert answer.tokens == expected and not answer.reused
    second.flush()
    assert shared.count() == chunks, "stored again by whoever computed it"
    first.forget()
    answer = first.ask(prompt)
    assert answer.tokens == expected and answer.reused[shared.tier] >= LEAST
    for machine in (first, second):
        assert machine.stats()[f"{shared.tier}.corrupt"] == 0
        machine.close()


def test_where_namespaces_cannot_be_made_processes_share_all_the_same(
    loopback: Network, servers, nursery, tmp_path, checkpoints, alone
) -> None:
    """The other kind of network: it must not rot because nobody needs it."""
    assert isinstance(loopback, Loopback)
    shared, prompt = Store(loopback, "valkey", servers(loopback, "valkey")), random_prompt(PROMPT_TOKENS)
    machines = {}
    for name in ("a", "b"):
        told = (str(checkpoints("llama")), MEMORY | shared.memory(name), shared.environ(name))
        machines[name] = Machine(tmp_path, lambda socket, told=told: nursery.start(live, "", socket, *told))
        answer = machines[name].ask(prompt)
        assert answer.tokens == alone(prompt) and bool(answer.reused) == (name == "b")
        machines[name].flush()
    loopback.cut("b")
    machines["b"].forget()
    machines["b"].say("ask", prompt, 12)
    loopback.mend("b")
    assert machines["b"].hear().tokens == alone(prompt)
    for machine in machines.values():
        machine.close()


def test_machines_reach_each_other_through_the_store_only(namespaces: Network | None, obstacle_found: str) -> None:
    """The network of these tests is what it says."""
    import socket

    if namespaces is None:
        pytest.skip(obstacle_found)
    with namespaces.inside("a"):
        listener = socket.create_server(("0.0.0.0", 0))
    port = listener.getsockname()[1]
    for place, host in (("b", "10.0.1.2"), ("b", "127.0.0.1")):
        with namespaces.inside(place), pytest.raises(OSError):
            socket.create_connection((host, port), timeout=0.5)
    with namespaces.inside("stores"):
        socket.create_connection(("10.0.1.2", port), timeout=5).close()
    namespaces.cut("a")
    with namespaces.inside("stores"), pytest.raises(OSError):
        socket.create_connection(("10.0.1.2", port), timeout=0.5)
    namespaces.mend("a")
    with namespaces.inside("stores"):
        socket.create_connection(("10.0.1.2", port), timeout=5).close()
    listener.close()
