"""Clients that mean harm, or are broken: each kind that once ended the server, took its memory or held up others.

They come from addresses of their own (127.0.0.2 and so on), as other people's machines do, and from a process of their
own: `python -m tests.server.attack URL MODEL SECONDS CLIENTS [CACHE]`. What they are told is counted, and nothing is
expected of it but that the server lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import shutil
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
ODD: list[dict[str, Any]] = [
    {"temperature": 1e-38}, {"temperature": 5e-324}, {"top_p": 1e-320}, {"temperature": "x"}, {"stop": [None]},
    {"stop": [""]}, {"stop": 5}, {"stop_token_ids": 5}, {"stop_token_ids": [10**30]}, {"seed": -(10**30)},
    {"prompt": "\ud800"}, {"prompt": [[]]}, {"prompt": [-1]}, {"prompt": None}, {"n": 10**9}, {"max_tokens": 10**9},
    {"logprobs": 10**6}, {"min_p": 1.0}, {"nonsense": {}}, {"stream_options": []}, {"cache_salt": "\udfff"},
]  # fmt: skip
"""Fields that used to be faults."""
_LARGE_BYTES = (8 << 20) - 2000


class Attackers:
    """`told`: what they were answered, by kind and status; 0: a connection that ended. `cache`: a directory that is
    removed now and then, if any.
    """

    def __init__(self, url: str, model: str, cache: Path | None) -> None:
        self.told: Counter[tuple[str, int]] = Counter()
        self._url, self._model, self._cache = url, model, cache
        self._host, self._port = url.removeprefix("http://").split(":")
        self._random = random.Random(1)
        text = "".join(self._random.choices("abcdefgh ijkl", k=_LARGE_BYTES))
        self._large = json.dumps({"model": model, "prompt": text}).encode()
        self._tokens = json.dumps({"model": model, "prompt": [5] * (_LARGE_BYTES // 3)}).encode()
        self._too_large = self._large + b" " * (1 << 20)
        self._kinds = [
            self._odd, self._large_text, self._large_tokens, self._beyond, self._stops, self._head, self._twice,
            self._half_a_head, self._half_a_body, self._junk, self._slow_reader, self._leaves, self._many_choices,
        ]  # fmt: skip

    async def run(self, until_s: float, clients: int) -> None:
        """So many at a time; one of them removes the cache directory."""
        alone = [self._remover(until_s)] if self._cache is not None else []
        await asyncio.gather(*(self._client(number, until_s) for number in range(clients)), *alone)

    async def _client(self, number: int, until_s: float) -> None:
        address = f"127.0.0.{2 + number % 8}"
        transport = httpx.AsyncHTTPTransport(local_address=address)
        async with httpx.AsyncClient(base_url=self._url, timeout=60, transport=transport) as client:
            while time.monotonic() < until_s:
                kind = self._random.choice(self._kinds)
                status = 0
                with contextlib.suppress(httpx.HTTPError, OSError, TimeoutError, ValueError):
                    status = await asyncio.wait_for(kind(client, address), 60) or 0
                self.told[kind.__name__.strip("_"), status] += 1
                await asyncio.sleep(self._random.random() * 0.05)

    async def _remover(self, until_s: float) -> None:
        assert self._cache is not None
        while time.monotonic() < until_s:
            await asyncio.sleep(min(5.0, max(0.0, until_s - time.monotonic())))
            await asyncio.to_thread(shutil.rmtree, self._cache, ignore_errors=True)
            self.told["remove", 0] += 1

    # kinds; each returns the status that it got

    async def _odd(self, client: httpx.AsyncClient, _: str) -> int:
        body = self._asked("x") | self._random.choice(ODD)
        return (await self._post(client, json.dumps(body).encode())).status_code

    async def _large_text(self, client: httpx.AsyncClient, _: str) -> int:
        return (await self._post(client, self._large)).status_code

    async def _large_tokens(self, client: httpx.AsyncClient, _: str) -> int:
        return (await self._post(client, self._tokens)).status_code

    async def _beyond(self, client: httpx.AsyncClient, _: str) -> int:
        return (await self._post(client, self._too_large)).status_code

    async def _stops(self, client: httpx.AsyncClient, _: str) -> int:
        stop = ["a" * self._random.choice([1024, 100_000]) + str(n) for n in range(16)]
        stop = [text[: 1024 if self._random.random() < 0.5 else None] for text in stop]
        return (await self._post(client, json.dumps(self._asked("a" * 50) | {"stop": stop}).encode())).status_code

    async def _many_choices(self, client: httpx.AsyncClient, _: str) -> int:
        body = self._asked("x" * 100) | {"n": 8, "max_tokens": 50, "logprobs": 20, "temperature": 1.0}
        return (await self._post(client, json.dumps(body).encode())).status_code

    async def _head(self, client: httpx.AsyncClient, _: str) -> int:
        return (await client.get("/health", headers={"x-long": "x" * 60_000})).status_code

    async def _twice(self, client: httpx.AsyncClient, _: str) -> int:
        return (await client.get("/v1/models", headers=[("authorization", "a"), ("authorization", "b")])).status_code

    async def _half_a_head(self, _: httpx.AsyncClient, address: str) -> int:
        return await self._raw(address, b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nx: ", 3)

    async def _half_a_body(self, _: httpx.AsyncClient, address: str) -> int:
        return await self._raw(address, self._head_of(_LARGE_BYTES) + b'{"model": "' * 10_000, 3)

    async def _junk(self, _: httpx.AsyncClient, address: str) -> int:
        return await self._raw(address, self._random.randbytes(3000), 1)

    async def _slow_reader(self, _: httpx.AsyncClient, address: str) -> int:
        body = json.dumps(self._asked("x") | {"max_tokens": 1500, "stream": True, "logprobs": 20}).encode()
        return await self._raw(address, self._head_of(len(body)) + body, 5)

    async def _leaves(self, _: httpx.AsyncClient, address: str) -> int:
        body = json.dumps(self._asked("x" * 200) | {"max_tokens": 1500, "n": 4}).encode()
        return await self._raw(address, self._head_of(len(body)) + body, self._random.random())

    async def _raw(self, address: str, sent: bytes, seconds: float) -> int:
        """Send, read nothing for some time, and leave."""
        reader, writer = await asyncio.open_connection(self._host, int(self._port), local_addr=(address, 0), limit=1024)
        try:
            writer.write(sent)
            await writer.drain()
            await asyncio.sleep(seconds)
            with contextlib.suppress(TimeoutError):
                first = await asyncio.wait_for(reader.read(15), 0.01)
                return int(first.split()[1]) if first.startswith(b"HTTP/1.1 ") else 0
        finally:
            writer.transport.abort()
        return 0

    async def _post(self, client: httpx.AsyncClient, body: bytes) -> httpx.Response:
        return await client.post(TEXT, content=body, headers={"content-type": "application/json"})

    def _head_of(self, length: int) -> bytes:
        kind = "content-type: application/json"
        return f"POST {TEXT} HTTP/1.1\r\nhost: localhost\r\n{kind}\r\ncontent-length: {length}\r\n\r\n".encode()

    def _asked(self, prompt: str) -> dict[str, Any]:
        return {"model": self._model, "prompt": prompt, "max_tokens": 4, "ignore_eos": True}


async def attack(url: str, model: str, seconds: float, clients: int, cache: Path) -> Counter[tuple[str, int]]:
    """What they were told: `Attackers` in a process of their own."""
    command = [sys.executable, "-m", "tests.server.attack", url, model, str(seconds), str(clients), str(cache)]
    running = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    printed, _ = await running.communicate()
    assert running.returncode == 0
    return Counter({(kind, status): count for kind, status, count in json.loads(printed)})


def main(url: str, model: str, seconds: str, clients: str, cache: str = "") -> None:
    attackers = Attackers(url, model, Path(cache) if cache else None)
    asyncio.run(attackers.run(time.monotonic() + float(seconds), int(clients)))
    print(json.dumps([[*told, count] for told, count in sorted(attackers.told.items())]))


if __name__ == "__main__":
    main(*sys.argv[1:])
