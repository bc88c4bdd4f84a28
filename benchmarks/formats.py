"""Linear layers from published bytes: every format against bfloat16, for one token, for eight and for 512.

    python -m benchmarks.formats [--json] [--rounds 7] [--threads 2] [--mib 256] [--formats gptq,awq] [--name formats]

Formats of whole numbers are measured with activations in 8 bits too; GPTQ and AWQ as they lie in files, and as they lie
in memory.

Random matrices of 2,048 x 2,048, as many as take ``--mib`` in bfloat16, so that a pass over them comes from memory and
not from a cache; they lie where the engine's weights do. A round passes over each format in turn, so that other load on
the machine hits all of them; what is told is the median of the rounds. ``share``: bytes of the weights per second,
against what as many threads read in the same rounds, summing numbers: the rate of memory changes by the minute.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence

from stowage import openmp

openmp.wait_briefly()

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks._report import describe_machine, median_spread, write_result  # noqa: E402
from stowage.executor import kernels  # noqa: E402
from stowage.weights.quantized.blocks import BlockMatrix  # noqa: E402
from stowage.weights.quantized.formats import Spec  # noqa: E402
from stowage.weights.quantized.i_quants import I_QUANTS  # noqa: E402
from stowage.weights.quantized.row_major import by_outputs  # noqa: E402
from stowage.weights.resident import ResidentMemory  # noqa: E402

SIDE = 2048
ROWS = (1, 8, 512)
READING = "reading"
SPECS = (
    *(Spec(name, SIDE, SIDE) for name in ("q8_0", "q4_0", "q4_1", "q5_0", "q4_k", "q5_k", "q6_k", "mxfp4")),
    *(Spec(name, SIDE, SIDE) for name in ("q2_k", "q3_k", "iq4_nl", "iq4_xs", *I_QUANTS)),
    Spec("fp8", SIDE, SIDE, 128, 128),
    *(Spec("int4", SIDE, SIDE, group, scale_dtype=torch.bfloat16) for group in (32, 128)),
    *(BY_INPUTS := [Spec(name, SIDE, SIDE, 128, scale_dtype=torch.float16) for name in ("gptq", "awq")]),
)
IN_MEMORY = "gptq and awq in memory, 128"


def random_parts(spec: Spec) -> dict[str, Tensor]:
    """Bytes whose scales are usual numbers: what is computed takes as long whatever they are then."""
    parts = {}
    for part, (shape, dtype) in spec.tensors().items():
        if dtype.is_floating_point:
            parts[part] = (torch.rand(shape) / 16).to(dtype)
        elif part == "scales" and dtype is torch.uint8:  # powers of two
            parts[part] = torch.randint(115, 125, shape, dtype=dtype)
        else:
            parts[part] = torch.randint(0, 48, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8).view(dtype)
    return parts


def random_matrix(spec: Spec, memory: ResidentMemory) -> BlockMatrix:
    """Where the engine's weights lie."""
    return BlockMatrix(spec, {part: memory.copy(values) for part, values in random_parts(spec).items()}, torch.bfloat16)


def passes(mib: int, names: frozenset[str]) -> dict[str, tuple[int, Callable[[Tensor], None]]]:
    """For each format, of all or those of ``names``, the bytes of its matrices, and what multiplies with all of them.
    How a kernel reads them is known before, as in a recorded step.
    """
    count = max(1, (mib << 20) // (2 * SIDE * SIDE))
    some = torch.empty(1, SIDE, dtype=torch.bfloat16)
    memory = ResidentMemory()
    plain = [kernels.of_plain(memory.copy(torch.randn(SIDE, SIDE).bfloat16())) for _ in range(count)]
    values = memory.copy(torch.ones(mib << 17, dtype=torch.int64))
    found: dict[str, tuple[int, Callable[[Tensor], None]]] = {
        READING: (values.nbytes, lambda x: _sum(values)),
        "bfloat16": (count * 2 * SIDE * SIDE, lambda x: _all(x, plain)),
    }
    labels = {f"{spec.name}, {spec.group}" if spec.group else spec.name: spec for spec in SPECS}
    labels[IN_MEMORY] = by_outputs(BY_INPUTS[0])
    for label, spec in labels.items():
        if names and names.isdisjoint((spec.name, *label.split())):
            continue
        blocks = [random_matrix(spec, memory) for _ in range(count)]
        exact = [kernels.of_blocks(one) for one in blocks]
        found[label] = (count * spec.nbytes, lambda x, own=exact: _all(x, own))
        if spec.name in kernels.INTEGER_FORMATS:
            rounded = [kernels.int8_product(some, one) for one in blocks]
            found[f"{label}, int8 activations"] = (count * spec.nbytes, lambda x, own=rounded: _all(x, own))
    return found


def _sum(values: Tensor) -> None:
    assert int(values.sum()) == len(values)


def _all(x: Tensor, matrices: Sequence[kernels.Matrix | None]) -> None:
    for matrix in matrices:
        assert matrix is not None
        kernels.linear_of(x, matrix)


def measure(rounds: int, mib: int, names: frozenset[str] = frozenset()) -> dict[str, object]:
    found = passes(mib, names)
    seconds: dict[tuple[str, int], list[float]] = {}
    for rows in ROWS:
        x = torch.randn(rows, SIDE).bfloat16()
        for turn in range(rounds + 1 if rows < 512 else min(rounds, 3)):
            for name, (_, run) in found.items():
                begin = time.perf_counter()
                run(x)
                if turn:
                    seconds.setdefault((name, rows), []).append(time.perf_counter() - begin)
    limit = found.pop(READING)[0] / median_spread(seconds[READING, 1]).median
    table: dict[str, object] = {}
    for name, (nbytes, _) in found.items():
        spreads = {rows: median_spread(seconds[name, rows]) for rows in ROWS}
        quicker = {rows: median_spread(seconds["bfloat16", rows]).median / spreads[rows].median for rows in ROWS}
        share = nbytes / spreads[1].median / limit
        table[name] = {"bytes": nbytes, "seconds": spreads, "times_bfloat16": quicker, "share_of_reading": share}
    return {"read_bytes_per_s": limit, "formats": table}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--formats", default="", help="all by default")
    parser.add_argument("--name", default="formats", help="of the file of results")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    result = measure(args.rounds, args.mib, frozenset(filter(None, args.formats.split(","))))
    path = write_result(args.name, {"instructions": kernels.instructions(), "threads": args.threads, **result})
    written = json.loads(path.read_text(encoding="utf-8"))
    if args.json:
        print(json.dumps(written, indent=2))
        return
    print(f"{describe_machine()['cpu']}, {written['instructions']}, {args.threads} threads\n")
    print("| format | bits | one token: times bfloat16 | share of reading | eight | 512 |\n|---|---|---|---|---|---|")
    weights = written["formats"]["bfloat16"]["bytes"] / 2
    for name, row in written["formats"].items():
        alone, eight, many = (row["times_bfloat16"][str(rows)] for rows in ROWS)
        bits = 8 * row["bytes"] / weights
        print(f"| {name} | {bits:.2f} | {alone:.2f} | {row['share_of_reading']:.0%} | {eight:.2f} | {many:.2f} |")


if __name__ == "__main__":
    main()
