"""What vLLM says late: loads that it begins steps after they were offered, or not at all (0.33's deferred loads, and
its cap on what comes from outside), and steps that are built while earlier ones are carried out (async scheduling).
The connector's two sides without an engine, because vLLM's CPU build does none of it.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.vllm.two_sides import (
    FULL,
    WINDOW,
    Machine,
    Request,
    assert_loaded,
    blocks_for,
    load_into,
    prompt,
    snapshot,
    store_prompt,
)

GROUPS = pytest.mark.parametrize("groups", [[FULL], [FULL, WINDOW]], ids=["full", "window"])


def others(here: Machine, name: str, seed: int) -> None:
    """A prompt of somebody else, computed in three steps."""
    request, table = Request(name, prompt(96, seed)), blocks_for(96, 26)
    here.offer(request)
    here.scheduler.allocated(request, [], 0)
    for begin in range(0, 96, 32):
        here.compute(request, table, begin, begin + 32)
    here.scheduler.finished(request)


@GROUPS
def test_a_load_that_begins_steps_after_it_was_offered(groups: list[Any], made: Any) -> None:
    """What was offered stays pinned, though others need its memory."""
    here = made(groups, host="512KiB", chunk_blocks=2)
    store_prompt(here, prompt(128))
    before = snapshot(here)
    here.wipe()
    second = Request("second", prompt(128))
    count = here.offer(second)
    assert count == 112, "the chunk that ends the prompt serves its first block"
    for seed in range(1, 17):
        others(here, f"other {seed}", seed)
    assert here.offer(Request("third", prompt(96, seed=1))) == 0, "it had to go"
    assert here.scheduler.stats()["chunks_pinned"] > 0
    table = blocks_for(128, 12)
    here.scheduler.allocated(second, [table] * len(groups), count)
    assert here.step({}) == set()
    assert_loaded(here, before, table, range(7), range(4, 7))  # 112 - 39 = 73: block 4 on
    assert here.scheduler.stats()["chunks_pinned"] == 0
    here.scheduler.check()


def test_what_was_stored_before_a_reset_is_not_loaded_after_it(made: Any) -> None:
    """The weights have changed between the offer and the load, which fails, so that the request is computed."""
    here = made([FULL])
    store_prompt(here, prompt(300))
    second = Request("second", prompt(300))
    count = here.offer(second)
    assert here.scheduler.reset()
    here.scheduler.allocated(second, [blocks_for(300)], count)
    assert here.step({}) == {"second"}
    assert here.scheduler.stats()["chunks_pinned"] == 0


@pytest.mark.parametrize("ends", [True, False], ids=["aborted", "capped"])
def test_a_load_that_never_begins(ends: bool, made: Any) -> None:
    """The request is aborted before, or vLLM takes nothing of what was offered: nothing stays pinned."""
    here = made([FULL])
    store_prompt(here, prompt(300))
    second = Request("second", prompt(300))
    assert here.offer(second) == 256
    if ends:
        second.done = True
        here.scheduler.finished(second)
    else:
        here.scheduler.allocated(second, [[]], 0)
        here.compute(second, blocks_for(300), 0, 300)
    assert here.scheduler.stats()["chunks_pinned"] == 0
    assert here.offer(Request("third", prompt(300))) == 256
    here.scheduler.check()


@GROUPS
def test_steps_are_built_before_earlier_ones_are_carried_out(groups: list[Any], made: Any) -> None:
    """A prompt in three pieces, and 40 tokens of its answer of which none is known when their steps are built."""
    here = made(groups, chunk_blocks=2, host="8MiB")
    text, table = prompt(340), blocks_for(340)
    request = Request("first", text[:300])
    assert here.offer(request) == 0
    here.scheduler.allocated(request, [], 0)
    here.write(request, table, 0, 300)
    steps = [here.build({"first": (begin, 100, table)}) for begin in (0, 100, 200)]
    for at in range(300, 340):
        steps.append(here.build({"first": (at, 1, table)}))
        here.carry_out(steps.pop(0))
        request.all_token_ids = text[: at - 1]  # what the step before the last one has drawn
        here.write(Request("first", text), table, at, at + 1)
    for step in steps:
        here.carry_out(step)
    request.all_token_ids = text
    here.step({"first": (340, 1, [*table, 30])})
    before = snapshot(here)
    here.scheduler.finished(request)
    here.wipe()
    count, loaded, failed = load_into(here, Request("second", text), first=9)
    assert (count, failed) == (320, set())
    assert_loaded(here, before, loaded, range(20), range(17, 20))  # 320 - 39 = 281: block 17 on
    here.scheduler.check()
