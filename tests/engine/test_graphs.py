"""Recorded decode steps: answers are those of plain decoding, whatever joins, leaves, is preempted or comes back; and
what a recording cannot hold is computed plainly.

``tape`` records and replays what CUDA would, here on the CPU, so the kernels for CPUs are off.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from stowage import metrics
from stowage.config.memory import Memory
from stowage.engine import assembly
from stowage.engine.engine import Engine
from stowage.engine.request import Completion
from stowage.engine.sampling_params import SamplingParams
from stowage.errors import BudgetError, ConfigError
from stowage.executor import static_steps
from stowage.executor.block_pool import PADDING_BLOCK
from stowage.executor.replay.graphs import backend, budget
from stowage.executor.replay.graphs.backend import GraphBackend
from stowage.executor.static_steps import StaticSteps
from stowage.testing import tiny_models
from tests.depth import mostly_rare
from tests.engine.conftest import LOGPROB_BOUND, check_and_close, greedy, random_prompt
from tests.engine.tape import TapeRecorder

FAMILIES = ["llama", "gemma3", "llama4", "deepseek_v3", "qwen3_next", "lfm2", "jamba", "gpt_oss", "gemma2"]
"""Full, sliding, chunked, latent, recurrent (states of two sorts, only a convolution's, token by token), sinks,
soft-capping."""
PROMPTS = [random_prompt(length, seed=length) for length in (57, 20, 70, 41, 33)]
NEW_TOKENS = (42, 7, 20, 12, 9)
"""Sequences leave at different times, and others come in their place."""


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes soon, and of few tokens, so that sequences grow through many of them; half of the device for them."""
    monkeypatch.setenv("STOWAGE_PURE_PYTHON", "1")
    monkeypatch.setattr(static_steps, "TOKENS_LEAST", 64)
    monkeypatch.setattr(budget, "SHARE", 2)
    monkeypatch.setattr(budget, "SHARE_LEAST_BYTES", 1)


@pytest.fixture
def opened(checkpoints, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Engine]]:
    """Engines whose decode steps are recorded on tapes (``recorder``), or (``cuda_graphs=False``) not."""
    made: list[Engine] = []

    def open_engine(  # type: ignore[no-untyped-def]
        family: object,
        recorder: TapeRecorder | None = None,
        cuda_graphs: bool | None = None,
        context: int = 4096,
        **memory,
    ) -> Engine:
        tapes = recorder or TapeRecorder()
        monkeypatch.setattr(assembly, "recorder", lambda device: tapes)
        model = checkpoints(family, context) if isinstance(family, str) else family
        budgets = Memory(**({"kv_cache_memory": "16MiB"} | memory))
        engine = Engine(model, budgets, cuda_graphs=cuda_graphs, batch_dependent=True)
        if engine.parts.graphs is not None:
            engine.parts.graphs.rules = replace(engine.parts.graphs.rules, warm_steps=1)
            engine.parts.graphs.backend.steps.octave = 1
            engine.parts.graphs.clock = lambda: 0.0  # what is quicker on a CPU is of no interest
        made.append(engine)
        return engine

    yield open_engine
    check_and_close(made)


def ask(engine: Engine, prompts=PROMPTS, new_tokens=NEW_TOKENS) -> list[Completion]:  # type: ignore[no-untyped-def]
    requests = [engine.submit(p, greedy(n)) for p, n in zip(prompts, new_tokens, strict=True)]
    assert all(request.wait(60) for request in requests)
    return [request.result() for request in requests]


def assert_equal(found: list[Completion], expected: list[Completion]) -> None:
    for here, there in zip(found, expected, strict=True):
        assert here.token_ids == there.token_ids
        pairs = zip(here.logprobs, there.logprobs, strict=True)
        assert max(abs(a.logprob - b.logprob) for a, b in pairs) < LOGPROB_BOUND


@pytest.mark.parametrize("family", mostly_rare(FAMILIES, ["llama", "gemma2", "lfm2"]))
def test_answers_are_those_of_plain_decoding(family: str, opened) -> None:  # type: ignore[no-untyped-def]
    """Computed, and again with prefixes from the host."""
    expected = ask(opened(family, cuda_graphs=False, max_num_seqs=4))
    engine = opened(family, max_num_seqs=4, host_memory="16MiB", snapshot_tokens=64)
    assert_equal(ask(engine), expected)
    assert engine.flush()
    engine.drop_device_cache()
    (again,) = ask(engine, PROMPTS[2:3], NEW_TOKENS[2:3])
    assert_equal([again], expected[2:3])
    assert again.reused_tokens["host"]
    stats = engine.stats()["graphs"]
    assert stats["recorded"] >= 3 and stats["refused"] == 0
    assert stats["captured_steps"] > stats["plain_steps"]


@pytest.mark.parametrize(
    "family", mostly_rare(["gpt2", "gemma3", "deepseek_v3", "qwen3_next"], ["gemma3", "deepseek_v3"])
)
def test_a_replay_is_the_same_computation_to_the_bit(family: str, opened, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    """As what was recorded, run once more from the same states and inputs; padding goes to the padding block, which
    is left as it was. (Of these, GPT-2's padding token has keys that are not 0.)
    """
    engine = opened(family, max_num_seqs=4)
    replay, compared = GraphBackend.replay, []

    def both(recorded, graph, work):  # type: ignore[no-untyped-def]
        count = len(work)
        graph.inputs.fill(work)
        for part in graph.inputs.step.of_layer.values():
            assert not part.blocks[count:].any() and not part.decode.blocks[count:].any()
        assert not graph.inputs.states[count:].any()
        before = [pool.storage.clone() for pool in recorded.steps.pools]
        found = replay(recorded, graph, work)
        assert found.data_ptr() != graph.recording.result.data_ptr(), "the next replay would change this answer"
        after = [pool.storage.clone() for pool in recorded.steps.pools]
        for pool, bytes_before in zip(recorded.steps.pools, before, strict=True):
            pool.storage.copy_(bytes_before)
        assert torch.equal(recorded.forward(graph.inputs)[:count], found)
        for pool, bytes_after in zip(recorded.steps.pools, after, strict=True):
            assert torch.equal(pool.storage, bytes_after)
            assert not pool.storage[PADDING_BLOCK].any()
        compared.append(count)
        return found

    monkeypatch.setattr(GraphBackend, "replay", both)
    ask(engine, PROMPTS[:4], (20, 6, 16, 11))
    assert {1, 2, 3, 4} <= set(compared)


@pytest.mark.parametrize("family", mostly_rare(["llama", "qwen3_next"], ["llama"]))
def test_preempted(family: str, opened) -> None:  # type: ignore[no-untyped-def]
    """Blocks change hands: a sequence comes back to others than it had."""
    from stowage.executor.block_pool import bytes_needed

    prompts = [random_prompt(60 + i, seed=i) for i in range(4)]
    plain = opened(family, cuda_graphs=False, context=96)
    expected = ask(plain, prompts, [30] * 4)
    need = bytes_needed(plain.parts.layout.blocks, 96, 64)
    limits = {
        "kv_cache_memory": int(2 * 1.7 * need),
        "max_num_batched_tokens": 64,
        "host_memory": "32MiB",
        "snapshot_tokens": 64,
    }
    engine = opened(family, context=96, **limits)
    engine.parts.graphs.limit_bytes = 8 << 20
    assert_equal(ask(engine, prompts, [30] * 4), expected)
    stats = engine.stats()
    assert stats["engine"]["preemptions"] > 0 == stats["engine"]["preemptions_recomputed"]
    assert stats["graphs"]["captured_steps"] > 20


def test_longer_than_the_device(opened) -> None:  # type: ignore[no-untyped-def]
    """A sequence whose blocks are offloaded is computed plainly."""
    from stowage.executor.block_pool import bytes_needed

    prompt = random_prompt(150, seed=1)
    plain = opened("llama", cuda_graphs=False)
    expected = ask(plain, [prompt], [12])
    small = int(2 * 0.6 * bytes_needed(plain.parts.layout.blocks, 160, 64))
    engine = opened("llama", kv_cache_memory=small, max_num_batched_tokens=64, host_memory="32MiB")
    engine.parts.graphs.limit_bytes = 8 << 20
    assert_equal(ask(engine, [prompt], [12]), expected)
    stats = engine.stats()
    assert stats["engine"]["blocks_moved_out"] > 0 == stats["graphs"]["captured_steps"]


def test_engines_share_a_model(opened) -> None:  # type: ignore[no-untyped-def]
    model = tiny_models.build("llama").eval()
    expected = ask(opened("llama", cuda_graphs=False), PROMPTS[:2], (12, 12))
    recorders = TapeRecorder(), TapeRecorder()
    first, second = (opened(model, recorder) for recorder in recorders)
    for _ in range(2):
        for engine in (first, second):
            assert_equal(ask(engine, PROMPTS[:2], (12, 12)), expected)
    first.close()
    assert not recorders[0].tapes and recorders[0].forgotten and not first.parts.graphs.recorded
    before = second.stats()["graphs"]["captured_steps"]
    assert_equal(ask(second, PROMPTS[:2], (12, 12)), expected)
    assert second.stats()["graphs"]["captured_steps"] > before


# what is not trusted


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if getattr(r, "stowage_event", "") == "graphs"]


@pytest.mark.parametrize(
    ("family", "lost"),
    [
        ("llama", "aten::index_put_"),
        ("llama", "aten::embedding"),
        ("llama", "aten::mm"),
        ("llama", "aten::cos"),
        ("qwen3_next", "aten::index_put_"),
    ],
)
def test_a_wrong_recording_is_found(family: str, lost: str, opened, caplog: pytest.LogCaptureFixture) -> None:  # type: ignore[no-untyped-def]
    """One operation is lost from every tape: the trial step's logits tell, and answers are the plain ones."""

    def spoil(operations: list) -> None:  # type: ignore[type-arg]
        del operations[next(i for i, one in enumerate(operations) if one.func._schema.name == lost)]

    expected = ask(opened(family, cuda_graphs=False), PROMPTS[:2], (12, 12))
    engine = opened(family, TapeRecorder(spoil))
    with caplog.at_level(logging.WARNING, "stowage.engine"):
        assert_equal(ask(engine, PROMPTS[:2], (12, 12)), expected)
    stats = engine.stats()["graphs"]
    assert stats["captured_steps"] == 0 < stats["refused"] == len(lines(caplog))
    assert all("its logits differ by" in line for line in lines(caplog))


def test_one_that_is_no_quicker_is_given_up(opened, caplog: pytest.LogCaptureFixture) -> None:  # type: ignore[no-untyped-def]
    engine = opened("llama")
    ticks = iter(range(10**6))
    spent = [3, 3, 1]  # two replays and the plain step
    times: list[float] = []

    def clock() -> float:
        tick = next(ticks)
        times.append(times[-1] + spent[tick // 2 % 3] if tick % 2 else float(10 * tick))
        return times[-1]

    engine.parts.graphs.clock = clock
    with caplog.at_level(logging.WARNING, "stowage.engine"):
        ask(engine, PROMPTS[1:2], [20])
    stats = engine.stats()["graphs"]
    assert stats["captured_steps"] == 0 == stats["recorded"] and stats["plain_steps"] == 19
    assert len(lines(caplog)) == 1 and lines(caplog)[0].endswith("it is no quicker")


def test_a_family_that_asks_the_device_is_computed_plainly(opened, caplog: pytest.LogCaptureFixture) -> None:  # type: ignore[no-untyped-def]
    """Long rope looks at the longest position."""
    expected = ask(opened("phi4_mini", cuda_graphs=False))
    engine = opened("phi4_mini")
    with caplog.at_level(logging.WARNING, "stowage.engine"):
        assert_equal(ask(engine), expected)
    stats = engine.stats()["graphs"]
    assert (stats["captured_steps"], stats["recorded"], stats["bytes"], stats["refused"]) == (0, 0, 0, 1)
    assert len(lines(caplog)) == 1 and "reads from the device: __bool__" in lines(caplog)[0]


def test_recordings_keep_to_their_share(opened, caplog: pytest.LogCaptureFixture) -> None:  # type: ignore[no-untyped-def]
    """What is too much beside the others is given up, with all that is larger; the others are recorded again."""
    expected = ask(opened("llama", cuda_graphs=False))
    recorder = TapeRecorder()
    engine = opened("llama", recorder, kv_cache_memory="3MiB")
    recorded = engine.parts.graphs
    recorded.backend.steps.octave = 2
    assert recorded.limit_bytes == 3 << 19
    assert sum(pool.nbytes for pool in engine.parts.pools) + recorded.limit_bytes <= 3 << 20
    with caplog.at_level(logging.WARNING, "stowage.engine"):
        assert_equal(ask(engine), expected)
        engine.check()
    stats = engine.stats()["graphs"]
    assert 0 < stats["bytes"] <= stats["limit_bytes"] and stats["captured_steps"] > 0
    assert stats["refused"] == len(lines(caplog)) > 0 and recorder.forgotten
    assert all("too much beside the others" in line for line in lines(caplog))


class Short(TapeRecorder):
    """A device that has no memory for graphs of four sequences."""

    def capture(self, function):  # type: ignore[no-untyped-def]
        if len(function.__closure__[0].cell_contents.states) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().capture(function)


def test_a_device_without_memory_for_it(opened, caplog: pytest.LogCaptureFixture) -> None:  # type: ignore[no-untyped-def]
    expected = ask(opened("llama", cuda_graphs=False), PROMPTS[:4], (40, 6, 16, 11))
    engine = opened("llama", Short(), max_num_seqs=4)
    with caplog.at_level(logging.WARNING, "stowage.engine"):
        assert_equal(ask(engine, PROMPTS[:4], (40, 6, 16, 11)), expected)
    stats = engine.stats()["graphs"]
    assert stats["refused"] == len(lines(caplog)) == 1 and stats["captured_steps"] > 0
    assert {shape[0] for shape in engine.parts.graphs.recorded} == {1, 2}


def test_no_more_than_so_many(opened, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(backend, "GRAPHS_MAX", 1)
    engine = opened("llama")
    ask(engine, PROMPTS[:2], (12, 12))
    ask(engine, PROMPTS[:1], (12,))
    stats = engine.stats()["graphs"]
    assert (stats["recorded"], stats["refused"]) == (1, 0) and stats["captured_steps"] > 0
    found = dict(line.rsplit(" ", 1) for line in engine.metrics().splitlines() if line.startswith("stowage_graphs"))
    assert {name: float(value) for name, value in found.items()} == {
        row.metric: stats[row.stat] for row in metrics.GRAPHS
    }
    assert len(metrics.GRAPHS) == len(stats)


# which shapes


@pytest.mark.parametrize(
    ("sequences", "longest", "octave", "shape"),
    [
        (1, 1, 4, (1, 256)),
        (2, 256, 4, (2, 256)),
        (3, 257, 4, (4, 320)),
        (5, 320, 4, (8, 320)),
        (9, 321, 4, (16, 384)),
        (17, 513, 4, (24, 640)),
        (30, 1000, 4, (30, 1000)),  # no more sequences, and no more tokens, than there can be
        (3, 513, 1, (4, 1000)),
        (3, 257, 1, (4, 512)),
    ],
)
def test_shapes(sequences: int, longest: int, octave: int, shape: tuple[int, int], monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(static_steps, "TOKENS_LEAST", 256)
    asked = [type("Work", (), {"start": start})() for start in [longest - 1] + [0] * (sequences - 1)]
    sizes = {"max_num_seqs": 30, "context_tokens": 1000, "octave": octave}
    found = StaticSteps([], [], None, **sizes).shape(asked)  # type: ignore[arg-type]
    assert found == shape


def test_what_they_are_not_for(opened, checkpoints) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match="bloom models are run with Transformers' own attention"):
        opened("bloom", cuda_graphs=True)
    with pytest.raises(ConfigError, match="weights that are placed under a budget"):
        opened("llama", cuda_graphs=True, host_memory="64MiB", weights="*=prefetch")
    for family, memory in (("bloom", {}), ("llama", {"host_memory": "64MiB", "weights": "*=prefetch"})):
        assert opened(family, **memory).stats()["graphs"] is None
    engine = opened("llama", kv_cache_memory="64KiB")
    with pytest.raises(BudgetError) as raised:
        engine.submit([5] * 500, SamplingParams(max_new_tokens=1))
    least = int(str(raised.value).split("--kv-cache-memory ")[1].split("KiB")[0])
    opened("llama", kv_cache_memory=f"{least}KiB").generate([[5] * 500], SamplingParams(max_new_tokens=1))


def test_without_a_cuda_device(checkpoints) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match="needs a CUDA device, and the model computes on cpu"):
        Engine(checkpoints("llama"), Memory(kv_cache_memory="2MiB"), cuda_graphs=True)
    with Engine(checkpoints("llama"), Memory(kv_cache_memory="2MiB")) as engine:
        assert engine.stats()["graphs"] is None


def test_a_small_device_has_none(opened, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(budget, "SHARE", 16)
    monkeypatch.setattr(budget, "SHARE_LEAST_BYTES", 8 << 20)
    assert budget.share(1 << 30) == 64 << 20 and budget.share(100 << 30) == 512 << 20
    assert budget.share((128 << 20) - 1) == 0 < budget.share(128 << 20)
    assert opened("llama").stats()["graphs"] is None
