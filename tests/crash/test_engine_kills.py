"""A loaded engine, killed at random moments, and started again on the same directory each time.

`STOWAGE_KILLS` says how often; `make crash KILLS=1000` passes it on.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from stowage.config.memory import Memory
from stowage.engine.engine import Engine
from stowage.engine.sampling_params import SamplingParams
from stowage.testing import tiny_models
from tests.disk_client import used_bytes
from tests.nursery import QUICKLY, Child, Nursery, wait_until
from tests.syscall_trap import Board

KILLS = int(os.environ.get("STOWAGE_KILLS", "16"))
POOLS = 2 if KILLS > 200 else 1
LIMIT = 320 << 10
NEW_TOKENS = 3
OPEN_S = 1.0
"""Of processor time, all threads together: what neighbours take of it is not ours to answer for."""
OPENED, ANSWERS, OPEN_US, DISK_TOKENS, RIGHT = range(5)
"""What the notes on a board mean. RIGHT: 1 after the first answers were right, -1 when an answer was wrong."""

pytestmark = pytest.mark.slow
held: list[torch.nn.Module] = []


def build_model() -> None:
    """In the nursery: what every child starts with."""
    torch.set_num_threads(1)
    held.append(tiny_models.build("llama", tiny_models.TinySize(hidden=32, layers=2, heads=2, kv_heads=1, vocab=300)))


def prompts() -> list[list[int]]:
    """Twelve documents, two questions about each."""
    chance = random.Random(5)
    documents = [[chance.randrange(5, 300) for _ in range(chance.randrange(50, 120))] for _ in range(12)]
    return [document + [chance.randrange(5, 300) for _ in range(10)] for document in documents for _ in range(2)]


@torch.inference_mode()
def answer_plainly(path: str) -> None:
    """What Transformers alone answers to each prompt."""
    answers = []
    for prompt in prompts():
        tokens = list(prompt)
        for _ in range(NEW_TOKENS):
            tokens.append(int(held[0](input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
        answers.append(tokens[len(prompt) :])
    Path(path).write_text(json.dumps(answers))


def serve_until_killed(board_path: str, answers_path: str, directory: str, seed: int) -> None:
    """The process that is killed: an engine under load, which says how far it is and checks each answer."""
    notes = Board(Path(board_path)).control.notes
    answers = json.loads(Path(answers_path).read_text())
    began_s = time.process_time()
    memory = Memory(
        kv_cache_memory="64KiB",
        host_memory="64KiB",
        disk=f"{directory}:{LIMIT}",
        block_size=8,
        chunk_blocks=2,
        max_num_seqs=4,
    )
    engine = Engine(held[0], memory)
    notes[OPEN_US] = int(1e6 * (time.process_time() - began_s))
    notes[OPENED] = 1
    params = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    chance, asked = random.Random(seed), prompts()
    while True:
        chosen = chance.sample(range(len(asked)), 4)
        for number, completion in zip(chosen, engine.generate([asked[n] for n in chosen], params), strict=True):
            if completion.token_ids != answers[number]:
                notes[RIGHT] = -1
                raise AssertionError(f"prompt {number}: {completion.token_ids}, not {answers[number]}")
            notes[ANSWERS] += 1
            notes[DISK_TOKENS] += completion.reused_tokens.get("disk", 0)
        notes[RIGHT] = 1


@dataclass
class WorkerPool:
    """Kills the engines of one directory, one after the other."""

    directory: Path
    kills: int
    seed: int
    opened_s: list[float] = field(default_factory=list)
    answers: int = 0
    disk_tokens: int = 0

    def __post_init__(self) -> None:
        self.directory.mkdir()

    def run(self) -> None:
        board_path, answers_path = self.directory / "board", self.directory / "answers"
        with Nursery(__name__, build_model, QUICKLY) as nursery:
            nursery.start(answer_plainly, answers_path).wait()
            board = Board(board_path)
            for round_ in range(self.kills):
                board.clear()
                child = nursery.start(serve_until_killed, board_path, answers_path, self.directory / "cache", round_)
                self._kill(child, board.control.notes, at_work=round_ % 4 > 0, after_s=self._moment_s(round_))
                self._look(nursery)

    def _moment_s(self, round_: int) -> float:
        return random.Random(f"{self.seed}/{round_}").random() * 0.06

    def _kill(self, child: Child, notes: Sequence[int], at_work: bool, after_s: float) -> None:
        """Once it has answered right, if it is to die at work; else at any moment from its birth on."""
        if at_work:
            wait_until(lambda: notes[RIGHT] != 0 or not child.alive(), "the first answers after a restart")
        time.sleep(after_s)
        child.kill()
        assert notes[RIGHT] >= 0, "a wrong answer"
        if notes[OPENED]:
            self.opened_s.append(notes[OPEN_US] / 1e6)
        self.answers += notes[ANSWERS]
        self.disk_tokens += notes[DISK_TOKENS]

    def _look(self, nursery: Nursery) -> None:
        """What the killed one left behind."""
        cache = self.directory / "cache"
        if cache.exists():
            assert used_bytes(cache) <= LIMIT
            assert {path.suffix for path in cache.iterdir()} <= {".seg", ""}, "a temporary file"
        assert not nursery.left_in_shared_memory()


@pytest.mark.rare
def test_random_kills_of_a_loaded_engine(tmp_path: Path) -> None:
    worker_pools = [WorkerPool(tmp_path / str(number), KILLS // POOLS, number) for number in range(POOLS)]
    began_s = time.monotonic()
    with ThreadPoolExecutor(POOLS) as pool:
        list(pool.map(WorkerPool.run, worker_pools))
    opened_s = sorted(seconds for worker_pool in worker_pools for seconds in worker_pool.opened_s)
    answers, disk_tokens = (
        sum(worker_pool.answers for worker_pool in worker_pools),
        sum(worker_pool.disk_tokens for worker_pool in worker_pools),
    )
    print(
        f"{KILLS} kills in {time.monotonic() - began_s:.0f} s, {answers} right answers, {disk_tokens} tokens from "
        f"disk, opened in {opened_s[len(opened_s) // 2]:.3f} s (median), {opened_s[-1]:.3f} s (longest)"
    )
    assert opened_s[len(opened_s) * 99 // 100] < OPEN_S
    assert len(opened_s) > KILLS * 3 // 4 - POOLS and answers > KILLS and disk_tokens > 16 * KILLS
