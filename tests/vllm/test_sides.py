"""The two sides of the connector without an engine: ranks that each hold a part, and everything that may go wrong
between them. Real store, real workers, each with a mapping of its own; vLLM's objects are stand-ins.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from stowage.plugins.vllm import namespace, scheduler
from stowage.storage.remote.backend import Bounds
from stowage.storage.remote.tier import RemoteTier
from tests.vllm.two_sides import (
    BLOCK,
    FULL,
    WINDOW,
    Machine,
    Request,
    assert_loaded,
    assert_same_blocks,
    blocks_for,
    load_into,
    prompt,
    snapshot,
    store_prompt,
    stores,
)


def test_every_rank_gets_its_own_part_back(made: Any) -> None:
    here = made([FULL])
    store_prompt(here, prompt(300))
    before = snapshot(here)
    here.wipe()
    count, table, failed = load_into(here, Request("second", prompt(300)), first=8)
    assert (count, failed) == (256, set()), "two chunks of 128 tokens"
    assert_same_blocks(here, before, list(range(1, 17)), table[:16])
    here.scheduler.check()


@pytest.mark.parametrize("host", ["8MiB", "512KiB"])
@pytest.mark.parametrize("groups", [[FULL], [FULL, WINDOW]], ids=["full", "window"])
def test_an_answer_is_stored_before_it_has_a_key(made: Any, groups: list[Any], host: str) -> None:
    """Two requests generate the same, token by token: it is kept once, in the slot that it was written to. Where little
    memory has no slots at hand, it gets one when it has its key.
    """
    here = made(groups, chunk_blocks=2, host=host)
    text, tables = prompt(240), (blocks_for(240, 1), blocks_for(240, 16))
    requests = [Request(name, text[:70]) for name in ("first", "second")]
    for request, table in zip(requests, tables, strict=True):
        here.offer(request)
        here.scheduler.allocated(request, [], 0)
        here.compute(request, table, 0, 70)
    assert (here.scheduler._storing.unnamed > 0) == (host == "8MiB"), "slots are at hand"
    for end in range(71, 241):
        for request, table in zip(requests, tables, strict=True):
            request.all_token_ids = text[:end]
            here.compute(request, table, end - 1, end)
    before = snapshot(here)
    assert stores(here) <= 7 * len(groups), "chunks of 32 tokens"
    here.scheduler.check()
    for request in requests:
        here.scheduler.finished(request)
    here.wipe()
    count, table, failed = load_into(here, Request("third", text), first=5)
    assert (count, failed) == (224, set())
    assert_loaded(here, before, table, range(14), range(12, 14))
    assert here.scheduler.stats()["chunks_pinned"] == 0


def test_an_answer_of_which_a_window_has_lost_blocks(made: Any) -> None:
    """The chunk is stored with those that are left, which is what a resume behind it reads."""
    here = made([FULL, WINDOW], host="8MiB")
    text, table = prompt(300), blocks_for(300)
    request = Request("first", text[:100])
    here.offer(request)
    here.scheduler.allocated(request, [], 0)
    here.compute(request, table, 0, 100)
    assert here.scheduler._storing.unnamed > 2, "slots are at hand, and one of them is taken"
    for end in range(101, 301):
        request.all_token_ids = text[:end]
        here.gone = max(0, end - 40) // BLOCK
        here.compute(request, table, end - 1, end)
    before = snapshot(here)
    here.scheduler.check()
    here.wipe()
    count, loaded, failed = load_into(here, Request("second", text), first=5)
    assert (count, failed) == (256, set())
    assert_loaded(here, before, loaded, range(16), range(13, 16))  # 256 - 39 = 217: block 13 on


def test_a_prefix_that_ends_in_the_middle(made: Any) -> None:
    """The window's chunks are there in the middle of a prompt; only those that the boundary needs are loaded."""
    here = made([FULL, WINDOW], chunk_blocks=2)
    store_prompt(here, prompt(400))
    before = snapshot(here)
    here.wipe()
    other = Request("second", prompt(400)[:200] + prompt(100, seed=9))
    count, table, _ = load_into(here, other, first=3)
    assert count == 192
    for now, old in zip(here.caches, before, strict=True):
        for name in now:
            needed = range(12) if name in FULL.layers else range(9, 12)  # 192 - 39 = 153: block 9 on
            for block in range(12):
                expected = old[name][1 + block] if block in needed else torch.full_like(old[name][0], -1.0)
                assert torch.equal(now[name][table[block]], expected), (name, block)


@pytest.mark.parametrize(
    ("points", "first", "again"),
    [
        ("auto", 256, 288),  # as long as nothing was learned
        ("growing", 256, 288),  # 32 tokens apart, from 128 on 64, from 256 on 128
        (128, 256, 288),
        (100, 256, 288),  # rounded up to whole chunks of 32 tokens
        (96, 288, 288),
        ("all", 288, 288),
        ("ends", 0, 288),
    ],
)
def test_where_a_prompt_that_parts_resumes(made: Any, points: str | int, first: int, again: int) -> None:
    """300 tokens are shared, nine chunks. The first prompt that parts there keeps the window for the next."""
    here = made([FULL, WINDOW], chunk_blocks=2, resume_points=points)
    store_prompt(here, prompt(400))
    before = snapshot(here)
    other = Request("second", prompt(400)[:300] + prompt(100, seed=9))
    assert here.offer(other) == first
    here.scheduler.allocated(other, [blocks_for(400)] * 2, first)
    here.step({})
    here.compute(other, blocks_for(400), first, 400)
    here.wipe()
    third = Request("third", prompt(400)[:300] + prompt(50, seed=10))
    count, table, _ = load_into(here, third, first=1)
    assert count == again
    for now, old in zip(here.caches, before, strict=True):
        for name in now:
            needed = range(again // BLOCK) if name in FULL.layers else range((again - 39) // BLOCK, again // BLOCK)
            assert all(torch.equal(now[name][table[block]], old[name][1 + block]) for block in needed), name
    assert here.offer(Request("fourth", prompt(400))) == 384, "the end of a prompt is always kept"
    assert here.offer(Request("fifth", [*prompt(360), 1])) == 352, "and a chunk before it"
    here.scheduler.check()


def test_what_traffic_shows_decides_what_is_kept(made: Any) -> None:
    """Of 400 tokens twelve chunks of full attention; of windows first those of all points, and of the answer."""
    here = made([FULL, WINDOW], chunk_blocks=2, host="8MiB")

    def kept(seed: int) -> float:
        """Chunks of a prompt of 300 tokens and an answer of 100."""
        before, tokens = stores(here), prompt(300, seed)
        request = Request(f"new {seed}", tokens)
        assert here.offer(request) == 0
        here.scheduler.allocated(request, [], 0)
        request.all_token_ids = [*tokens, *prompt(100, seed + 1000)]
        for begin, end in ((0, 300), (300, 321), (321, 353), (353, 400)):
            here.compute(request, blocks_for(400), begin, end)
        here.scheduler.finished(request)
        return stores(here) - before

    def ask(name: str, tokens: list[int]) -> int:
        request = Request(name, tokens)
        count = here.offer(request)
        here.scheduler.allocated(request, [blocks_for(len(tokens))] * 2, count)
        here.step({})
        here.scheduler.finished(request)
        return count

    everything = kept(1)
    assert everything == kept(2) > 12 + 6
    for at in range(6):
        assert ask(f"again {at}", prompt(300, 1 + at % 2)) == 288
    assert kept(3) == 12 + 3, "the end of the prompt, two chunks and the one that a window before it needs"
    assert ask("again", prompt(300, 3)) == 288
    assert ask("parts", [*prompt(300, 3)[:200], 1]) == 0
    here.scheduler.check()
    for seed in range(10, 20):
        kept(seed)
        ask(f"parts {seed}", [*prompt(300, seed)[: 100 + 15 * (seed - 10)], *prompt(90, seed + 500)])
    assert kept(4) >= everything - 3, "points; answers were of no use"
    assert ask("parts at last", [*prompt(300, 4)[:200], 1]) == 192
    here.scheduler.check()


def test_a_model_of_windows_alone_keeps_them_all(made: Any) -> None:
    """Nothing else could tell where prompts part."""
    here = made([WINDOW], chunk_blocks=2)
    store_prompt(here, prompt(400))
    assert here.offer(Request("second", [*prompt(300), 1])) == 288


class Shelf:
    """A shared store's contents, which several servers reach."""

    bounds = Bounds(batch_keys=8, batch_bytes=1 << 20, reads_max=4, writes_max=4, probes_max=4, search_widths=(4, 8))

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    async def head(self, names: Sequence[str], length: int) -> Sequence[bytes | None]:
        return [value[:length] if (value := self.values.get(name)) is not None else None for name in names]

    async def get(self, names: Sequence[str], lengths: Sequence[int]) -> Sequence[bytes | None]:
        return [self.values.get(name) for name in names]

    async def put(self, names: Sequence[str], values: Sequence[bytearray]) -> Sequence[None]:
        self.values.update(zip(names, map(bytes, values), strict=True))
        return [None] * len(names)

    async def close(self) -> None: ...

    def stats(self) -> dict[str, int | float | str]:
        return {}


class Speculative:
    """vLLM's configuration of MTP with one module, or of n-grams."""

    num_speculative_tokens, draft_model_config = 3, None

    def __init__(self, method: str) -> None:
        self.method = method

    def use_eagle(self) -> bool:
        return self.method == "mtp"

    def uses_draft_kv_cache(self) -> bool:
        return self.method == "mtp"

    @staticmethod
    def use_multi_module_mtp() -> bool:
        return False


@pytest.mark.parametrize(("method", "lookahead"), [("mtp", 1), ("ngram", 0)])
def test_drafts_that_nobody_confirmed_are_not_stored(
    method: str, lookahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step's last tokens are drafts. A chunk is stored when all of its tokens are the request's, and with draft
    layers so is the token behind; then it is found by prompts that have that token.
    """
    monkeypatch.setattr(namespace, "engine_namespace", lambda *_, **__: bytes(32))
    machine = Machine([FULL], speculative_config=Speculative(method), chunk_blocks=1)
    tokens = list(range(1, 30))
    request = Request("a", tokens)
    machine.offer(request)
    machine.step({"a": (0, 29, [1, 2, 3])})
    assert stores(machine) == 1
    machine.step({"a": (29, 4, [1, 2, 3])})  # one token and three drafts: positions up to 33
    assert stores(machine) == 1, "of 30 known tokens"
    request.all_token_ids = request.prompt_token_ids = [*tokens, 91, 92, 93]
    machine.step({"a": (31, 2, [1, 2, 3])})  # 32 are known now
    assert stores(machine) == (2 if not lookahead else 1)
    request.all_token_ids = [*request.all_token_ids, 94]
    machine.step({"a": (32, 2, [1, 2, 3])})
    assert stores(machine) == 2
    machine.scheduler.finished(request)
    same, other = [*request.all_token_ids, 5, 6], [*request.all_token_ids[:32], 4, 5, 6]
    assert machine.offer(Request("b", same)) == 32
    assert machine.offer(Request("c", other)) == (16 if lookahead else 32)
    machine.scheduler.check()
    machine.close()


def test_windows_of_another_server_are_found_though_some_are_not_there(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through a shared store, which is asked about few chunks: the points' windows, and that of the prompt's end."""
    shelf, opened = Shelf(), scheduler.open_store

    def open_store(*arguments: Any, **more: Any) -> Any:
        return opened(
            *arguments,
            **more,
            others=[RemoteTier("shelf", shelf, bytes(32), bytes.hex, absent_s=1.0, request_timeout_s=60.0)],
        )

    monkeypatch.setattr(scheduler, "open_store", open_store)
    one = made([FULL, WINDOW], chunk_blocks=2)
    store_prompt(one, prompt(490))
    one.close()
    for shared, expected in ((490, 480), (470, 448), (300, 256), (100, 96)):
        here = made([FULL, WINDOW], chunk_blocks=2, lookup_timeout_s=60.0, load_timeout_s=60.0)
        here.scheduler._cost_model.worth_loading = lambda *_: True
        assert here.offer(Request("first", [*prompt(490)[:shared], 1])) == expected


@pytest.mark.parametrize("broken", range(4))
def test_a_chunk_is_found_only_when_every_rank_has_its_part(made: Any, broken: int) -> None:
    here = made([FULL])
    store_prompt(here, prompt(130, seed=1), name="before")  # so that the arena is mapped
    request = Request("first", prompt(300))
    assert here.offer(request) == 0
    here.step({"first": (0, 300, blocks_for(300))}, broken=broken)
    assert here.scheduler.counts["stores_failed"] == 1
    here.scheduler.check()
    assert here.offer(Request("second", prompt(300))) == 0


def test_a_load_that_fails_is_never_offered_again(made: Any) -> None:
    here = made([FULL])
    store_prompt(here, prompt(300))
    second = Request("second", prompt(300))
    count = here.offer(second)
    here.scheduler.allocated(second, [[0] * 19], count)  # vLLM's null block: nothing can be loaded there
    assert here.step({}) == {"second"}
    assert here.scheduler.counts["loads_failed"] == 1
    assert here.offer(second) == 0, "else it would fail for ever"
    assert here.offer(Request("third", prompt(300))) == 256, "for others it is as good as ever"


def test_a_request_that_is_aborted_while_it_loads(made: Any) -> None:
    here = made([FULL])
    store_prompt(here, prompt(300))
    second = Request("second", prompt(300))
    here.scheduler.allocated(second, [blocks_for(300)], here.offer(second))
    second.done = True
    here.scheduler.finished(second)
    assert "second" in here.scheduler._tracked, "workers still write into its blocks"
    here.step({})
    assert "second" not in here.scheduler._tracked
    assert here.scheduler.stats()["chunks_pinned"] == 0


def test_nothing_is_fetched_for_a_prompt_whose_log_probabilities_are_asked_for(made: Any) -> None:
    """vLLM computes all of it. It is stored as others are."""
    here = made([FULL])
    store_prompt(here, prompt(300))
    asking = Request("second", prompt(300) + prompt(100, seed=2))
    asking.skip_reading_prefix_cache = True
    lookups = here.scheduler.stats()["lookups"]
    here.scheduler.arrived(asking)
    assert here.offer(asking) == 0
    assert here.scheduler.stats()["lookups"] == lookups
    here.scheduler.allocated(asking, [], 0)
    here.compute(asking, blocks_for(400), 0, 400)
    assert here.offer(Request("third", prompt(300) + prompt(100, seed=2))) == 384


def test_salts_and_reset(made: Any) -> None:
    here = made([FULL])
    store_prompt(here, prompt(300))
    assert here.offer(Request("salted", prompt(300), salt="tenant")) == 0
    assert here.offer(Request("same", prompt(300))) == 256
    assert here.scheduler.reset()
    assert here.offer(Request("after", prompt(300))) == 0
    store_prompt(here, prompt(300), name="again")
    assert here.offer(Request("later", prompt(300))) == 256


def test_blocks_of_before_a_reset_are_not_stored_after_it(made: Any) -> None:
    """The weights have changed in the middle of a prompt: what was computed before is of the old ones."""
    here = made([FULL])
    request = Request("first", prompt(300))
    assert here.offer(request) == 0
    here.compute(request, blocks_for(300), 0, 100)
    assert here.scheduler.reset()
    here.compute(request, blocks_for(300), 100, 300)
    assert here.offer(Request("second", prompt(300))) == 0


def test_a_reset_survives_adapters_whose_files_are_gone(made: Any, tmp_path: Path) -> None:
    """Such a request is not kept any more; the engine lives on."""
    here = made([FULL])
    (tmp_path / "adapter.safetensors").write_bytes(b"1" * 100)
    request = Request("first", prompt(300))
    request.lora_request = SimpleNamespace(lora_int_id=1, lora_path=str(tmp_path))
    assert here.offer(request) == 0
    here.compute(request, blocks_for(300), 0, 100)
    (tmp_path / "adapter.safetensors").unlink()
    assert here.scheduler.reset()
    here.compute(request, blocks_for(300), 100, 300)
    assert here.offer(Request("second", prompt(300))) == 0


def test_generated_tokens_count_when_they_are_known(made: Any) -> None:
    """A step may run ahead of what was sampled: blocks of tokens that are not known yet have no name."""
    here = made([FULL])
    tokens = prompt(250)
    request = Request("first", tokens)
    assert here.offer(request) == 0
    table = blocks_for(400)
    here.step({"first": (0, 250, table)})
    here.step({"first": (250, 50, table)})  # 50 tokens ahead
    assert here.offer(Request("second", prompt(250) + prompt(60, seed=3))) == 128
    tokens += prompt(60, seed=3)
    here.step({"first": (300, 1, table)})
    assert here.offer(Request("third", prompt(250) + prompt(61, seed=3)[:60] + [1])) == 256
