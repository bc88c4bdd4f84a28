"""`stowage serve` on two machines: what a client of one asked is cached for a client of the other."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from stowage.testing import tiny_models
from tests.machines import machine
from tests.machines.conftest import Open
from tests.machines.network import Network
from tests.nursery import Nursery
from tests.server.process import Server

PROMPTS = 4
WORDS = "the quick brown fox jumps over the lazy dog and so on "
SMALL = ("--kv-cache-memory", "8MiB", "--host-memory", "8MiB")
"""Two prompts or so: what was asked before those must come from the store."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large enough that its prompts take longer to compute than to load."""
    size = tiny_models.TinySize(hidden=512, layers=4, heads=8, kv_heads=2, context_tokens=4096)
    return tiny_models.write("llama", tmp_path_factory.mktemp("served") / "two", size)


class Served:
    """A server inside a place, and its client there."""

    def __init__(self, network: Network, place: str, server: Server) -> None:
        self._network, self._place, self._server = network, place, server

    def ask(self, prompt: str) -> tuple[str, int]:
        """The answer, and how many of the prompt's tokens were cached."""
        body = {"model": self._server.model, "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        with self._network.inside(self._place):
            told = httpx.post(self._server.url + "/v1/completions", json=body, timeout=60).raise_for_status().json()
        return told["choices"][0]["text"], told["usage"]["prompt_tokens_details"]["cached_tokens"]

    def cached_from(self, tier: str) -> float:
        with self._network.inside(self._place):
            text = httpx.get(self._server.url + "/metrics", timeout=60).text
        name = "stowage_cached_prompt_tokens_total"
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return sum(one.value for one in samples if one.name == name and one.labels["tier"] == tier)

    def stop(self) -> None:
        self._server.stop()


@pytest.fixture
def serve(nursery: Nursery, network: Network, tmp_path: Path, model: Path) -> Iterator[Any]:
    started: list[Server] = []

    def begin(place: str, *flags: str, **environ: str) -> Served:
        out, err = tmp_path / f"{place}.out", tmp_path / f"{place}.err"
        words = ["serve", str(model), "--port", "0", "--json", *SMALL, *flags]
        child = nursery.start(machine.serve, network.path(place), out, err, json.dumps(environ), *words)
        started.append(Server(child, out, err))
        return Served(network, place, started[-1])

    yield begin
    for server in started:
        with contextlib.suppress(ProcessLookupError):
            server.signal(9)


@pytest.mark.slow
def test_two_servers(store: Open, serve: Any) -> None:
    """Stopping the first writes what it holds; then the second starts. It waits for the store no longer than is worth
    it, so that on a busy machine it may compute a prompt that it could have loaded: then it is asked again.
    """
    shared = store("valkey")
    prompts = [f"{number} {number * number} " + WORDS * 13 for number in range(PROMPTS)]
    first = serve("a", *shared.flags("a"), **shared.environ("a"))
    expected = [first.ask(prompt) for prompt in prompts]
    assert not any(cached for _, cached in expected), "the beginnings differ"
    first.stop()
    second = serve("b", *shared.flags("b"), **shared.environ("b"))
    until_s = time.monotonic() + 60
    told_cached = 0
    while not second.cached_from(shared.tier):
        assert time.monotonic() < until_s, "nothing ever comes from the store"
        for prompt, (text, _) in zip(prompts, expected, strict=True):
            told, cached = second.ask(prompt)
            assert told == text
            told_cached += cached
    assert told_cached >= second.cached_from(shared.tier)
    second.stop()
