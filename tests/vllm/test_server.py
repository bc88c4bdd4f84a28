"""vLLM's own API server with the plugin, found by its name alone, asked by OpenAI's client."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from stowage.testing import tiny_models
from tests.ports import free_port
from tests.vllm.models import FAMILIES, VOCAB, write

START_S = 300.0


class Server:
    """A real one, in a process group of its own."""

    def __init__(self, model: Path, cache: Path, log: Path, ranks: int, engines: int) -> None:
        self.port = free_port()
        below = {"disk": f"{cache}:256MiB"} if engines == 1 else {"node_host_memory": f"{64 * engines}MiB"}
        extra = {"host_memory": "64MiB", **below}
        transfer = {"kv_connector": "StowageConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
        self._log = log
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
                    *("--served-model-name", "tiny", "--dtype", "float32", "--enforce-eager"),
                    *("--max-model-len", "2048", "--port", str(self.port), "--enable-prompt-tokens-details"),
                    *("--kv-transfer-config", json.dumps(transfer), "--tensor-parallel-size", str(ranks)),
                    *("--data-parallel-size", str(engines)),
                ],
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ
                | {
                    "OMP_NUM_THREADS": "1",
                    "VLLM_CPU_KVCACHE_SPACE": "1",
                    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                    "HF_HUB_OFFLINE": "1",
                    "XDG_RUNTIME_DIR": str(log.parent),
                },
            )
        self._wait()

    def _wait(self) -> None:
        until_s = time.monotonic() + START_S
        while time.monotonic() < until_s:
            assert self._process.poll() is None, self._log.read_text()[-3000:]
            try:
                if httpx.get(f"http://127.0.0.1:{self.port}/health", timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.2)
        raise AssertionError("the server did not start")

    def ask(self, prompt: list[int], engine: int = 0, **more: Any) -> tuple[list[int], int]:
        """The tokens that follow, and how many tokens came from a cache."""
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", timeout=120)
        answer = client.completions.create(
            model="tiny",
            prompt=prompt,
            max_tokens=8,
            temperature=0,
            extra_body={"return_token_ids": True, **more},
            extra_headers={"X-data-parallel-rank": str(engine)},
        )
        assert answer.usage is not None
        details = answer.usage.prompt_tokens_details
        tokens = answer.choices[0].model_dump()["token_ids"]
        return tokens, (details.cached_tokens or 0) if details is not None else 0

    def metrics(self) -> dict[str, float]:
        """Our series, by name and labels that are not vLLM's; the engines' sum."""
        found: dict[str, float] = {}
        for line in httpx.get(f"http://127.0.0.1:{self.port}/metrics", timeout=30).text.splitlines():
            if line.startswith(("stowage_", "vllm:external_prefix_cache")) and "_created" not in line:
                name, value = line.rsplit(" ", 1)
                labels = [label for label in ("tier", "slab") if f'{label}="' in name]
                part = "".join(name.split(f'{label}="')[1].split('"')[0] for label in labels)
                series = " ".join(filter(None, [name.split("{")[0], part]))
                found[series] = found.get(series, 0) + float(value)
        return found

    def metrics_with(self, name: str) -> dict[str, float]:
        """The series once ``name`` is above 0: ours are told at most once per interval, so a moment after an answer."""
        until_s = time.monotonic() + 60
        while not (found := self.metrics()).get(name):
            assert time.monotonic() < until_s, found
            time.sleep(0.1)
        return found

    def log(self) -> str:
        return self._log.read_text()

    def end(self, how: int) -> None:
        os.killpg(self._process.pid, how)
        self._process.wait(60)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    model = write(FAMILIES["llama"], tmp_path / "model")
    tiny_models.tokenizer(VOCAB).save_pretrained(model)
    servers: list[Server] = []

    def start(ranks: int = 1, engines: int = 1) -> Server:
        servers.append(Server(model, tmp_path / "cache", tmp_path / f"log{len(servers)}", ranks, engines))
        return servers[-1]

    yield start
    for server in servers:
        if server._process.poll() is None:
            server.end(signal.SIGKILL)


def shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "stowage" in name.lower()}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_server_that_is_killed_and_started_again(ranks: int, serve: Callable[..., Server]) -> None:
    """With two ranks a chunk holds the parts of both, and is written by one process."""
    first, prompt = serve(ranks), [5 + at * 7 % 500 for at in range(900)]
    assert "Stowage: host 64 MiB" in first.log()
    tokens, cached = first.ask(prompt)
    assert cached == 0
    assert first.ask(prompt, cache_salt="somebody else") == (tokens, 0)
    until_s = time.monotonic() + 60
    while first.metrics().get("stowage_tier_chunks_written_total disk", 0) < 14:
        assert time.monotonic() < until_s, first.metrics()
        first.ask([7, 8, 9])  # numbers come with steps
        time.sleep(0.1)
    first.end(signal.SIGKILL)
    assert not shared_memory()
    again = serve(ranks)
    assert again.ask(prompt) == (tokens, 896)
    found = again.metrics_with("stowage_tokens_loaded_total")
    assert found["vllm:external_prefix_cache_hits_total"] == found["stowage_tokens_loaded_total"] == 896
    assert found["stowage_chunk_hits_total disk"] == 7 and found["stowage_tier_corrupt_chunks_total disk"] == 0
    assert found["stowage_host_slab_used_bytes 0"] > 0
    assert again.ask(prompt, cache_salt="somebody else") == (tokens, 896)
    again.end(signal.SIGTERM)


@pytest.mark.slow
def test_what_one_engine_of_a_server_has_computed_is_a_hit_of_the_other(serve: Callable[..., Server]) -> None:
    """Data parallelism: the engines share the node's budget, and each reads the other's host memory."""
    server, prompt = serve(engines=2), [5 + at * 7 % 500 for at in range(900)]
    assert server.log().count("Stowage: host 64 MiB") == 2
    tokens, cached = server.ask(prompt, engine=0)
    assert cached == 0
    assert server.ask(prompt, engine=1) == (tokens, 896)
    found = server.metrics_with("stowage_tokens_loaded_total")
    assert found["vllm:external_prefix_cache_hits_total"] == found["stowage_tokens_loaded_total"] == 896
    assert found["stowage_chunk_hits_total neighbours"] == 7
    server.end(signal.SIGTERM)
    assert not shared_memory()
