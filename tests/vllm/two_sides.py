"""The connector's two sides without an engine: real store, real workers, each with a mapping of its own. What is of
vLLM is a stand-in.
"""

from __future__ import annotations

import random
import time
from types import SimpleNamespace
from typing import Any

import torch

from stowage.core.geometry import Kind
from stowage.plugins.vllm import settings
from stowage.plugins.vllm.adapter import GroupShape
from stowage.plugins.vllm.messages import Report, Step
from stowage.plugins.vllm.scheduler import SchedulerSide
from stowage.plugins.vllm.worker import WorkerSide

BLOCK, BLOCKS = 16, 32
RANKS = [(0, 0), (0, 1), (1, 0), (1, 1)]


class Request:
    """What the connector reads of one of vLLM's."""

    def __init__(self, name: str, tokens: list[int], salt: str | None = None) -> None:
        self.request_id, self.all_token_ids, self.prompt_token_ids = name, tokens, tokens
        self.cache_salt, self.lora_request, self.prompt_embeds, self.mm_features = salt, None, None, []
        self.num_preemptions, self.done, self.shared_prefix_boundary = 0, False, 0
        self.skip_reading_prefix_cache = False

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
            scheduler_config=SimpleNamespace(max_num_batched_tokens=2048),
            speculative_config=speculative_config,
            model_config=SimpleNamespace(),
            cache_config=SimpleNamespace(enable_prefix_caching=True),
        )
        self.scheduler = SchedulerSide(config, shapes, settings.read({"host_memory": host, **extra}))
        self.gone = 0
        """Blocks that vLLM has taken back: of windows, from the start."""
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
        self.write(request, table, begin, end)
        self.step({request.request_id: (begin, end - begin, table)})

    def write(self, request: Request, table: list[int], begin: int, end: int) -> None:
        """What a model would: of every rank something of its own for each token."""
        for number, caches in enumerate(self.caches):
            for place, (_, cache) in enumerate(sorted(caches.items())):
                for at in range(begin, end):
                    value = hash((number, place, tuple(request.all_token_ids[: at + 1]))) % 1000
                    cache[table[at // BLOCK], :, at % BLOCK] = float(value)

    def step(self, scheduled: dict[str, tuple[int, int, list[int]]], broken: int | None = None) -> set[str]:
        """Build, carry out and report one step; the requests whose loads have failed. ``broken``: a rank that fails."""
        return self.carry_out(self.build(scheduled), broken)

    def build(self, scheduled: dict[str, tuple[int, int, list[int]]]) -> Step:
        """What the workers are told in a step: by request its first token, how many, and its table."""
        output = SimpleNamespace(
            total_num_scheduled_tokens=sum(count for _, count, _ in scheduled.values()),
            num_scheduled_tokens={name: count for name, (_, count, _) in scheduled.items()},
            preempted_req_ids=None,
            scheduled_new_reqs=[
                SimpleNamespace(req_id=name, num_computed_tokens=begin) for name, (begin, _, _) in scheduled.items()
            ],
            scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
            kv_connector_block_state=SimpleNamespace(
                get_block_ids=lambda name: self._tables(scheduled[name][2]), boundary_state_offloads={}
            ),
        )
        return self.scheduler.build(output)

    def carry_out(self, step: Step, broken: int | None = None, *, settle: bool = True) -> set[str]:
        """By all workers, which report it; the requests whose loads have failed. ``settle``: what they report, as the
        store's thread would a moment later.
        """
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
        if settle:
            with self.scheduler._background.turn:
                self.scheduler._settle()
        return failed

    def _tables(self, table: list[int]) -> tuple[list[int], ...]:
        window = [0] * self.gone + table[self.gone :]
        return tuple(window if group.kind is Kind.SLIDING else table for group in self.scheduler._groups)

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


def assert_loaded(
    here: Machine, before: list[dict[str, torch.Tensor]], table: list[int], whole: range, window: range
) -> None:
    """``table`` has the blocks of what lay from block 1 on ``before``: the ``whole`` of full attention, and of others
    those of the ``window``.
    """
    for now, old in zip(here.caches, before, strict=True):
        for name in now:
            for block in whole if name in FULL.layers else window:
                assert torch.equal(now[name][table[block]], old[name][1 + block]), (name, block)


def snapshot(here: Machine) -> list[dict[str, torch.Tensor]]:
    return [{name: cache.clone() for name, cache in caches.items()} for caches in here.caches]


def stores(machine: Machine) -> float:
    """Chunks that were stored."""
    return sum(value for key, value in machine.scheduler.stats().items() if key.rpartition(".")[2] == "stores")
