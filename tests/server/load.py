"""Many clients at once, for long: `python -m tests.server.load --seconds 300`, or `make load SECONDS=300`.

With `--attack 8` so many attackers (`tests.server.attack`) come beside them in the second half: then the times of both
halves are told, too.

Clients ask in every way: whole answers and streams, several choices, scores, wrong requests; some leave in the middle,
or while they wait. They come in rounds. Between two rounds everybody has gone, and the server must be as it was after
the first one: no block, pin, task or file descriptor more, and no memory that grows from round to round. Every answer
that is waited for must come, and be the right one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from stowage.config.memory import Memory
from stowage.engine.engine import Engine
from stowage.engine.sampling_params import SamplingParams
from stowage.testing import tiny_models
from tests.server.attack import attack

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
FLAGS = [
    "--kv-cache-memory",
    "8MiB",
    "--host-memory",
    "16MiB",
    "--max-queued-requests",
    "256",
    "--log-level",
    "warning",
]
KNOWN = 24
NEW_TOKENS = 12
GROWTH_BYTES_MAX = 24 << 20
"""Of resident memory, from the second round on: arenas fill, allocators keep a little; a leak does not stop there."""
MiB = 1 << 20


@dataclass
class State:
    """Of a server that nobody asks anything."""

    resident_bytes: int
    descriptors: int
    tasks: float
    choices_open: float
    blocks_used: float
    chunks_pinned: float
    transfers: float


@dataclass
class Report:
    """What happened. `wrong` names every answer that was lost or not the right one."""

    sent: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    states: list[State] = field(default_factory=list)
    counted: float = 0.0
    """Requests that the server says have ended."""
    seconds: float = 0.0
    waited_s: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})
    """Of answers that were waited for: without attackers, and with them."""
    told: Counter[tuple[str, int]] = field(default_factory=Counter)
    """What attackers were told."""

    def p95_s(self, attacked: bool) -> float:
        waited_s = sorted(self.waited_s[attacked])
        return waited_s[int(0.95 * (len(waited_s) - 1))] if waited_s else 0.0

    def faults(self) -> list[str]:
        """Why this is not what it should be; empty: it is."""
        first, last = self.states[0], self.states[-1]
        found = list(self.wrong[:10])
        if not self.told and self.counted != self.sent.total():
            found.append(f"{self.sent.total()} requests were sent, and {self.counted:.0f} have ended")
        for state in self.states:
            if state.choices_open or state.blocks_used or state.chunks_pinned or state.transfers:
                found.append(f"something is held: {state}")
        if last.descriptors > first.descriptors or last.tasks > first.tasks:
            found.append(f"descriptors or tasks have grown: {first} {last}")
        settled = len(self.states) // 2 if self.told else 1  # attackers fill more of it than others do
        if len(self.states) > 2 and last.resident_bytes - self.states[settled].resident_bytes > GROWTH_BYTES_MAX:
            found.append(f"memory has grown: {[state.resident_bytes // MiB for state in self.states]} MiB")
        return found


class Load:
    """The clients of one server. `known` are prompts and what follows each, greedily."""

    def __init__(self, url: str, pid: int, model: str, known: list[tuple[str, str]], cache: Path | None = None) -> None:
        self.report = Report()
        self._cache, self._attacked = cache, False
        self._url, self._pid, self._model, self._known = url, pid, model, known
        self._random = random.Random(0)
        self._until_s = 0.0
        self._kinds = [self._whole, self._stream, self._choices, self._score, self._leave, self._refused, self._look]
        self._weights = [6, 6, 2, 2, 3, 1, 1]

    async def run(self, clients: int, seconds: float, rounds: int, attacking: int = 0) -> Report:
        """`attacking`: so many attackers in the second half of the rounds, or in the only one."""
        began_s = time.monotonic()
        for number in range(rounds):
            self._until_s = began_s + seconds * (number + 1) / rounds
            self._attacked = bool(attacking) and 2 * number + 1 >= rounds
            others = [self._attack(attacking)] if self._attacked else []
            await asyncio.gather(*(self._client() for _ in range(clients)), *others)
            self.report.states.append(await self._rest())
        self.report.seconds = time.monotonic() - began_s
        return self.report

    async def _attack(self, attacking: int) -> None:
        assert self._cache is not None
        left_s = self._until_s - time.monotonic()
        self.report.told += await attack(self._url, self._model, left_s, attacking, self._cache)

    async def _client(self) -> None:
        async with httpx.AsyncClient(base_url=self._url, timeout=120) as client:
            while time.monotonic() < self._until_s:
                (kind,) = self._random.choices(self._kinds, self._weights)
                self.report.sent[kind.__name__.strip("_")] += 1
                began_s = time.monotonic()
                try:
                    problem = await kind(client)
                    if kind in self._kinds[:4]:
                        self.report.waited_s[self._attacked].append(time.monotonic() - began_s)
                except (httpx.HTTPError, OSError, ValueError, KeyError, IndexError) as error:
                    problem = repr(error)
                if problem:
                    self.report.wrong.append(f"{kind.__name__}: {problem}")

    # kinds of requests; each returns what is wrong about the answer

    async def _whole(self, client: httpx.AsyncClient) -> str:
        prompt, expected = self._random.choice(self._known)
        answer = await self._post(client, TEXT, self._asked(prompt))
        text = answer["choices"][0]["text"]
        return "" if text == expected else f"{text!r}, not {expected!r}"

    async def _stream(self, client: httpx.AsyncClient) -> str:
        prompt, expected = self._random.choice(self._known)
        text, done = "", False
        while (again := await self._stream_once(client, prompt)) is None:
            await asyncio.sleep(0.2)
        text, done = again
        return "" if done and text == expected else f"{text!r}, not {expected!r}, done: {done}"

    async def _stream_once(self, client: httpx.AsyncClient, prompt: str) -> tuple[str, bool] | None:
        """None: the server is busy, and it is to be tried again."""
        text, done = "", False
        async with client.stream("POST", TEXT, json=self._asked(prompt) | {"stream": True}) as response:
            self.report.statuses[response.status_code] += 1
            if response.status_code == 429 and self._attacked:
                return None
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    done = True
                elif line.startswith("data: "):
                    text += json.loads(line[6:])["choices"][0]["text"]
        return text, done

    async def _choices(self, client: httpx.AsyncClient) -> str:
        """A prompt that nobody else has, drawn from: only its shape is known."""
        words = " ".join(str(self._random.random()) for _ in range(self._random.randrange(1, 20)))
        body = {"model": self._model, "messages": [{"role": "user", "content": words}], "n": 2, "temperature": 1.0}
        answer = await self._post(client, CHAT, body | {"max_tokens": 8, "ignore_eos": True, "cache_salt": words[:4]})
        return (
            "" if answer["usage"]["completion_tokens"] == 16 and len(answer["choices"]) == 2 else str(answer["usage"])
        )

    async def _score(self, client: httpx.AsyncClient) -> str:
        prompt, _ = self._random.choice(self._known)
        answer = await self._post(client, TEXT, self._asked(prompt) | {"max_tokens": 0, "echo": True, "logprobs": 1})
        logprobs = answer["choices"][0]["logprobs"]["token_logprobs"]
        return "" if len(logprobs) == answer["usage"]["prompt_tokens"] and None not in logprobs[1:] else str(logprobs)

    async def _leave(self, client: httpx.AsyncClient) -> str:
        """By hand, so that it is certain what was sent; leaves at any moment, and reads what has come or not."""
        host, port = self._url.removeprefix("http://").split(":")
        body = json.dumps(self._asked("gone " * 40) | {"max_tokens": 2000, "stream": self._random.random() < 0.7})
        head = f"POST {TEXT} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(body)}\r\n\r\n"
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write((head + body).encode())
        await writer.drain()
        await asyncio.sleep(self._random.choice([0, 0.01, 0.1, 0.5]))
        if self._random.random() < 0.5:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(reader.read(500), 0.5)
        writer.close()
        return ""

    async def _refused(self, client: httpx.AsyncClient) -> str:
        response = await client.post(TEXT, json=self._asked("x") | {"temperature": 3})
        self.report.statuses[response.status_code] += 1
        return "" if response.json()["error"]["param"] == "temperature" else response.text

    async def _look(self, client: httpx.AsyncClient) -> str:
        response = await client.get(self._random.choice(["/v1/models", "/health", "/metrics"]))
        self.report.statuses[response.status_code] += 1
        return "" if response.status_code == 200 else response.text

    async def _post(self, client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
        response = await client.post(path, json=body)
        self.report.statuses[response.status_code] += 1
        while response.status_code == 429 and self._attacked:  # as OpenAI's own clients do
            await asyncio.sleep(0.2)
            response = await client.post(path, json=body)
            self.report.statuses[response.status_code] += 1
        answer: dict[str, Any] = response.json()
        return answer

    def _asked(self, prompt: str) -> dict[str, Any]:
        return {"model": self._model, "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}

    async def _rest(self) -> State:
        """The state when all have gone; the same twice, or after half a minute whatever it is."""
        looked, last = 0, None
        async with httpx.AsyncClient(base_url=self._url, timeout=120) as client:
            for _ in range(60):
                await asyncio.sleep(0.5)
                found = {
                    (sample.name, tuple(sample.labels.items())): sample.value
                    for family in text_string_to_metric_families((await client.get("/metrics")).text)
                    for sample in family.samples
                }
                looked += 1
                state = self._state(found)
                if not state.choices_open and not state.blocks_used and not state.transfers and last == state.tasks:
                    break
                last = state.tasks
        self.report.sent["look"] += looked
        ended = sum(value for (name, _), value in found.items() if name == "stowage_http_requests_total")
        self.report.counted = ended + 1  # the page is made before its own request has ended
        return state

    def _state(self, found: dict[tuple[str, tuple[tuple[str, str], ...]], float]) -> State:
        def total(metric: str) -> float:
            return sum(value for (name, _), value in found.items() if name == metric)

        statm = Path(f"/proc/{self._pid}/statm").read_text().split()
        return State(
            resident_bytes=int(statm[1]) * os.sysconf("SC_PAGE_SIZE"),
            descriptors=len(os.listdir(f"/proc/{self._pid}/fd")),
            tasks=total("stowage_server_tasks"),
            choices_open=total("stowage_choices_open"),
            blocks_used=total("stowage_device_blocks_used"),
            chunks_pinned=total("stowage_host_chunks_pinned"),
            transfers=total("stowage_transfers_under_way"),
        )


def known_answers(model: Path) -> list[tuple[str, str]]:
    """Prompts that share beginnings of many lengths, and how the model goes on."""
    story = " ".join(f"Word {n} of the story is {n * n}." for n in range(40))
    prompts = [f"{story[: 40 * (n % 8)]} Question {n}?" for n in range(KNOWN)]
    with Engine(model, Memory(kv_cache_memory="8MiB")) as engine:
        completions = engine.generate(list(prompts), SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True))
    return [(prompt, completion.text) for prompt, completion in zip(prompts, completions, strict=True)]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--attack", type=int, default=0, help="attackers in the second half of the rounds")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_models.write("llama", Path(folder) / "tiny")
        known = known_answers(model)
        disk = ["--disk", f"{folder}/cache:64MiB"]
        command = [sys.executable, "-m", "stowage", "serve", str(model), "--port", "0", "--json", *FLAGS, *disk]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            told = json.loads(server.stdout.readline())
            load = Load(told["url"], server.pid, told["model"], known, Path(folder) / "cache")
            report = asyncio.run(load.run(options.clients, options.seconds, options.rounds, options.attack))
            server.terminate()
            status = server.wait(120)
    for state in report.states:
        print(json.dumps(asdict(state)))
    print(f"{report.sent.total()} requests in {report.seconds:.0f} s: {dict(report.sent)}")
    print(f"answers that were waited for, by status: {dict(report.statuses)}")
    if options.attack:
        print(f"95 of 100 answers: {report.p95_s(False):.2f} s alone, {report.p95_s(True):.2f} s beside attackers")
        print(f"attackers: {dict(sorted(report.told.items()))}")
    faults = report.faults() + ([f"the server ended with {status}"] if status else [])
    print("\n".join(faults) or "nothing lost, nothing held, nothing leaked")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
