"""Conversations that grow, come back, are aborted and fail, in little room: each answer is an unmodified vLLM's."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.vllm.conftest import Start
from tests.vllm.oracle import Engine, connector, prompt
from tests.vllm.test_pressure import TINY, assert_all_free

STEPS = 120
FAULTS = ["fail_load", "fail_store"]


class Conversations:
    """What has been said, and what each engine says to it. Systems prompts are shared."""

    def __init__(self, drawn: random.Random, plain: Engine) -> None:
        self._drawn = drawn
        self._plain = plain
        self._systems = [prompt(drawn.randrange(100, 400), seed) for seed in range(3)]
        self._said: list[list[int]] = []
        self._known: dict[tuple[int, ...], list[int]] = {}

    def next_prompt(self) -> list[int]:
        """A new conversation, another turn of one, or the same again."""
        seed = self._drawn.randrange(1 << 30)
        kind = self._drawn.random()
        if not self._said or kind < 0.3:
            self._said.append(self._drawn.choice(self._systems) + prompt(self._drawn.randrange(20, 300), seed))
            return self._said[-1]
        at = self._drawn.randrange(len(self._said))
        if kind < 0.8 and len(self._said[at]) < 1000:
            self._said[at] = self._said[at] + self.answer(self._said[at]) + prompt(self._drawn.randrange(5, 200), seed)
        return self._said[at]

    def answer(self, tokens: list[int]) -> list[int]:
        """The unmodified engine's."""
        key = tuple(tokens)
        if key not in self._known:
            self._known[key] = self._plain.generate(tokens).tokens
        return self._known[key]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "seed"), [("llama", 0), ("gemma3", 1), ("gpt_oss", 2)])
def test_anything_in_any_order(name: str, seed: int, start: Start, tmp_path: Path) -> None:
    """In float32, so that an answer does not depend on the batch; 2 MiB of host memory, and disk."""
    drawn = random.Random(f"{name} {seed}")
    talk = Conversations(drawn, start(name, enable_prefix_caching=False))
    engine = start(name, connector("2MiB", tmp_path / "cache", "64MiB"), num_gpu_blocks_override=TINY[name])
    waiting: dict[str, list[int]] = {}
    external = 0
    for _ in range(STEPS):
        action = drawn.random()
        if action < 0.5:
            tokens = talk.next_prompt()
            waiting[engine.add(tokens)] = tokens
        elif action < 0.75:
            engine.ask("step", count=drawn.randrange(1, 8))
        elif action < 0.82 and waiting:
            gone = drawn.choice(sorted(waiting))
            engine.ask("abort", name=gone)
            del waiting[gone]
        elif action < 0.88:
            engine.ask("fault", kind=drawn.choice(FAULTS), count=drawn.randrange(3))
        else:
            for answered, answer in engine.finish().items():
                if answered in waiting:
                    assert answer.tokens == talk.answer(waiting.pop(answered))
                    external += answer.external
            assert not waiting
            if drawn.random() < 0.5:
                assert_all_free(engine)
                engine.forget()
    for answered, answer in engine.finish().items():
        if answered in waiting:
            assert answer.tokens == talk.answer(waiting[answered])
    assert_all_free(engine)
    assert external > 0
