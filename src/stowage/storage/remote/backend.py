"""The protocol of a shared store, as a tier uses it: values by name, in batches. Each store implements it once.

The methods run in the tier's event loop, are cancelled when a deadline passes, and raise nothing for what the store or
the network does: an answer that did not come is a `Failure`. They retry nothing and bound nothing; the tier does both.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias


class Cause(enum.Enum):
    """NETWORK: no answer, or one of trouble; asked again while there is time. FULL: the store takes nothing more.
    REFUSED: it said no, and would say so again.
    """

    NETWORK = enum.auto()
    FULL = enum.auto()
    REFUSED = enum.auto()


@dataclass(frozen=True, slots=True)
class Failure:
    """Why there is no answer. `text` is for people, and holds no secret and no key."""

    cause: Cause
    text: str


Answer: TypeAlias = "bytes | bytearray | memoryview | Failure | None"
"""A value, or its beginning; None: there is no such value."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much at once. A batch is what one call of the backend takes; `*_max` are calls at the same time.

    `search_widths`: see `Search`.
    """

    batch_keys: int
    batch_bytes: int
    reads_max: int
    writes_max: int
    probes_max: int
    search_widths: tuple[int, int]


class Backend(Protocol):
    """One shared store."""

    bounds: Bounds

    async def head(self, names: Sequence[str], length: int) -> Sequence[Answer]:
        """The first `length` bytes of each value, fewer where it has fewer."""

    async def get(self, names: Sequence[str], lengths: Sequence[int]) -> Sequence[Answer]:
        """Each value, which may be shorter than said. Of one that is longer, any part that shows it; never much more
        than that in memory.
        """

    async def put(self, names: Sequence[str], values: Sequence[bytearray]) -> Sequence[Failure | None]:
        """Keeps each value under its name, in the place of what was there."""

    async def close(self) -> None:
        """Gives connections back."""

    def stats(self) -> dict[str, int | float | str]:
        """Numbers of its own."""
