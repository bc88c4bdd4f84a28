"""The tables in C (`native/tables`), where they were built with the package and `STOWAGE_PURE_PYTHON` is not set.

Python objects take three times the memory of their content here, and a dict of millions of keys stops everything for
most of a second when it is resized. The C tables take 32 bytes per key, its fields, and 10 to 20 bytes of overhead;
they are resized one shard of constant size at a time.
"""

from __future__ import annotations

from stowage.core.table import rows, slots
from stowage.native import extension as _native
from stowage.native import is_wanted


def make_rows(width: int) -> rows.Rows | _native.Rows:
    """The table in C, or the one in Python where that is missing or switched off."""
    return _native.Rows(width) if is_wanted() else rows.Rows(width)


def make_slots(count: int) -> slots.Slots | _native.Slots:
    """As `make_rows`."""
    return _native.Slots(count) if is_wanted() else slots.Slots(count)
