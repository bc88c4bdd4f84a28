"""Compile the paged attention kernel for GPUs, as it is launched for some geometries: `python compile_paged.py CACHE`.

A process of its own, because Triton either compiles or interprets. Prints a line for each; fails where one does not
compile, needs more shared memory than small GPUs have, or multiplies halves without tensor cores.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)
os.environ["TRITON_CACHE_DIR"] = sys.argv[1]
sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[2] / "src")]

import torch  # noqa: E402

from tests.second_device.interpreting import require  # noqa: E402

require()
from stowage.core.geometry import Kind  # noqa: E402
from stowage.cuda.paged_attention import kernels, launch  # noqa: E402
from tests.second_device.compiling import Compiled  # noqa: E402
from tests.second_device.paged_cases import make  # noqa: E402

SHARED_BYTES_MOST = 99 << 10
"""What a program may take on the smallest GPUs of the compute capabilities 8.x."""
HALVES = torch.bfloat16, torch.float16
LLAMA = {"share": 4, "width": 128, "value_width": 128}
LATENT = {"kv_heads": 1, "share": 16, "width": 576, "value_width": 512, "latent": True}
CASES: list[tuple[int, dict[str, Any]]] = [
    (90, LLAMA | {"positions": [700], "dtype": torch.bfloat16}),
    (
        80,
        {"positions": [40], "kind": Kind.SLIDING, "window": 32, "width": 80, "value_width": 80, "dtype": torch.float16},
    ),
    (90, LATENT | {"positions": [40], "dtype": torch.bfloat16}),
    (80, LATENT | {"positions": [40], "kind": Kind.CHUNKED, "window": 32, "sunk": True, "softcap": 30.0}),
]


def check(kernel: Any, arch: int, args: Any, constants: Any, made: Any) -> None:
    tensor_cores = made.asm["ptx"].count("mma")
    print(kernel.__name__, arch, f"{made.metadata.shared} bytes shared, {tensor_cores} matrix products")
    assert made.metadata.shared <= SHARED_BYTES_MOST
    assert tensor_cores or kernel is kernels.combine or args[0].dtype not in HALVES


for arch, case in CASES:
    compiled = SimpleNamespace(
        split=Compiled(kernels.split, arch, check, aligned=True),
        combine=Compiled(kernels.combine, arch, check, aligned=True),
    )
    launch._kernels = lambda compiled=compiled: compiled
    make(**case).found()
