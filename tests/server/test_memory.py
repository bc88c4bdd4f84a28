"""The memory of requests has a ceiling, reading is shared out among clients, and answers that nobody takes end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import threading
import time
from functools import partial

import httpx
import pytest

from stowage.errors import ConfigError
from stowage.server.api_errors import ApiError
from stowage.server.apis import completions
from stowage.server.async_engine import AsyncEngine
from stowage.server.fair_queue import FairQueue
from stowage.server.limits import Limits
from stowage.server.memory import SMALL_BYTES, RequestMemory, Reservation, bytes_to_read
from stowage.server.served_model import ServedModel
from stowage.server.supervisor import EngineSupervisor
from tests.nursery import wait_until
from tests.server.wire import connected, request
from tests.threads import together

TEXT = "/v1/completions"
MiB = 1 << 20


def status_of(take) -> int:
    try:
        take()
    except ApiError as error:
        return error.status
    return 200


def test_a_ceiling_for_all_and_room_for_small_ones() -> None:
    memory = RequestMemory(64 * MiB)
    one, other, small = Reservation(memory, "a"), Reservation(memory, "b"), Reservation(memory, "a")
    one.take(48 * MiB)
    assert status_of(lambda: Reservation(memory, "a").take(2 * MiB)) == 429, "a client has three quarters"
    assert status_of(lambda: Reservation(memory, "b").take(49 * MiB)) == 413, "which no client can ever have"
    other.take(8 * MiB)
    assert status_of(lambda: other.take(MiB)) == 429
    small.take(SMALL_BYTES)
    assert memory.held_bytes == 57 * MiB and memory.refused == 3
    for reservation in (one, other, small, one):
        reservation.close()
    assert memory.held_bytes == 0 and status_of(lambda: Reservation(memory, "c").take(48 * MiB)) == 200


def test_many_threads() -> None:
    memory, most = RequestMemory(8 * MiB), []

    def work(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(300):
            reservation = Reservation(memory, str(seed % 3))
            for _ in range(chance.randrange(5)):
                with contextlib.suppress(ApiError):
                    reservation.take(chance.randrange(3 * MiB))
                most.append(memory.held_bytes)
            reservation.shrink(chance.randrange(3 * MiB))
            reservation.close()
            reservation.note(100)

    together(partial(work, seed) for seed in range(6))
    assert max(most) <= 8 * MiB and memory.held_bytes == 0


HOSTILE = [
    json.dumps({"prompt": "漢" * 50_000, "x": "a" * 1000}).encode(),
    ('{"prompt": "' + "a" * 200_000 + '\U0001f6a2"}').encode(),
    b"[" + b"{}," * 60_000 + b"{}]",
    b"[" + b"[]," * 60_000 + b"[]]",
    b"[" + b"123456789," * 20_000 + b"1]",
    b"[" + b'{"a":1.5,"b":[]},' * 10_000 + b"1]",
    b"[" + b'"ab",' * 50_000 + b"1]",
    b"{" + b",".join(b'"k%d":%d' % (n, n) for n in range(20_000)) + b"}",
]


@pytest.mark.parametrize("body", HOSTILE, ids=range(len(HOSTILE)))
def test_what_reading_takes_is_not_more_than_was_asked_for(body: bytes) -> None:
    import tracemalloc

    tracemalloc.start()
    value = json.loads(bytearray(body))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert value and peak <= bytes_to_read(body) + 2 * len(body)


def test_limits_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match="request_memory is 8MiB: it must hold 8 bodies"):
        Limits(request_memory="8MiB")
    for name, value in (
        ("request_memory", "x"),
        ("reading_timeout_s", "x"),
        ("max_choices", 1.5),
        ("keep_alive_s", True),
    ):
        with pytest.raises(ConfigError, match=name):
            Limits(**{name: value})


# turns


def test_clients_take_turns() -> None:
    async def ask() -> list[str]:
        queue, order, first = FairQueue("test"), [], threading.Event()

        def work(name):
            return lambda job: (first.wait(10), order.append(name))

        names = ("a1", "a2", "a3", "a4", "b1", "c1", "b2")
        asked = [asyncio.create_task(queue.run(name[0], work(name))) for name in names]
        await asyncio.sleep(0.01)
        asked[2].cancel()
        first.set()
        await asyncio.gather(*asked, return_exceptions=True)
        queue.close()
        return order

    assert asyncio.run(ask()) == ["a1", "a2", "b1", "c1", "b2", "a4"]


def test_what_nobody_waits_for_ends_at_its_next_check() -> None:
    async def ask() -> None:
        queue, reached, checks = FairQueue("test"), threading.Event(), []

        def work(job) -> None:
            reached.set()
            while True:
                job.check()
                checks.append(1)
                time.sleep(0.005)

        task = asyncio.create_task(queue.run("a", work))
        await asyncio.to_thread(reached.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        count = len(checks)
        assert await queue.run("b", lambda job: 5) == 5 and len(checks) == count, "it has ended when that is told"
        queue.close()

    asyncio.run(ask())


def test_processor_time_of_a_client() -> None:
    now = [0.0]

    def takes(seconds: float):
        def work(job) -> float:
            job.began_s -= seconds
            job.check()
            return job.left_s

        return work

    async def ask() -> None:
        queue = FairQueue("test", 30.0, lambda: now[0])
        assert await queue.run("a", takes(20)) == 30
        with pytest.raises(ApiError) as caught:
            await queue.run("a", takes(11))
        assert caught.value.status == 429 and await queue.run("b", takes(1)) == 30
        now[0] += 60
        assert queue.spent_s("a") == pytest.approx(1, abs=0.1), "what it used comes back, 30 s a minute"
        assert await queue.run("a", takes(20)) == pytest.approx(29, abs=0.1)
        queue.close()

    asyncio.run(ask())


# answers


def test_an_answer_that_nobody_takes_ends_and_others_go_on(engine) -> None:
    """The one that holds most: a client that asks for many log-probabilities, and reads nothing."""
    limits = Limits(max_body_size=1024, request_memory="1MiB")
    async_engine = AsyncEngine(EngineSupervisor(lambda: engine), ServedModel("tiny"), limits)
    asked = {"model": "tiny", "prompt": "x", "max_tokens": 1500, "ignore_eos": True, "stream": True}

    async def ask() -> None:
        holds = [Reservation(async_engine.memory, "slow"), Reservation(async_engine.memory, "good")]
        bodies = [json.dumps(asked | {"logprobs": 20}).encode(), json.dumps(asked | {"max_tokens": 600}).encode()]
        asks = [
            await async_engine.read(completions.read, body, reservation)
            for body, reservation in zip(bodies, holds, strict=True)
        ]
        slow, good = [
            await async_engine.open(one, b"", reservation) for one, reservation in zip(asks, holds, strict=True)
        ]
        tokens, peak = 0, 0
        async for _, delta in good.pieces():
            tokens += len(delta.token_ids)
            peak = max(peak, async_engine.memory.held_bytes)
        assert tokens == 600
        until_s = time.monotonic() + 60
        while slow.reservation.bytes and async_engine.choices_open > 1 and time.monotonic() < until_s:
            peak = max(peak, async_engine.memory.held_bytes)
            await asyncio.sleep(0.001)
        assert peak <= MiB + 64_000, "no more than some pieces above it"
        with pytest.raises(ApiError) as caught:
            async for _ in slow.pieces():
                pass
        assert caught.value.status == 429 and all(request.wait(60) for request in slow.requests)
        good.close()
        for reservation in holds:
            reservation.close()
        assert async_engine.memory.held_bytes == 0 and async_engine.choices_open == 0

    try:
        asyncio.run(ask())
    finally:
        async_engine.close()
    assert engine.alive


def peak_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


@pytest.mark.rare
def test_large_bodies_of_four_clients(start) -> None:
    """The attack that took gigabytes and a minute: memory stays, and small prompts are answered meanwhile."""
    server = start("--request-memory", "96MiB", "--max-body-size", "8MiB")
    small = {"model": "tiny", "prompt": "ab", "max_tokens": 1}
    assert httpx.post(server.url + TEXT, json=small, timeout=60).status_code == 200
    before = peak_bytes(server.pid)
    stop, statuses, held = threading.Event(), [], []
    text = "".join(random.Random(3).choices("abcdefgh ijkl", k=8 * MiB - 1000))
    body = json.dumps({"model": "tiny", "prompt": text}).encode()

    def attack() -> None:
        while not stop.is_set():
            with contextlib.suppress(httpx.HTTPError):
                sent = httpx.post(
                    server.url + TEXT, content=body, headers={"content-type": "application/json"}, timeout=60
                )
                statuses.append(sent.status_code)

    attackers = [threading.Thread(target=attack) for _ in range(4)]
    for attacker in attackers:
        attacker.start()
    waited = []
    for _ in range(12):
        began_s = time.monotonic()
        assert httpx.post(server.url + TEXT, json=small, timeout=60).status_code == 200
        waited.append(time.monotonic() - began_s)
        held.append(server.total("stowage_request_memory_bytes"))
    stop.set()
    for attacker in attackers:
        attacker.join()
    assert statuses and set(statuses) <= {400, 413, 429}
    assert max(held) <= 96 * MiB and peak_bytes(server.pid) - before <= 320 * MiB, "gigabytes before"
    assert sorted(waited)[len(waited) // 2] < 5, "a minute before; the machine may be busy"
    wait_until(lambda: server.total("stowage_request_memory_bytes") == 0, "nothing is held")
    print(sorted(waited)[-3:], (peak_bytes(server.pid) - before) // MiB, max(held) // MiB, statuses[:20], os.getpid())
    server.stop()


@pytest.mark.rare
def test_slow_readers_of_streams(start) -> None:
    server = start("--request-memory", "64MiB", "--max-num-seqs", "8")
    asked = {"model": "tiny", "prompt": "x", "max_tokens": 1000, "ignore_eos": True, "stream": True, "logprobs": 20}
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(connected(server, 4096)).sendall(request(TEXT, asked))
        small = {"model": "tiny", "prompt": "ab", "max_tokens": 2}
        for _ in range(5):
            assert httpx.post(server.url + TEXT, json=small, timeout=60).status_code == 200
            assert server.total("stowage_request_memory_bytes") <= 64 * MiB
    wait_until(lambda: server.total("stowage_request_memory_bytes") == 0, "nothing is held", 60)
    server.stop()
