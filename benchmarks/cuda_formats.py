"""Linear layers from published bytes on a GPU: every format against bfloat16, for 32 rows (a step) and for 256.

    python -m benchmarks.cuda_formats [--rounds 20] [--outputs 4096] [--inputs 4096] [--matrices 16]

Random matrices, more than any L2 cache holds. Three ways: `bfloat16` multiplies with plain matrices; `kernels` makes
numbers of the published bytes and multiplies with them, as the engine does; `torch` makes them with torch's operations,
which the engine did before and does where Triton is not there. The first two are recorded as CUDA graphs, as the
engine's steps are; the third cannot be in every format, and is started from Python. They take turns over the rounds.
The limit is reading the published bytes once at the speed of a copy on this device. Needs a CUDA device and Triton.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks._report import median_spread, write_result
from benchmarks.cuda_decode import copy_bytes_per_s, microseconds, recorded
from benchmarks.formats import random_parts
from stowage.executor import device as device_seam  # noqa: F401 - tells the weights how they are unpacked there
from stowage.weights.quantized.blocks import BlockMatrix
from stowage.weights.quantized.formats import Spec, dequantized_by_torch, outputs_of, unpacks_at_once

ROWS = (32, 256)
DTYPE = torch.bfloat16
TORCH_OUTPUTS = 128
"""Unpacked at a time by torch, as where memory is short."""


def specs(outputs: int, inputs: int) -> list[Spec]:
    """What is published."""
    names = ("q8_0", "q4_0", "q4_1", "q5_0", "q4_k", "q5_k", "q6_k", "mxfp4")
    return [
        *(Spec(name, outputs, inputs) for name in names),
        Spec("fp8", outputs, inputs, 128, 128),
        *(Spec("int4", outputs, inputs, group, scale_dtype=DTYPE) for group in (32, 128)),
        *(Spec(name, outputs, inputs, 128, scale_dtype=torch.float16) for name in ("gptq", "awq")),
    ]


def by_pieces(x: Tensor, matrix: BlockMatrix) -> Tensor:
    """``x`` times a matrix that torch unpacks, some outputs at a time."""
    spec, out = matrix.spec, x.new_empty(len(x), matrix.spec.outputs)
    for begin in range(0, spec.outputs, TORCH_OUTPUTS):
        end = min(begin + TORCH_OUTPUTS, spec.outputs)
        out[:, begin:end] = F.linear(x, dequantized_by_torch(*outputs_of(spec, matrix.parts, begin, end), x.dtype))
    return out


@torch.inference_mode()
def measure(spec: Spec, plain: Sequence[Tensor], rows: int, rounds: int, speed: float) -> dict[str, Any]:
    """Microseconds of one matrix, each way."""
    parts = {part: values.cuda() for part, values in random_parts(spec).items()}
    blocks = [BlockMatrix(spec, {part: values.clone() for part, values in parts.items()}, DTYPE) for _ in plain]
    if not unpacks_at_once(spec, blocks[0].parts, DTYPE):
        raise SystemExit(f"the kernels do not unpack {spec.name} here (see the warning): nothing is worth timing.")
    x = torch.randn(rows, spec.inputs, device="cuda", dtype=DTYPE)
    graphs = {
        "bfloat16": recorded(lambda: torch.stack([F.linear(x, one)[0, 0] for one in plain]))[0].replay,
        "kernels": recorded(lambda: torch.stack([one.multiply(x)[0, 0] for one in blocks]))[0].replay,
        "torch": lambda: [by_pieces(x, one) for one in blocks[:2]],
    }
    counts = {"bfloat16": len(plain), "kernels": len(blocks), "torch": 2}
    taken: dict[str, list[float]] = {way: [] for way in graphs}
    for _ in range(rounds + 1):
        for way, run in graphs.items():
            taken[way].append(microseconds(run) / counts[way])
    spreads = {way: median_spread(found[1:]) for way, found in taken.items()}
    ours, limit = spreads["kernels"].median, 1e6 * spec.nbytes / speed
    label = f"{spec.name}, {spec.group}" if spec.group else spec.name
    print(
        f"  {label:<10} {rows:>3} rows  bfloat16 {spreads['bfloat16']} us   kernels {spreads['kernels']} us   "
        f"torch {spreads['torch']} us   {spreads['bfloat16'].median / ours:.2f} times bfloat16, "
        f"{spreads['torch'].median / ours:.1f} times torch, {limit / ours:.0%} of the limit",
        flush=True,
    )
    return {"format": label, "rows": rows, "bytes": spec.nbytes, **spreads, "limit_us": limit}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--outputs", type=int, default=4096)
    parser.add_argument("--inputs", type=int, default=4096)
    parser.add_argument("--matrices", type=int, default=16)
    parser.add_argument("--name", default="cuda_formats", help="of the result's file")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark times a GPU, and torch finds no CUDA device (see nvidia-smi).")
    device = torch.device("cuda", torch.cuda.current_device())
    speed = copy_bytes_per_s(device)
    name = torch.cuda.get_device_name(device)
    print(f"{name}: {speed / 1e9:,.0f} GB/s copied; matrices of {asked.outputs:,} x {asked.inputs:,}")
    plain = [torch.randn(asked.outputs, asked.inputs, device=device, dtype=DTYPE) for _ in range(asked.matrices)]
    rows = [
        measure(spec, plain, count, asked.rounds, speed)
        for spec in specs(asked.outputs, asked.inputs)
        for count in ROWS
    ]
    size = {"outputs": asked.outputs, "inputs": asked.inputs, "matrices": asked.matrices}
    write_result(
        asked.name, {"device": name, "copy_bytes_per_s": speed, "torch": torch.__version__, **size, "rows": rows}
    )


if __name__ == "__main__":
    main()
