"""Measures how fast this machine computes a model's operations, and whether other programs used its cores meanwhile.

A program of its own, which imports torch and prints one JSON object on stdout. Matrices are used in turn and are
together larger than the CPU's caches, as a model's layers are.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from stowage.core.geometry import Kind
from stowage.planner import forwards, weight_speeds
from stowage.planner.machine import INT8

ROWS = (1, 2, 4, 8, 32, 128, 512, 1024)
_OUT, _IN = 4096, 2048
_WEIGHTS_BYTES = 256 << 20
_LEAST_S, _LEAST_COUNT, _SPAN_S = 0.3, 4, 0.01
_ATTENTION = (16, 1024, 64)
_FOLD, _BLOCK_TOKENS = 4, 16
_LINK_BYTES = 256 << 20


def typical_s(job: Callable[[int], object], wait: Callable[[], object]) -> float:
    """A typical time of one call of ``job``, which is called with 1, 2, 3, ...: the median, over spans of calls that
    last some milliseconds, of the mean time per call. So a single disturbance is left out and a constant one is not.
    The first call is a warm-up.
    """
    job(0)
    wait()
    spans_s: list[float] = []
    calls, count = 0, 0
    began_s = span_s = time.perf_counter()
    while count < _LEAST_COUNT or span_s - began_s < _LEAST_S:
        count += 1
        calls += 1
        job(count)
        wait()
        now_s = time.perf_counter()
        if now_s - span_s >= _SPAN_S or count < _LEAST_COUNT:
            spans_s.append((now_s - span_s) / calls)
            span_s, calls = now_s, 0
    return max(statistics.median(spans_s), 1e-9)


def measure(say: Callable[[str], object], file: Path | None) -> dict[str, Any]:
    """All speeds, as fields of ``Machine``. ``say`` reports progress; ``file`` is read while computing."""
    import torch

    from stowage.executor import kernels

    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    wait = torch.cuda.synchronize if cuda else (lambda: None)
    found: dict[str, Any] = {"kind": device.type, "threads": torch.get_num_threads(), "products": {}, "attention": {}}
    found["device"] = torch.cuda.get_device_name() if cuda else ""
    with torch.inference_mode():
        for dtype in (torch.bfloat16, torch.float32, *((torch.float16,) if cuda else ())):
            name = str(dtype).removeprefix("torch.")
            say(f"matrix products in {name}")
            found["products"][name] = products(dtype, device, wait)
            found["attention"][name] = attention(dtype, device, wait)
            if dtype is torch.bfloat16 and kernels.wanted(device, dtype):
                found["attention"][name + INT8] = attention(dtype, device, wait, int8=True)
        found["waited_share"] = waited_share()
        if cuda:
            say("layers")
            found["layer_s"] = layer_s(device, wait)
            say("the link to the device")
            found["link_in"], found["link_out"] = links(device, wait)
        elif file is not None:
            say("reading while computing")
            found |= weight_speeds.measure(file, multiplier(torch.bfloat16, device))
    if not cuda:
        from stowage.planner import format_speed  # with torch

        say("formats")
        with torch.inference_mode():
            measured = {name: format_speed.measure(getattr(torch, name)) for name in found["products"]}
        found["formats"], found["narrow"] = ({name: each[at] for name, each in measured.items()} for at in (0, 1))
        say("forwards")
        found |= forwards.measure()
    return found


def waited_share(tasks: Path = Path("/proc/self/task")) -> float:
    """The share of their runnable time that this process's threads waited for a core; 0 where the system does not
    report it (``schedstat`` in https://docs.kernel.org/scheduler/sched-stats.html).
    """
    ran_ns = waited_ns = 0
    for file in tasks.glob("*/schedstat"):
        try:
            ran, waited, _ = map(int, file.read_text(encoding="ascii").split())
        except (OSError, ValueError):
            continue
        ran_ns, waited_ns = ran_ns + ran, waited_ns + waited
    return waited_ns / max(ran_ns + waited_ns, 1)


def multiplier(dtype: Any, device: Any) -> Callable[[Any, Any], Any]:
    """The function that the engine computes linear layers with."""
    import torch

    from stowage.executor import kernels

    return kernels.product if kernels.wanted(device, dtype) else torch.nn.functional.linear


def products(dtype: Any, device: Any, wait: Callable[[], object]) -> dict[int, float]:
    """Parameters per second of the engine's matrix products, by number of rows."""
    import torch

    linear = multiplier(dtype, device)
    count = max(2, _WEIGHTS_BYTES // (_OUT * _IN * dtype.itemsize))
    weights = [torch.full((_OUT, _IN), 0.5, dtype=dtype, device=device) for _ in range(count)]
    rates = {}
    for rows in ROWS:
        multiply = partial(linear, torch.full((rows, _IN), 0.5, dtype=dtype, device=device))

        def job(at: int, multiply: Callable[[Any], Any] = multiply) -> Any:
            return multiply(weights[at % count])

        seconds = typical_s(job, wait)
        rates[rows] = _OUT * _IN / seconds
    return rates


def attention(dtype: Any, device: Any, wait: Callable[[], object], *, int8: bool = False) -> float:
    """Operations per second of the engine's causal attention; ``int8``: with activations in 8 bits."""
    from stowage.executor import kernels

    heads, tokens, size = _ATTENTION
    attend = partial(_by_kernels, int8) if kernels.wanted(device, dtype) else _by_torch
    seconds = typical_s(attend(dtype, device), wait)
    return 4 * heads * size * tokens * (tokens + 1) / 2 / seconds


def _by_kernels(int8: bool, dtype: Any, device: Any) -> Callable[[int], object]:
    import torch

    from stowage.executor.int8_activations import ROUNDED_FROM
    from stowage.executor.kernels import NEVER, AttentionRuns, attend

    heads, tokens, size = _ATTENTION
    query = torch.full((tokens, heads, size), 0.5, dtype=dtype, device=device)
    blocks = -(-tokens // _BLOCK_TOKENS)
    keys = torch.full((blocks, _BLOCK_TOKENS, max(1, heads // _FOLD), size), 0.5, dtype=dtype, device=device)
    run = torch.tensor([[0, tokens, 0, 0, 0]])
    runs = AttentionRuns(torch.arange(blocks), run, Kind.FULL, 0, _BLOCK_TOKENS)
    return lambda at: attend(query, keys, keys, runs, size**-0.5, rounded_from=ROUNDED_FROM if int8 else NEVER)


def _by_torch(dtype: Any, device: Any) -> Callable[[int], object]:
    import torch

    heads, tokens, size = _ATTENTION
    query = torch.full((1, heads, tokens, size), 0.5, dtype=dtype, device=device)
    return lambda at: torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)


def layer_s(device: Any, wait: Callable[[], object]) -> float:
    """Seconds of a layer with negligible matrix products: calls, norms, rotation, cache."""
    import torch

    layer = _layer(device)
    hidden = torch.ones(1, 1, 64, device=device)

    def several(at: int) -> None:
        for _ in range(16):
            layer(hidden)

    return typical_s(several, wait) / 16


def _layer(device: Any) -> Callable[[Any], Any]:
    """A Llama layer of 64 channels, one token at a time, as Transformers computes it: the same operations."""
    import torch
    from torch import nn

    linears = nn.ModuleList(nn.Linear(64, 64, bias=False, device=device) for _ in range(7))
    scale = torch.ones(64, device=device)
    past = torch.ones(1, 4, 32, 16, device=device)
    turn = torch.ones(1, 1, 1, 16, device=device)

    def norm(x: Any) -> Any:
        wide = x.to(torch.float32)
        return scale * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    def heads(x: Any) -> Any:
        return x.view(1, 1, 4, 16).transpose(1, 2)

    def turned(x: Any) -> Any:
        return x * turn + torch.cat((-x[..., 8:], x[..., :8]), dim=-1) * turn

    def layer(x: Any) -> Any:
        y = norm(x)
        query, key, value = turned(heads(linears[0](y))), turned(heads(linears[1](y))), heads(linears[2](y))
        keys, values = torch.cat((past, key), dim=2), torch.cat((past, value), dim=2)
        seen = nn.functional.scaled_dot_product_attention(query, keys, values)
        x = x + linears[3](seen.transpose(1, 2).reshape(1, 1, 64))
        y = norm(x)
        return x + linears[6](nn.functional.silu(linears[4](y)) * linears[5](y))

    return layer


def links(device: Any, wait: Callable[[], object]) -> tuple[float, float]:
    """Bytes per second to the device and from it, of ordinary memory."""
    import torch

    host, there = torch.ones(_LINK_BYTES, dtype=torch.uint8), torch.ones(_LINK_BYTES, dtype=torch.uint8, device=device)
    into_s = typical_s(lambda at: there.copy_(host, non_blocking=True), wait)
    out_s = typical_s(lambda at: host.copy_(there, non_blocking=True), wait)
    return _LINK_BYTES / into_s, _LINK_BYTES / out_s


if __name__ == "__main__":
    given = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    print(json.dumps(measure(lambda text: print(text, file=sys.stderr, flush=True), given)), flush=True)
