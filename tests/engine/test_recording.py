"""What records steps: the tape of the tests freezes and refuses as a capture does, CUDA's recorder asks torch for the
right things in the right order, and attention over tables is the one over dense keys.
"""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from stowage.core.geometry import Kind
from stowage.cuda import graphs as cuda_graphs
from stowage.cuda.graphs import CudaRecorder
from stowage.executor import device, static_steps
from stowage.executor.attention_scores import Scores
from stowage.executor.attention_scores import attend as dense
from stowage.executor.decode_attention import attend
from stowage.executor.replay.backend import CaptureError
from stowage.executor.replay.cache import StepShape
from stowage.executor.replay.graphs.backend import GraphBackend
from stowage.executor.static_steps import StaticSteps
from stowage.models.layout import visible
from tests.engine.tape import TapeRecorder

# the tape


@torch.inference_mode()
def test_the_tape_replays_what_was_recorded() -> None:
    """In place and into views, with new numbers in the same tensors; what the host had decided stays."""
    given, kept, state = torch.zeros(4), torch.zeros(2, 4), torch.zeros(4)
    host = {"factor": 2}

    def step() -> torch.Tensor:
        kept.view(-1)[4:].copy_(torch.nn.functional.linear(given, torch.eye(4)) * host["factor"])
        state.add_(given)
        return torch.cat([kept[1], state]).reshape(2, 4)

    made = TapeRecorder().capture(step)
    host["factor"] = 3
    state.zero_()
    for _ in range(2):
        given.copy_(torch.arange(4.0))
        made.replay()
    assert torch.equal(kept[1], torch.arange(4.0) * 2), "a number of the host is frozen"
    assert torch.equal(made.result, torch.stack([kept[1], torch.arange(4.0) * 2]))


@torch.inference_mode()
def test_the_tape_refuses_what_a_capture_refuses() -> None:
    x, mask = torch.arange(4.0), torch.tensor([True, False, True, False])
    refused = {
        "reads": [lambda: x.sum().item(), lambda: x.tolist(), lambda: bool(x.any()), x.cpu, x.numpy, lambda: int(x[1])],
        "copies": [lambda: torch.tensor([1.0], device="cpu")],
        "depends on data": [x.nonzero, lambda: x[mask], lambda: x.unique(), lambda: x.masked_select(mask)],
    }
    for text, steps in refused.items():
        for step in steps:
            with pytest.raises(CaptureError, match=text):
                TapeRecorder().capture(step)  # type: ignore[arg-type]
    assert TapeRecorder().capture(lambda: torch.where(mask, x, 0.0)[torch.arange(2)] * torch.tensor(2.0)).result.numel()


# CUDA's


class Cuda:
    """Stands in for ``torch.cuda``: notes what is asked of it."""

    def __init__(self, fails: Exception | None = None) -> None:
        self.asked: list[str] = []
        self.reserved = 100
        self.streams = ["computing"]
        self.fails = fails
        self.capturing = False

    def Stream(self, device: object) -> SimpleNamespace:
        return SimpleNamespace(name="side", wait_stream=lambda other: self.asked.append(f"side waits for {other.name}"))

    def current_stream(self) -> SimpleNamespace:
        name = self.streams[-1]
        return SimpleNamespace(name=name, wait_stream=lambda other: self.asked.append(f"{name} waits for {other.name}"))

    @contextmanager
    def stream(self, stream):  # type: ignore[no-untyped-def]
        self.streams.append(stream.name)
        yield
        self.streams.pop()

    @contextmanager
    def device(self, device):  # type: ignore[no-untyped-def]
        yield

    def CUDAGraph(self) -> SimpleNamespace:
        number = sum(text.startswith("graph") for text in self.asked)
        return SimpleNamespace(
            number=number,
            pool=lambda: f"pool of {number}",
            replay=lambda: self.asked.append(f"replay {number}"),
            reset=lambda: self.asked.append(f"reset {number}"),
        )

    @contextmanager
    def graph(self, graph, pool, stream, capture_error_mode):  # type: ignore[no-untyped-def]
        self.asked.append(f"graph {graph.number}, {pool}, {stream.name}, {capture_error_mode}")
        self.reserved -= 40  # what was cached and is not used
        self.capturing = True
        self.streams.append(stream.name)
        try:
            yield
        finally:
            self.streams.pop()
            self.capturing = False

    def memory_stats(self, device: object) -> dict[str, int]:
        assert self.capturing, "before a capture there is memory that its beginning gives back"
        return {"reserved_bytes.all.current": self.reserved}

    def empty_cache(self) -> None:
        self.asked.append("empty_cache")

    def step(self) -> torch.Tensor:
        self.asked.append(f"step on {self.streams[-1]}")
        if self.capturing:
            self.reserved += 7
            if self.fails is not None:
                raise self.fails
        return torch.ones(1)


WARM_UP = ["side waits for computing", "step on side", "step on side", "computing waits for side"]


def test_cuda_is_asked_to_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warmed up on the stream of the capture, in the pool of the first one; other threads are left alone."""
    cuda = Cuda()
    monkeypatch.setattr(cuda_graphs.torch, "cuda", cuda)
    recorder = CudaRecorder(torch.device("cuda", 0))
    made = [recorder.capture(cuda.step) for _ in range(2)]
    assert cuda.asked[:6] == [*WARM_UP, "graph 0, None, side, thread_local", "step on side"]
    assert cuda.asked[6:] == [*WARM_UP, "graph 1, pool of 0, side, thread_local", "step on side"]
    assert recorder.nbytes == 14
    cuda.asked.clear()
    made[1].replay()
    assert cuda.asked == ["replay 1"] and torch.equal(made[1].result, torch.ones(1))
    recorder.forget()
    assert cuda.asked[1:] == ["reset 0", "reset 1", "empty_cache"] and recorder.nbytes == 0
    recorder.capture(cuda.step)
    assert "graph 0, None, side, thread_local" in cuda.asked, "a pool of its own again"


def test_cuda_says_why_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend refuses by its first line, but for memory, which says nothing of what is recorded."""
    cuda = Cuda(RuntimeError("operation not permitted when stream is capturing\nand more"))
    monkeypatch.setattr(cuda_graphs.torch, "cuda", cuda)
    recorder = CudaRecorder(torch.device("cuda", 0))
    steps = StaticSteps([], [], attend, max_num_seqs=8, context_tokens=64)
    backend = GraphBackend(lambda inputs: cuda.step(), steps, recorder)
    monkeypatch.setattr(static_steps, "Inputs", lambda *_: None)
    with pytest.raises(CaptureError, match=r"^operation not permitted when stream is capturing$"):
        backend.record(StepShape(1, 64), [])
    cuda.fails = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(torch.OutOfMemoryError):
        backend.record(StepShape(1, 64), [])
    assert recorder.nbytes == 0


def test_what_a_cpu_has_not() -> None:
    assert device.recorder(torch.device("cpu")) is None
    assert device.paged_kernel(torch.device("cpu"), torch.float32) is None


# attention over tables


@pytest.mark.parametrize(("kind", "window"), [(Kind.FULL, 0), (Kind.SLIDING, 7), (Kind.CHUNKED, 6)])
@pytest.mark.parametrize(
    ("softcap", "sunk", "shared"),
    [(None, False, False), (30.0, False, False), (None, True, False), (None, False, True)],
)
def test_attention_over_tables(kind: Kind, window: int, softcap: float | None, sunk: bool, shared: bool) -> None:
    """As over dense keys of float64, whatever lies in blocks that are not seen."""
    generator = torch.Generator().manual_seed(1)
    size, heads, kv_heads, width = 4, 6, 1 if shared else 2, 16
    keys = torch.randn((40, size, kv_heads, width), generator=generator)
    values = keys[..., :8] if shared else torch.randn(keys.shape, generator=generator)
    positions = torch.tensor([0, 3, 14, 21])
    firsts = torch.tensor({Kind.FULL: [0, 0, 0, 0], Kind.SLIDING: [0, 0, 2, 3], Kind.CHUNKED: [0, 0, 3, 4]}[kind])
    blocks = torch.zeros((4, 8), dtype=torch.int64)
    order = torch.randperm(39, generator=generator) + 1
    for i, (first, position) in enumerate(zip(firsts.tolist(), positions.tolist(), strict=True)):
        count = position // size - first + 1
        blocks[i, :count] = order[8 * i : 8 * i + count]
    query = torch.randn((4, heads, width), generator=generator)
    sinks = torch.randn(heads, generator=generator) if sunk else None
    how = Scores(0.3, softcap, sinks)
    found = attend(query, keys, values, blocks, firsts * size, positions, kind, window, how)
    for i, position in enumerate(positions.tolist()):
        base = int(firsts[i]) * size
        here = (view[blocks[i]].flatten(0, 1)[: position - base + 1].double() for view in (keys, values))
        read_keys, read_values = (part.transpose(0, 1)[None] for part in here)
        seen = visible(kind, window, np.array([[position]]), np.arange(base, position + 1)[None])
        bias = torch.zeros(seen.shape, dtype=torch.float64).masked_fill_(torch.from_numpy(~seen), float("-inf"))
        exact = Scores(0.3, softcap, None if sinks is None else sinks.double())
        expected = dense(query[i].double().view(1, kv_heads, -1, width), read_keys, read_values, bias, exact)
        assert torch.allclose(found[i].double(), expected.reshape(heads, -1), atol=1e-5)
