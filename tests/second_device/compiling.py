"""A Triton kernel that is compiled for a GPU instead of being launched; needs Triton, but no GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.runtime.jit import mangle_type

_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")


class Compiled:
    """Replaces ``kernel``: a launch compiles it for compute capability ``arch`` and calls ``check(kernel, arch, args,
    constants, compiled)``. ``aligned``: what is known to be a multiple of 16 is compiled as such, as launches do.
    """

    def __init__(self, kernel: Any, arch: int, check: Callable[..., None], *, aligned: bool = False) -> None:
        self._kernel, self._arch, self._check, self._aligned = kernel, arch, check, aligned

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self._compile

    def _compile(self, *args: Any, **constants: Any) -> None:
        options = {name: constants.pop(name) for name in _OPTIONS if name in constants}
        signature = {name: mangle_type(value) for name, value in zip(self._kernel.arg_names, args, strict=False)}
        attributes = {(i,): [["tt.divisibility", 16]] for i, value in enumerate(args) if _is_aligned(value)}
        source = ASTSource(
            self._kernel,
            signature | dict.fromkeys(constants, "constexpr"),
            constants,
            attributes if self._aligned else None,
        )
        made = compile(source, target=GPUTarget("cuda", self._arch, 32), options=options)
        self._check(self._kernel, self._arch, args, constants, made)


def _is_aligned(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)
