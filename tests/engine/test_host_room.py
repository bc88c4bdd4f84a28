"""A sequence that waits for host memory, because a slow tier writes from it, is told when there is some: it neither
asks again and again nor evicts what it cannot use.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from docs.examples.dict_tier import DictTier
from stowage.cache.store import TieredStore
from stowage.config.memory import Memory
from stowage.engine import loop
from stowage.engine.engine import Engine
from stowage.storage.protocol import Transfer
from tests.engine.conftest import greedy, random_prompt
from tests.engine.families.world import World

SIZES = {"block_size": 16, "chunk_blocks": 2, "max_num_batched_tokens": 96}
DEVICE_BLOCKS, HOST_CHUNKS = 8, 8
PROMPT, NEW_TOKENS = random_prompt(300, seed=3), 24
WAIT_S = 60.0


class HeldTier(DictTier):
    """Begins what it is to store when it is told to, and not before."""

    def __init__(self) -> None:
        super().__init__(64 << 20)
        self.wake: Callable[[], None] = lambda: None
        self.held: list[Transfer] | None = []

    def store(self, transfer: Transfer) -> None:
        if self.held is not None:
            self.held.append(transfer)
        else:
            super().store(transfer)
            self.wake()

    def go_on(self) -> None:
        assert self.held
        held, self.held = self.held, None
        for transfer in held:
            super().store(transfer)
        self.wake()


@pytest.fixture
def at_rest(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An engine whose only sequence, longer than the device, waits for host memory; nothing but news ends a wait."""
    monkeypatch.setattr(loop, "_LOADING_WAIT_S", 1e4)
    monkeypatch.setattr(loop, "_IDLE_WAIT_S", 1e4)
    waits, real = threading.Event(), TieredStore.wait

    def wait(store: TieredStore, timeout_s: float) -> None:
        waits.set()
        real(store, timeout_s)

    monkeypatch.setattr(TieredStore, "wait", wait)
    world, tier = World("llama"), HeldTier()
    with Engine(world.model, Memory(kv_cache_memory="8MiB", **SIZES)) as roomy:
        group = roomy.parts.layout.blocks[0].group
    memory = Memory(
        kv_cache_memory=(DEVICE_BLOCKS + 1) * group.bytes_per_block,
        host_memory=HOST_CHUNKS * group.bytes_per_chunk,
        **SIZES,
    )
    with Engine(world.model, memory, tiers=[tier]) as engine:
        before = random_prompt(100, seed=4)
        world.check(before, engine.generate([before], greedy(4))[0])
        assert tier.held, "what was computed is being written"
        waits.clear()
        request = engine.submit(PROMPT, greedy(NEW_TOKENS))
        assert waits.wait(WAIT_S), request.progress()
        assert not request.done
        yield SimpleNamespace(engine=engine, world=world, tier=tier, request=request)
        if tier.held is not None:
            tier.go_on()
        engine.check()


def test_it_goes_on_when_the_tier_has_written(at_rest: Any) -> None:
    assert not at_rest.request.wait(0.05)
    at_rest.tier.go_on()
    assert at_rest.request.wait(WAIT_S)
    at_rest.world.check(PROMPT, at_rest.request.result())


def test_it_can_be_cancelled_meanwhile(at_rest: Any) -> None:
    at_rest.engine.cancel(at_rest.request)
    assert at_rest.request.wait(WAIT_S) and at_rest.request.result().finish_reason == "cancelled"


def test_the_engine_can_be_closed_meanwhile(at_rest: Any) -> None:
    closing = threading.Thread(target=at_rest.engine.close, args=(0.0,))
    closing.start()
    assert at_rest.request.wait(WAIT_S)
    closing.join(WAIT_S)
    assert not closing.is_alive()
