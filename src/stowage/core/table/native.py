"""The tables in C (`kernel/*.[ch]`), where they were built with the package and `STOWAGE_PURE_PYTHON` is not set.

Python's objects take three times the memory of what they say here, and one dict of millions of keys stops everything
for most of a second when it grows. The kernel takes 32 bytes for a key, its fields, and 10 to 20 bytes beside; what
grows is a part of the table that always has the same size.
"""

from __future__ import annotations

from stowage.core.switches import PURE_PYTHON, is_on
from stowage.core.table import rows, slots

try:
    from stowage.core.table import _table
except ImportError:  # pragma: no cover - where nothing could be compiled
    _table = None  # type: ignore[assignment]

__all__ = ["is_built", "is_wanted", "make_rows", "make_slots"]


def is_built() -> bool:
    """Whether the kernel can be had at all."""
    return _table is not None


def is_wanted() -> bool:
    """Whether it is used."""
    return is_built() and not is_on(PURE_PYTHON)


def make_rows(width: int) -> rows.Rows | _table.Rows:
    """The quicker of both, unless it is not there or not wanted."""
    return _table.Rows(width) if is_wanted() else rows.Rows(width)


def make_slots(count: int) -> slots.Slots | _table.Slots:
    """As `make_rows`."""
    return _table.Slots(count) if is_wanted() else slots.Slots(count)
