"""The two sides of the connector without an engine: ranks that each hold a part, and everything that may go wrong
between them. Real store, real workers, each with a mapping of its own; vLLM's objects are stand-ins.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from stowage.core.geometry import Kind
from stowage.errors import BudgetError, ConfigError
from stowage.plugins.vllm import namespace, scheduler, settings
from stowage.plugins.vllm.adapter import GroupShape
from stowage.plugins.vllm.division import Piece
from stowage.plugins.vllm.messages import Part, Report
from stowage.plugins.vllm.scheduler import SchedulerSide
from stowage.plugins.vllm.step_times import StepTimes
from stowage.plugins.vllm.worker import WorkerSide, machine
from stowage.storage.remote.backend import Bounds
from stowage.storage.remote.tier import RemoteTier

BLOCK, BLOCKS = 16, 32
RANKS = [(0, 0), (0, 1), (1, 0), (1, 1)]


class Request:
    """What the connector reads of one of vLLM's."""

    def __init__(self, name: str, tokens: list[int], salt: str | None = None) -> None:
        self.request_id, self.all_token_ids, self.prompt_token_ids = name, tokens, tokens
        self.cache_salt, self.lora_request, self.prompt_embeds, self.mm_features = salt, None, None, []
        self.num_preemptions, self.done, self.shared_prefix_boundary = 0, False, 0

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    def is_finished(self) -> bool:
        return self.done


class Machine:
    """A scheduler's side and the workers' of four ranks: two stages, two tensor ranks, of unequal sizes."""

    def __init__(
        self, shapes: list[GroupShape], host: str = "4MiB", speculative_config: Any = None, **extra: Any
    ) -> None:
        config = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_batched_tokens=2048), speculative_config=speculative_config
        )
        self.scheduler = SchedulerSide(config, shapes, settings.read({"host_memory": host, **extra}))
        self.caches: list[dict[str, torch.Tensor]] = []
        self.workers: list[WorkerSide] = []
        for number, rank in enumerate(RANKS):
            names = [name for shape in shapes for name in shape.layers]
            mine = names[rank[0] :: 2]  # each stage has every second layer
            caches = {name: torch.zeros(BLOCKS, 2, BLOCK, 4 * (number % 2 + 1)) for name in mine}
            worker = WorkerSide([shape.layers for shape in shapes], BLOCKS, rank)
            worker.register(caches)
            self.caches.append(caches)
            self.workers.append(worker)
        self.scheduler.connect({rank: worker.part() for rank, worker in zip(RANKS, self.workers, strict=True)})

    def compute(self, request: Request, table: list[int], begin: int, end: int) -> None:
        """A step: every rank writes something of its own for each token, then the workers do what they are told."""
        for number, caches in enumerate(self.caches):
            for place, (_, cache) in enumerate(sorted(caches.items())):
                for at in range(begin, end):
                    value = hash((number, place, tuple(request.all_token_ids[: at + 1]))) % 1000
                    cache[table[at // BLOCK], :, at % BLOCK] = float(value)
        self.step({request.request_id: (begin, end - begin, table)})

    def step(self, scheduled: dict[str, tuple[int, int, list[int]]], broken: int | None = None) -> set[str]:
        """Build, carry out and report one step; the requests whose loads have ended. ``broken``: a rank that fails."""
        output = SimpleNamespace(
            total_num_scheduled_tokens=sum(count for _, count, _ in scheduled.values()),
            num_scheduled_tokens={name: count for name, (_, count, _) in scheduled.items()},
            preempted_req_ids=None,
            scheduled_new_reqs=[
                SimpleNamespace(req_id=name, num_computed_tokens=begin) for name, (begin, _, _) in scheduled.items()
            ],
            scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
            kv_connector_block_state=SimpleNamespace(
                get_block_ids=lambda name: tuple([scheduled[name][2]] * len(self.scheduler._groups)),
                boundary_state_offloads={},
            ),
        )
        step = self.scheduler.build(output)
        left = dict.fromkeys([load.request for load in step.loads], len(self.workers))
        ended: set[str] = set()
        failed: set[str] = set()
        first = True
        while first or left:
            report: Report | None = None
            for number, worker in enumerate(self.workers):
                if first:
                    worker.begin_loads(step)
                    if number == broken:
                        worker._copies = None
                    worker.store(step)
                done, bad = worker.results(busy=False)
                for name in done:
                    left[name] -= 1
                failed |= bad
                mine = worker.report()
                if mine is not None:
                    report = mine if report is None else report.aggregate(mine)
            ended = {name for name, count in left.items() if count == 0}
            for name in ended:
                del left[name]
            first = False
            self.scheduler.reported(
                SimpleNamespace(kv_connector_worker_meta=report, finished_recving=ended, failed_recving=failed & ended)
            )
        return failed

    def offer(self, request: Request, held: int = 0) -> int:
        until_s = time.monotonic() + 60
        while time.monotonic() < until_s:
            count, asynchronous = self.scheduler.matched(request, held)
            if count is not None:
                assert asynchronous == (count > 0)
                return count
            time.sleep(0.0005)  # for the threads that look
        raise AssertionError("never answered")

    def wipe(self) -> None:
        for caches in self.caches:
            for cache in caches.values():
                cache.fill_(-1.0)

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.scheduler.close()


FULL = GroupShape(Kind.FULL, BLOCK, 0, ("a", "b", "c"))
WINDOW = GroupShape(Kind.SLIDING, BLOCK, 40, ("d", "e"))


@pytest.fixture(autouse=True)
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespace, "engine_namespace", lambda *_, **__: bytes(32))


@pytest.fixture
def made(tmp_path: Any) -> Iterator[Any]:
    machines: list[Machine] = []

    def make(*arguments: Any, **extra: Any) -> Machine:
        machines.append(Machine(*arguments, **extra))
        return machines[-1]

    yield make
    for one in machines:
        one.close()


def prompt(tokens: int, seed: int = 0) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(1000) for _ in range(tokens)]


def blocks_for(tokens: int, first: int = 1) -> list[int]:
    return list(range(first, first - (-tokens // BLOCK)))


def store_prompt(here: Machine, tokens: list[int], name: str = "first") -> Request:
    request = Request(name, tokens)
    assert here.offer(request) == 0
    here.scheduler.allocated(request, [], 0)
    here.compute(request, blocks_for(len(tokens)), 0, len(tokens))
    here.scheduler.check()
    return request


def load_into(here: Machine, request: Request, first: int) -> tuple[int, list[int], set[str]]:
    """Offer, allocate and load ``request`` into blocks from ``first`` on."""
    count = here.offer(request)
    table = blocks_for(request.num_tokens, first)
    here.scheduler.allocated(request, [table] * len(here.scheduler._groups), count)
    return count, table, here.step({})


def assert_same_blocks(here: Machine, caches: list[dict[str, torch.Tensor]], old: list[int], new: list[int]) -> None:
    for now, before in zip(here.caches, caches, strict=True):
        for name in now:
            assert torch.equal(now[name][new], before[name][old]), name


def snapshot(here: Machine) -> list[dict[str, torch.Tensor]]:
    return [{name: cache.clone() for name, cache in caches.items()} for caches in here.caches]


def test_every_rank_gets_its_own_part_back(made: Any) -> None:
    here = made([FULL])
    store_prompt(here, prompt(300))
    before = snapshot(here)
    here.wipe()
    count, table, failed = load_into(here, Request("second", prompt(300)), first=8)
    assert (count, failed) == (256, set()), "two chunks of 128 tokens"
    assert_same_blocks(here, before, list(range(1, 17)), table[:16])
    here.scheduler.check()


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


def stores(machine: Machine) -> float:
    """Chunks that were stored."""
    return sum(value for key, value in machine.scheduler.stats().items() if key.rpartition(".")[2] == "stores")


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


def test_budgets_and_places_that_cannot_work(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BudgetError, match="set host_memory to at least"):
        made([FULL], host="4KiB")
    with pytest.raises(ConfigError, match="host memory"):
        settings.read({})
    for wrong in ("half", 0, -1, True, 1.5):
        with pytest.raises(ConfigError, match=r"resume_points is .*growing, all, ends, or a distance in tokens"):
            settings.read({"host_memory": "1GiB", "resume_points": wrong})
    with pytest.raises(ConfigError, match="Did you mean 'disk'"):
        settings.read({"host_memory": "1GiB", "disc": "/tmp/x:1GiB"})
    with pytest.raises(ConfigError, match="chunk_blocks"):
        settings.read({"host_memory": "1GiB", "chunk_blocks": 65})
    scheduler = SchedulerSide(SimpleNamespace(speculative_config=None), [FULL], settings.read({"host_memory": "4MiB"}))
    piece = ((Piece("a", 64, ""),),)
    parts = {(0, 0): Part(machine(), BLOCKS, piece), (0, 1): Part("elsewhere 1", BLOCKS, piece)}
    with pytest.raises(ConfigError, match="several machines"):
        scheduler.connect(parts)


def test_the_node_has_one_budget_whatever_the_ranks(made: Any) -> None:
    here = made([FULL, WINDOW], host="1MiB")
    assert here.scheduler._store.arena.bytes <= 1 << 20
    pieces = [[piece.nbytes for worker in here.workers for piece in worker.part().pieces[g]] for g in range(2)]
    assert [group.bytes_per_block for group in here.scheduler._groups] == [sum(sizes) for sizes in pieces]
    begins = [here.scheduler._shared.shares[rank][0].offsets.tolist() for rank in RANKS]
    assert [begin for mine in begins for begin in mine] == [0, *np.cumsum(pieces[0])[:-1].tolist()], "side by side"


def test_engines_of_a_node_share_a_budget(made: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with data parallelism: an engine that would take the sum above the limit does not start, until one ends."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    budget = {"host": "4MiB", "node_host_memory": "10MiB"}
    first, second = made([FULL], **budget), made([FULL], **budget)
    with pytest.raises(BudgetError, match="other engines hold 8 MiB"):
        made([FULL], **budget)
    store_prompt(first, prompt(300))  # its workers hold the part too
    first.scheduler.close()
    with pytest.raises(BudgetError):
        made([FULL], **budget)
    first.close()
    made([FULL], **budget)
    second.close()
    with pytest.raises(ConfigError, match="node_host_memory cannot be used"):
        settings.read({"host_memory": "1GiB", "node_host_memory": "much"})


def test_events_tell_what_is_stored_and_what_has_gone(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.kv_events import BlockRemoved, BlockStored
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    from stowage.plugins.vllm import events

    here = made([WINDOW, FULL])
    here.scheduler._announcements = events.Announcements(here.scheduler._store, here.scheduler._groups[1], BLOCK)
    here.scheduler._storing._announcements = here.scheduler._announcements
    request = Request("first", prompt(300))
    request.block_hashes = [bytes([at]) * 32 for at in range(300 // BLOCK)]  # type: ignore[attr-defined]
    assert here.offer(request) == 0
    here.compute(request, blocks_for(300), 0, 300)
    first, second = here.scheduler.events()
    assert isinstance(first, BlockStored) and len(first.block_hashes) == 8
    assert first.block_hashes == [maybe_convert_block_hash(one) for one in request.block_hashes[:8]]  # type: ignore[attr-defined]
    assert (first.parent_block_hash, first.token_ids) == (None, prompt(300)[:128])
    assert second.parent_block_hash == first.block_hashes[-1] and second.token_ids == prompt(300)[128:256]
    assert (second.block_size, second.medium) == (BLOCK, "stowage")
    assert here.scheduler.events() == [], "nothing is told twice"
    here.scheduler._store.drop_host()
    here.scheduler._announcements._audit_s = 0.0
    (gone,) = here.scheduler.events()
    assert isinstance(gone, BlockRemoved) and set(gone.block_hashes) == {*first.block_hashes, *second.block_hashes}


STATE = GroupShape(Kind.RECURRENT, 64, 0, ("s",))


def test_a_state_is_stored_only_where_it_is_the_one_of_its_name(made: Any) -> None:
    """A step that ends inside a block, or ahead of the known tokens, leaves no state that a name fits."""
    here = made([STATE])
    tokens = prompt(128)
    request = Request("first", tokens)
    assert here.offer(request) == 0
    table = [0, 7, 8]  # vLLM's align mode: the first state was never kept
    here.step({"first": (0, 100, table)})
    assert here.scheduler.stats()["stores"] == 0
    here.step({"first": (100, 28, table)})
    assert here.scheduler.stats()["stores"] == 1
    here.step({"first": (128, 64, table)})  # 64 tokens ahead of what is known
    tokens += prompt(64, seed=3)
    here.step({"first": (192, 1, table)})
    assert here.scheduler.stats()["stores"] == 1, "the block holds the state of 193 tokens, or of 192: nobody knows"
    other = Request("second", prompt(128) + prompt(100, seed=3))
    assert here.offer(other) == 128


@pytest.mark.parametrize("place", ["offer", "plans", "plan", "settle", "give_back", "ask"])
def test_a_bug_costs_hits_and_not_the_engine(place: str, made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever raises: nothing that vLLM calls does. A request that was promised blocks is told that they failed."""
    here = made([FULL])
    store_prompt(here, prompt(300))
    second = Request("second", prompt(300))
    if place in ("plans", "give_back"):
        assert here.offer(second) == 256

    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("a bug")

    owner = here.scheduler._storing if place in ("plan", "settle") else here.scheduler._prefixes
    monkeypatch.setattr(type(owner), place, broken)
    here.scheduler.arrived(second)
    if place == "plans":
        here.scheduler.allocated(second, [blocks_for(300)], 256)
        assert here.step({}) == {"second"}, "a failed load: vLLM computes it"
    elif place == "give_back":
        here.scheduler.finished(second)
    else:
        fresh = Request("fresh", prompt(300, seed=5))
        assert here.offer(fresh) == 0
        here.step({"fresh": (0, 300, blocks_for(300))})
        here.scheduler.arrived(Request("asked", prompt(300)))
    monkeypatch.undo()
    assert here.scheduler.counts["faults"] >= 1
    assert here.offer(Request("third", prompt(300))) == 0, "from now on it stands aside"


def test_steps_that_are_built_ahead_are_measured_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([10.0, 11.0, 14.0, 20.0])  # two are built, then both end
    monkeypatch.setattr("stowage.plugins.vllm.step_times.time", SimpleNamespace(monotonic=lambda: next(now)))
    times = StepTimes()
    assert [times.built(100), times.built(200)] == [1, 2]
    assert [times.ended(1), times.ended(2)] == [(100, 4.0), (200, 6.0)]


def test_a_step_that_nobody_reported_does_not_shift_the_others(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process alone tells nothing of a step that computed nothing and copied nothing."""
    here = made([FULL])
    side, measured = here.scheduler, []
    monkeypatch.setattr(side._cost_model, "computed", lambda tokens, seconds: measured.append(tokens))
    store_prompt(here, prompt(300))
    side._step_times.built(0)
    request = Request("another", prompt(200, seed=4))
    assert here.offer(request) == 0
    here.compute(request, blocks_for(200, 19), 0, 200)
    assert measured == [300, 200]


def test_waiting_requests_wait_once_in_a_step(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many of them are told to ask again while nothing is computed."""
    here = made([FULL])
    waits: list[float] = []
    monkeypatch.setattr(here.scheduler._store, "wait", waits.append)
    monkeypatch.setattr(here.scheduler._prefixes, "offer", lambda *_: None)
    for _ in range(2):
        here.step({})
        for number in range(50):
            assert here.scheduler.matched(Request(f"r{number}", prompt(300, number)), 0) == (None, False)
    assert waits.count(0.001) == 2
