"""Real servers on tiny models, the engine whose answers theirs must equal, and clients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest

from stowage.config.memory import Memory
from stowage.engine.engine import Engine
from stowage.testing import tiny_models
from tests.nursery import QUICKLY, Nursery
from tests.server import process
from tests.server.process import Server


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    with Nursery("tests.server.process", process.warm, QUICKLY) as made:
        yield made


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.write("llama", tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="module")
def engine(tiny_llama: Path) -> Iterator[Engine]:
    """The same model without a server in between."""
    with Engine(tiny_llama, Memory(kv_cache_memory="8MiB")) as opened:
        yield opened


@pytest.fixture(scope="module")
def start(
    nursery: Nursery, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Server]]:
    """Starts servers, which are killed at the end if a test has not stopped them."""
    directory = tmp_path_factory.mktemp("servers")
    started: list[Server] = []

    def begin(*flags: str, model: Path = tiny_llama, **environ: str) -> Server:
        started.append(process.start(nursery, directory, model, *flags, **environ))
        return started[-1]

    yield begin
    for server in started:
        with contextlib.suppress(ProcessLookupError):
            server.signal(9)


@pytest.fixture(scope="module")
def server(start: Callable[..., Server]) -> Server:
    """With default limits and no keys."""
    return start("--host-memory", "16MiB")


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made
