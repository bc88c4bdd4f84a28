"""What a real server with every tier exports, after it has answered."""

from __future__ import annotations

import asyncio
import queue
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from stowage.config.memory import Memory
from stowage.engine.engine import Engine
from stowage.server import listen
from stowage.server.auth import ApiKeys
from stowage.server.limits import Limits
from stowage.server.serve import run
from stowage.server.served_model import ServedModel
from stowage.server.supervisor import EngineSupervisor
from stowage.testing import tiny_models
from tests.tiers.servers import RedisServer, redis_server

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
Exported = dict[str, dict[str, set[str]]]


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture(scope="module")
def page(redis: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> str:
    """`/metrics` of a server, in this process, that has answered whole and in pieces."""
    places = tmp_path_factory.mktemp("places")
    model = tiny_models.write("llama", places / "tiny")
    shared = {"valkey": redis.url, "object": f"file://{places}/objects"}
    memory = Memory(kv_cache_memory="8MiB", host_memory="16MiB", disk=f"{places}/kv:64MiB", **shared)  # type: ignore[arg-type]
    place, started = listen.bind("127.0.0.1", 0), queue.Queue[tuple[asyncio.AbstractEventLoop, asyncio.Event]]()

    async def serve(engine: Engine) -> None:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        await run(
            EngineSupervisor(lambda: engine),
            ServedModel("tiny"),
            place,
            Limits(),
            ApiKeys([]),
            stop,
            lambda: started.put((loop, stop)),
        )

    with Engine(model, memory) as engine:
        thread = threading.Thread(target=lambda: asyncio.run(serve(engine)))
        thread.start()
        loop, stop = started.get(timeout=60)
        for stream in (False, True):
            body = {"model": "tiny", "prompt": "x" * 300, "max_tokens": 4, "stream": stream}
            httpx.post(place.url + "/v1/completions", json=body, timeout=60).raise_for_status()
        text = httpx.get(place.url + "/metrics", timeout=60).raise_for_status().text
        loop.call_soon_threadsafe(stop.set)
        thread.join()
    return text


@pytest.fixture(scope="module")
def exported(page: str) -> Exported:
    """The values of each label of each sample's name."""
    found: Exported = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            labels = found.setdefault(sample.name, {})
            for label, value in sample.labels.items():
                labels.setdefault(label, set()).add(value)
    return found


@pytest.fixture(scope="module")
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    return found


def succeed(*command: str, where: Path) -> None:
    """Run it there; it must end well."""
    done = subprocess.run(command, capture_output=True, text=True, cwd=where)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
