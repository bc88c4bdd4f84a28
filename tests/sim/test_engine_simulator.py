"""The engine's simulator itself: it replays, it reaches every fault and happening, and it finds bugs planted for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stowage.cache.guard import Guarded
from stowage.core.groups.sliding import Sliding
from stowage.engine import loop as engine_loop
from stowage.engine.kv_manager import KVManager
from stowage.engine.loop import Loop
from stowage.engine.request import Request
from stowage.engine.sampling import Sampler
from stowage.engine.scheduler import Scheduler
from stowage.engine.swap.preemption import PreemptionSwap
from stowage.engine.swap.swap_space import SwapSpace
from stowage.executor.block_pool import BlockPool
from stowage.testing.engine_sim import simulate, world
from stowage.transfer.async_copies import AsyncCopies
from tests.sim.worlds import Planted, assert_no_hash_seed_matters

SEEDS_TO_FIND = 600

FOUND = {
    157: "a sequence larger than the device failed while copies that hold host memory were still under way",
    340: "weights that could not be read for the trial after a failed forward ended the engine",
    4477: "a newcomer that found no room was admitted and preempted for ever within one step",
    101520: "a sequence that was preempted and came back within one step was computed from blocks of another",
}


def leaked_blocks(patch: pytest.MonkeyPatch) -> None:
    """A request that is cancelled while it runs keeps its blocks."""
    real = Scheduler.finish

    def finish(self: Scheduler, sequence: Any) -> None:
        if len(sequence.new_tokens) == 3:
            sequence.tables = [type(table)() for table in sequence.tables]
        real(self, sequence)

    patch.setattr(Scheduler, "finish", finish)


def pin_that_is_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVManager, "release", lambda self, fetch: None)


def waiter_that_is_not_told(patch: pytest.MonkeyPatch) -> None:
    """A request that ends with an error, and nobody hears of it."""
    real = Request.deliver
    patch.setattr(Request, "deliver", lambda self, delta: real(self, delta) if delta.error is None else None)


def callback_that_ends_the_engine(patch: pytest.MonkeyPatch) -> None:
    """What ``on_delta`` raises reaches the engine's thread, outside of all protection."""

    def deliver(self: Request, delta: Any) -> None:
        self.completion, self.error = delta.completion, delta.error
        if self.on_delta is not None:
            self.on_delta(delta)
        if delta.completion is not None or delta.error is not None:
            self._done.set()

    patch.setattr(Request, "deliver", deliver)


def commit_before_the_bytes(patch: pytest.MonkeyPatch) -> None:
    """Chunks are found while they are still being copied."""
    patch.setattr(AsyncCopies, "when_stored", lambda self, ticket, callback: callback(True))


def slots_given_back_while_they_are_read(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AsyncCopies, "when_loaded", lambda self, callback: callback())
    patch.setattr(AsyncCopies, "wait_for_loads", lambda self: None)


def nan_that_is_drawn(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(engine_loop, "check_logits", lambda logits: int(logits.numpy()[-1].argmax()))


def temperature_that_overflows(patch: pytest.MonkeyPatch) -> None:
    def filtered(self: Sampler, logits: torch.Tensor) -> torch.Tensor:
        return (logits / self.params.temperature).softmax(-1)

    patch.setattr(Sampler, "_filtered", filtered)


def window_that_is_too_short(patch: pytest.MonkeyPatch) -> None:
    """A block is freed one token too early."""
    real = Sliding.first_live_block
    patch.setattr(Sliding, "first_live_block", lambda self, position: real(self, position + 1))


def preempted_state_that_does_not_come_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVManager, "copy_in", lambda self, pool, plan: True)


def swapped_chunk_that_is_not_pinned(patch: pytest.MonkeyPatch) -> None:
    """What a sequence reads in host memory may be given to another chunk."""
    real = SwapSpace._pin_known

    def pin_known(self: SwapSpace, store: Any, *rest: Any) -> Any:
        slots, fetch = real(self, store, *rest)
        if fetch is not None:
            store.release(fetch)
        return slots, None

    patch.setattr(SwapSpace, "_pin_known", pin_known)


def everybody_pays_for_one(patch: pytest.MonkeyPatch) -> None:
    """A forward that raises ends every request in it."""
    patch.setattr(Loop, "_retry_alone", lambda self, work, error: self._fail(work, engine_loop.failed_alone(error)))


def blocks_that_are_not_computed_again(patch: pytest.MonkeyPatch) -> None:
    """After a forward that raised, sequences go on as if their blocks were what they were."""
    patch.setattr(Scheduler, "isolate", lambda self, work: None)


def tier_whose_errors_get_through(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Guarded, "lookup", lambda self, keys: self._tier.lookup(keys))


def block_that_is_named_for_another(patch: pytest.MonkeyPatch) -> None:
    """A chunk's blocks are found under its key in the wrong order."""
    real = BlockPool.name
    patch.setattr(BlockPool, "name", lambda self, key, blocks: real(self, key, list(blocks)[::-1]))


def stuck_too_soon(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("stowage.engine.scheduler.STUCK_MAX", -1)


def requests_left_behind(patch: pytest.MonkeyPatch) -> None:
    """Who was preempted never gets its turn again. Worlds have some 1,000 steps."""
    patch.setattr(world, "STEPS_MAX", 20_000)
    patch.setattr(PreemptionSwap, "swap_in", lambda self, sequence, headroom_blocks, running: False)


PLANTS = [
    Planted(leaked_blocks, 1, "blocks in use that no sequence has"),
    Planted(pin_that_is_kept, 0, "fetches were not given back"),
    Planted(waiter_that_is_not_told, 4, "is not told"),
    Planted(callback_that_ends_the_engine, 0, "the engine stopped: ValueError"),
    Planted(commit_before_the_bytes, 5, "wrong bytes of token"),
    Planted(slots_given_back_while_they_are_read, 289, "changed while it was read"),
    Planted(nan_that_is_drawn, 14, "nothing is left that may be drawn"),
    Planted(temperature_that_overflows, 0, "failed: StowageError"),
    Planted(window_that_is_too_short, 2, "a query needs a block that is nowhere"),
    Planted(preempted_state_that_does_not_come_back, 0, "a wrong recurrent state"),
    Planted(swapped_chunk_that_is_not_pinned, 1, "wrong bytes of token"),
    Planted(everybody_pays_for_one, 19, "failed: StowageError"),
    pytest.param(Planted(blocks_that_are_not_computed_again, 19, "is not told"), marks=pytest.mark.rare),
    Planted(tier_whose_errors_get_through, 42, "the engine stopped: OSError"),
    Planted(block_that_is_named_for_another, 0, "wrong bytes of token"),
    Planted(stuck_too_soon, 30, "failed: TransferError"),
    pytest.param(Planted(requests_left_behind, 3, "requests do not end"), marks=pytest.mark.rare),
]


@pytest.mark.slow
def test_12_worlds_hold_every_promise() -> None:
    for seed in range(12):
        simulate(seed)


@pytest.mark.parametrize("seed", FOUND)
def test_seeds_that_once_failed_hold(seed: int) -> None:
    simulate(seed)


@pytest.mark.rare
def test_a_seed_names_a_run_whatever_the_hash_seed() -> None:
    told = assert_no_hash_seed_matters(engine=True)
    assert "fault copy_in_fails" in told["never"] and simulate(7).digest == simulate(7).digest != simulate(8).digest


def test_a_failure_says_how_to_replay_it(monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTS[0].is_replayed(simulate, SEEDS_TO_FIND, monkeypatch, command="sim --engine")


@pytest.mark.slow
@pytest.mark.parametrize("planted", PLANTS, ids=lambda planted: planted.plant.__name__)
def test_a_planted_bug_is_found(planted: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    planted.is_found(simulate, SEEDS_TO_FIND, monkeypatch)
