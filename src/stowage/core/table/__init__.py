"""Hash tables from keys to slots and to rows, for millions of keys: in C (``native/tables``) where that was built and
``STOWAGE_PURE_PYTHON`` is not set, else in Python.
"""

from __future__ import annotations

from stowage.core.table import rows, slots
from stowage.core.table.rows import EXTENT
from stowage.native import extension as _native
from stowage.native import is_wanted

__all__ = ["EXTENT", "make_rows", "make_slots"]


def make_rows(width: int) -> rows.Rows | _native.Rows:
    """An empty table of rows with ``width`` bytes of fields."""
    return _native.Rows(width) if is_wanted() else rows.Rows(width)


def make_slots(count: int) -> slots.Slots | _native.Slots:
    """An empty table for ``count`` slots."""
    return _native.Slots(count) if is_wanted() else slots.Slots(count)
