"""How fast single tokens are attended to on a GPU: the engine's paged kernel, and torch, which gathers the keys first.

    python -m benchmarks.cuda_decode [--shapes grouped,windowed,latent] [--contexts 512,4096,32768] [--batches 1,8,64]

One layer's attention of one decode step, in bfloat16, in blocks of 16 tokens that are scattered over a pool:

    grouped    32 query heads over 8 key heads of 128, as Llama-3 8B has them
    windowed   the same with a window of 1,024 tokens
    latent     128 query heads over one latent of 512 and a rope key of 64, as DeepSeek-V3 has them

Both ways are recorded as CUDA graphs, so that the device alone is timed, in turn over the rounds, each time with a cold
L2 cache. Their answers are compared. The limit is what has to be read, keys and values once, at the speed of a copy on
this device. Needs a CUDA device and Triton. `python -m benchmarks.engine --device cuda` is the whole engine, beside
Transformers' continuous batching.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks._report import median_spread, write_result
from stowage.core.geometry import Kind
from stowage.cuda.paged_attention import launch
from stowage.executor import attention
from stowage.executor.attention_scores import Scores
from stowage.executor.batch import DecodeStep

BLOCK_TOKENS = 16
POOL_BYTES_MOST = 16 << 30
COLD_BYTES = 256 << 20
"""Written before each run: more than any L2 cache holds."""
BOUND = 2e-2
WAYS = ("kernel", "torch")
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Shape:
    """One layer. ``rank``: columns of the keys that are the values, where there are no others."""

    heads: int
    kv_heads: int
    width: int
    rank: int = 0
    window: int = 0

    def token_bytes(self) -> int:
        """Of a token's keys and values."""
        return self.kv_heads * self.width * (1 if self.rank else 2) * DTYPE.itemsize

    def seen(self, context: int) -> int:
        """Tokens that the query of a sequence of ``context`` tokens sees."""
        return min(context, self.window or context)


SHAPES = {
    "grouped": Shape(32, 8, 128),
    "windowed": Shape(32, 8, 128, window=1024),
    "latent": Shape(128, 1, 576, rank=512),
}


def questions(shape: Shape, context: int, batch: int, device: torch.device) -> dict[str, Callable[[], Tensor]]:
    """Both ways to the same answer; sequences of ``context`` tokens each."""
    seen = shape.seen(context)
    first = (context - seen) // BLOCK_TOKENS
    count = (context - 1) // BLOCK_TOKENS + 1 - first
    generator = torch.Generator(device).manual_seed(1)
    draw = lambda *size: torch.randn(size, generator=generator, device=device, dtype=DTYPE)  # noqa: E731
    keys = draw(batch * count + 1, BLOCK_TOKENS, shape.kv_heads, shape.width)
    values = keys[..., : shape.rank] if shape.rank else torch.empty_like(keys).copy_(keys.flip(0))
    query = draw(batch, shape.heads, shape.width)
    blocks = (torch.randperm(batch * count, generator=generator, device=device) + 1).view(batch, count)
    bases = torch.full((batch,), first * BLOCK_TOKENS, device=device)
    positions = torch.full((batch,), context - 1, device=device)
    kind = Kind.SLIDING if shape.window else Kind.FULL
    scores = Scores(shape.width**-0.5)
    begin = context - seen - first * BLOCK_TOKENS
    bias = torch.zeros((batch, 1, 1, begin + seen), device=device, dtype=DTYPE)
    bias[..., :begin] = float("-inf")
    step = DecodeStep(blocks, begin + seen, bias if begin else None)

    def gathered() -> Tensor:  # of latents the rope columns ride along, as in the engine
        views = (keys, keys) if shape.rank else (keys, values)
        return attention._decode(None, query, views, step, scores)[..., : shape.rank or shape.width]

    def in_place() -> Tensor:
        return launch.attend(query, keys, values, blocks, bases, positions, kind, shape.window, scores)

    return {"kernel": in_place, "torch": gathered}


def recorded(way: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """``way`` as a CUDA graph, and where its answer comes to be."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            way()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        answer = way()
    return graph, answer


def microseconds(run: Callable[[], object]) -> float:
    """On the device, of what ``run`` starts."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return 1000 * float(begin.elapsed_time(end))


def copy_bytes_per_s(device: torch.device) -> float:
    """How fast memory is read and written: the best of some copies of half a GiB."""
    source = torch.ones(1 << 29, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best_s = float("inf")
    for _ in range(10):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        best_s = min(best_s, begin.elapsed_time(end) / 1000)
    return 2 * source.nbytes / best_s


@torch.inference_mode()
def measure(shape: Shape, context: int, batch: int, rounds: int, device: torch.device, speed: float) -> dict[str, Any]:
    """Microseconds of each way, and of reading what must be read."""
    ways = questions(shape, context, batch, device)
    graphs = {name: recorded(ways[name]) for name in WAYS}
    cold = torch.empty(COLD_BYTES, dtype=torch.uint8, device=device)
    taken: dict[str, list[float]] = {name: [] for name in WAYS}
    for number in range(rounds):
        for name in WAYS[:: 1 if number % 2 == 0 else -1]:
            cold.zero_()
            taken[name].append(microseconds(graphs[name][0].replay))
    off = float((graphs["kernel"][1].float() - graphs["torch"][1].float()).abs().max())
    if not off <= BOUND:
        raise SystemExit(f"the two ways differ by {off:.1e}: nothing is worth timing.")
    limit = 1e6 * batch * shape.seen(context) * shape.token_bytes() / speed
    spreads = {name: median_spread(found) for name, found in taken.items()}
    kernel, gathered = spreads["kernel"].median, spreads["torch"].median
    print(
        f"  {context:>7,} tokens x {batch:<3}  kernel {spreads['kernel']} us   torch {spreads['torch']} us   "
        f"limit {limit:,.1f} us   {gathered / kernel:.1f} times as fast, {limit / kernel:.0%} of the limit",
        flush=True,
    )
    return {"context": context, "batch": batch, **spreads, "limit_us": limit, "difference": off}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--contexts", default="512,4096,32768")
    parser.add_argument("--batches", default="1,8,64")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    if unknown := set(options.shapes.split(",")) - SHAPES.keys():
        parser.error(f"{', '.join(sorted(unknown))}: unknown; choose from {', '.join(SHAPES)}")
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark times a GPU, and torch finds no CUDA device (see nvidia-smi).")
    if importlib.util.find_spec("triton") is None:
        raise SystemExit("the paged kernel needs Triton, which torch's build for CUDA brings: pip install triton")
    device = torch.device("cuda", torch.cuda.current_device())
    speed = copy_bytes_per_s(device)
    name = torch.cuda.get_device_name(device)
    print(f"{name}: {speed / 1e9:,.0f} GB/s copied")
    results: dict[str, Any] = {"device": name, "copy_bytes_per_s": speed, "torch": torch.__version__}
    for asked in options.shapes.split(","):
        shape = SHAPES[asked]
        print(asked, flush=True)
        results[asked] = []
        for context in map(int, options.contexts.split(",")):
            for batch in map(int, options.batches.split(",")):
                if 4 * batch * shape.seen(context) * shape.token_bytes() <= POOL_BYTES_MOST:  # gathered beside, too
                    results[asked].append(measure(shape, context, batch, options.rounds, device, speed))
        write_result("cuda_decode", results)


if __name__ == "__main__":
    main()
