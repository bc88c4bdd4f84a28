"""The ways in which a parameter can lie in a GGUF file otherwise than Transformers has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """A parameter that is ``pieces`` end to end: of a tensor, the rows from one on up to another. ``of``: how many rows
    the tensor has, where others of them are other parameters'.
    """

    pieces: tuple[tuple[str, int, int], ...]
    of: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for name, _, _ in self.pieces))


@dataclass(frozen=True, slots=True)
class Made:
    """What ``make`` makes of the numbers of tensors."""

    names: tuple[str, ...]
    make: Callable[[Sequence[Tensor]], Tensor]


@dataclass(frozen=True, slots=True)
class Stated:
    """One number, which a field says for each layer."""

    field: str
    layer: int
    names: tuple[str, ...] = ()


Layout = Rows | Made | Stated
