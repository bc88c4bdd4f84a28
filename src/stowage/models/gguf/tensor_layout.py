"""How a parameter of Transformers' model can lie in a GGUF file, where it is not one tensor with the same numbers.

``Rows`` are pieces of tensors, read where they lie. ``Made`` is computed from tensors when the model is loaded.
``Stated`` is a number in the file's fields. ``layouts`` says which parameter of which family is which.
"""

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
