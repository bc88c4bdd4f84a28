"""Networks with stores, made once per run, and machines on them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stowage.config.memory import Memory
from stowage.engine.engine import Engine
from stowage.engine.sampling_params import SamplingParams
from tests.machines import machine
from tests.machines.machine import Machine, live
from tests.machines.network import MACHINES, Loopback, Namespaces, Network, obstacle
from tests.machines.stores import Store, opened
from tests.nursery import QUICKLY, Nursery

Start = Callable[..., Machine]
Open = Callable[[str], Store]


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    with Nursery("tests.machines.machine", machine.warm, QUICKLY) as made:
        yield made


@pytest.fixture(scope="session")
def obstacle_found() -> str:
    return obstacle()


@pytest.fixture(scope="session")
def namespaces(obstacle_found: str) -> Iterator[Network | None]:
    if obstacle_found:
        yield None
        return
    network = Namespaces()
    yield network
    network.close()


@pytest.fixture(scope="session")
def loopback() -> Iterator[Network]:
    network = Loopback()
    yield network
    network.close()


@pytest.fixture
def network(namespaces: Network | None, loopback: Network) -> Network:
    """Machines with networks of their own; where the system does not allow that, processes on one."""
    return namespaces or loopback


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Network, str], Any]]:
    """The server of each kind on each network, started when first asked for."""
    with contextlib.ExitStack() as stack:
        known: dict[tuple[int, str], Any] = {}

        def server(network: Network, kind: str) -> Any:
            if (id(network), kind) not in known:
                made = opened(network, kind, tmp_path_factory.mktemp("shared"))
                known[id(network), kind] = stack.enter_context(made)
            return known[id(network), kind]

        yield server


@pytest.fixture
def store(network: Network, servers: Callable[[Network, str], Any]) -> Open:
    """A place of one's own in a store of that kind."""
    return lambda kind: Store(network, kind, servers(network, kind))


@pytest.fixture
def start(nursery: Nursery, network: Network, tmp_path: Path, checkpoints: Callable[..., Path]) -> Iterator[Start]:
    """Starts machines, on a network that is mended afterwards."""
    started: list[Machine] = []

    def begin(name: str, store: Store, family: str = "llama", **memory: Any) -> Machine:
        settings = machine.MEMORY | store.memory(name) | memory
        told = (str(checkpoints(family)), settings, store.environ(name))
        started.append(Machine(tmp_path, lambda socket: nursery.start(live, network.path(name), socket, *told)))
        return started[-1]

    yield begin
    for name in MACHINES:
        network.mend(name)
    for one in started:
        one.drop()


@pytest.fixture(scope="session")
def alone(checkpoints: Callable[..., Path]) -> Iterator[Callable[..., list[int]]]:
    """What an engine answers that shares nothing and keeps nothing, but its device."""
    engines: dict[str, Engine] = {}

    def answer(prompt: list[int], new_tokens: int = 12, family: str = "llama") -> list[int]:
        if family not in engines:
            engines[family] = Engine(checkpoints(family), Memory(kv_cache_memory="16MiB"))
        engine = engines[family]
        engine.drop_device_cache()
        (completion,) = engine.generate([prompt], SamplingParams(max_new_tokens=new_tokens, ignore_eos=True))
        assert not sum(completion.reused_tokens.values())
        return completion.token_ids

    yield answer
    for engine in engines.values():
        engine.close()
