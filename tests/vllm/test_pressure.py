"""Little room and many requests: preemption, requests that go away, and blocks that are all free in the end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.nursery import wait_until
from tests.vllm.conftest import Start
from tests.vllm.oracle import Answer, Engine, connector, prompt, prove

EXACT = ["llama", "gemma3", "gpt_oss"]
"""In float32: their tokens do not depend on who else is in the batch."""
TINY = {"llama": 24, "gemma3": 44, "gpt_oss": 32}
"""Blocks of the device that all groups share, too few for four requests of 800 tokens."""


def alone(start: Start, name: str, prompts: list[list[int]], new_tokens: int) -> list[Answer]:
    """What an unmodified vLLM with room enough says to each by itself."""
    plain = start(name)
    answers = [plain.generate(tokens, new_tokens) for tokens in prompts]
    plain.close()
    return answers


def assert_all_free(engine: Engine) -> None:
    """No request is left, and no block is held."""

    def idle() -> bool:
        engine.ask("idle_steps", count=1)
        return not engine.ask("queues")["requests"]

    wait_until(idle, "the scheduler has forgotten all requests")
    queues = engine.ask("queues")
    assert queues["free_blocks"] == engine.ask("layout")["blocks"] - 1, "all but the null block"
    engine.ask("check")


def preemptions(engine: Engine) -> float:
    metrics: dict[str, float] = engine.ask("metrics")
    return sum(value for name, value in metrics.items() if name.startswith("vllm:num_preemptions_total"))


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
def test_preemption(name: str, start: Start, tmp_path: Path) -> None:
    """Answers that outgrow the device: some requests lose their blocks and are resumed from host memory."""
    prompts = [prompt(500, seed) for seed in range(4)]
    expected = alone(start, name, prompts, 300)
    engine = start(name, connector(disk=tmp_path / "cache"), num_gpu_blocks_override=TINY[name])
    answers = engine.generate_all(prompts, 300)
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]
    assert preemptions(engine) > 0
    assert_all_free(engine)
    prove(engine, prompt(700, seed=9))


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
def test_sixteen_at_once(name: str, start: Start, tmp_path: Path) -> None:
    """On a device that holds two or three of them; then again, with everything in host memory and on disk."""
    system = prompt(400, seed=99)
    prompts = [system + prompt(200 + 40 * (seed % 5), seed) for seed in range(16)]
    expected = [answer.tokens for answer in alone(start, name, prompts, 8)]
    engine = start(name, connector("2MiB", tmp_path / "cache"), num_gpu_blocks_override=TINY[name], max_num_seqs=16)
    for turn in range(3):
        answers = engine.generate_all(prompts, 8)
        assert [answer.tokens for answer in answers] == expected
        assert all(answer.finish == "length" for answer in answers)
        if turn:
            assert sum(answer.external for answer in answers) > 0
        assert_all_free(engine)
        engine.forget()
    assert engine.counted("loads_failed") == 0


@pytest.mark.slow
def test_recurrent_states_under_pressure(start: Start, tmp_path: Path) -> None:
    """Its numbers depend on the batch in bfloat16; that it ends, frees all and is exact afterwards does not."""
    engine = start("qwen3_next", connector("2MiB", tmp_path / "cache"), num_gpu_blocks_override=40, max_num_seqs=8)
    prompts = [prompt(300 + 70 * seed, seed % 3) for seed in range(8)]
    for _ in range(2):
        answers = engine.generate_all(prompts, 40)
        assert all(len(answer.tokens) == 40 for answer in answers)
        assert_all_free(engine)
        engine.forget()
    prove(engine, prompt(700, seed=9))


def waits_for_load(engine: Engine) -> bool:
    return "WAITING_FOR_REMOTE_KVS" in "".join(engine.ask("queues")["requests"].values())


def computes(engine: Engine) -> bool:
    return "RUNNING" in "".join(engine.ask("queues")["requests"].values())


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next"])
@pytest.mark.parametrize("when", [waits_for_load, computes])
def test_abort(name: str, when: Callable[[Engine], bool], start: Start, tmp_path: Path) -> None:
    """While its load waits or runs, and while it is computed; others go on, and nothing stays behind."""
    engine = start(name, connector(disk=tmp_path / "cache"))
    tokens = prompt(1300)
    engine.generate(tokens)
    if when is waits_for_load:
        engine.forget()
    gone = engine.add(tokens if when is waits_for_load else prompt(1300, seed=1), 50)
    for _ in range(1000):
        engine.ask("step", count=1)
        if when(engine):
            break
    assert when(engine)
    engine.ask("abort", name=gone)
    other = engine.add(prompt(300, seed=2))
    assert len(engine.finish()[other].tokens) == 6
    assert_all_free(engine)
    prove(engine, prompt(700, seed=9))


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_abort_while_a_copy_is_running(name: str, start: Start) -> None:
    """The copy still writes into its blocks: nobody else may have them before it has ended."""
    engine = start(name, connector())
    tokens = prompt(1300)
    engine.generate(tokens)
    engine.forget()
    engine.ask("fault", kind="hold_load", count=1)
    gone = engine.add(tokens)
    for _ in range(1000):
        engine.ask("step", count=1)
        if waits_for_load(engine):
            break
    free = engine.ask("queues")["free_blocks"]
    engine.ask("abort", name=gone)
    expected = engine.generate(prompt(300, seed=2))
    assert engine.ask("queues")["free_blocks"] == free, "the copy's blocks are kept for it"
    engine.ask("release")
    assert_all_free(engine)
    assert engine.generate(prompt(300, seed=2)).tokens == expected.tokens
    prove(engine, prompt(700, seed=9))


def test_a_reset_of_everything(start: Start, tmp_path: Path) -> None:
    """vLLM's reset with ``reset_connector``: what was stored before is not found, nor on disk; what follows is."""
    engine = start("llama", connector(disk=tmp_path / "cache"))
    engine.generate(prompt(700))
    assert engine.ask("reset", connector=True)
    engine.ask("scribble")
    assert engine.generate(prompt(700)).external == 0
    engine.forget()
    assert engine.generate(prompt(700)).external == 640
