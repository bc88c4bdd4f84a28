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
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource, compile  # noqa: E402
from triton.runtime.jit import mangle_type  # noqa: E402

from stowage.cuda.unpacking import kernels, launch  # noqa: E402
from tests.block_formats import SPECS, parts_of  # noqa: E402


class Noted:
    """Stands for a kernel: compiles what it is launched with."""

    def __init__(self, kernel: Any, arch: int) -> None:
        self._kernel, self._arch = kernel, arch

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self._compile

    def _compile(self, *args: Any, num_warps: int, enable_fp_fusion: bool, **constants: Any) -> None:
        names = self._kernel.arg_names
        signature = {name: mangle_type(value) for name, value in zip(names, args, strict=False)}
        source = ASTSource(self._kernel, signature | dict.fromkeys(constants, "constexpr"), constants)
        options = {"num_warps": num_warps, "enable_fp_fusion": enable_fp_fusion}
        made = compile(source, target=GPUTarget("cuda", self._arch, 32), options=options)
        print(self._kernel.__name__, constants["FORMAT"], self._arch, f"{made.metadata.shared} bytes shared")
        assert "fma.rn" not in made.asm["ptx"]


plain = kernels.side_by_side, kernels.apart
for arch in (80, 90):
    kernels.side_by_side, kernels.apart = (Noted(kernel, arch) for kernel in plain)
    for spec in SPECS:
        if spec.name in launch.FORMATS:
            launch.unpack(spec, parts_of(spec), torch.bfloat16)
