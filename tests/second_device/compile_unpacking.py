"""Compile the kernels that unpack published formats for GPUs: `python compile_unpacking.py CACHE`.

A process of its own, because Triton either compiles or interprets. Prints a line for each format and GPU; fails where
one does not compile, or contracts operations that torch rounds one by one.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)
os.environ["TRITON_CACHE_DIR"] = sys.argv[1]
sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[2] / "src")]

import torch  # noqa: E402

from tests.second_device.interpreting import require  # noqa: E402

require()
from stowage.cuda.unpacking import kernels, launch  # noqa: E402
from tests.block_formats import SPECS, parts_of  # noqa: E402
from tests.second_device.compiling import Compiled  # noqa: E402


def check(kernel: Any, arch: int, args: Any, constants: Any, made: Any) -> None:
    print(kernel.__name__, constants["FORMAT"], arch, f"{made.metadata.shared} bytes shared")
    assert "fma.rn" not in made.asm["ptx"]


plain = kernels.side_by_side, kernels.apart
for arch in (80, 90):
    kernels.side_by_side, kernels.apart = (Compiled(kernel, arch, check) for kernel in plain)
    for spec in SPECS:
        if spec.name in launch.FORMATS:
            launch.unpack(spec, parts_of(spec), torch.bfloat16)
