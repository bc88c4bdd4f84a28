"""The tables in C (`native/tables`), where they were built with the package and `STOWAGE_PURE_PYTHON` is not set.

Python's objects take three times the memory of what they say here, and one dict of millions of keys stops everything
for most of a second when it grows. The kernel takes 32 bytes for a key, its fields, and 10 to 20 bytes beside; what
grows is a part of the table that always has the same size.
"""

from __future__ import annotations

from stowage.core.table import rows, slots
from stowage.native import extension as _native
from stowage.native import is_built, is_wanted

__all__ = ["is_built", "is_wanted", "make_rows", "make_slots"]


def make_rows(width: int) -> rows.Rows | _native.Rows:
    """The quicker of both, unless it is not there or not wanted."""
    return _native.Rows(width) if is_wanted() else rows.Rows(width)


def make_slots(count: int) -> slots.Slots | _native.Slots:
    """As `make_rows`."""
    return _native.Slots(count) if is_wanted() else slots.Slots(count)
