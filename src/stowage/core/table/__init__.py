"""Hash tables from keys to slots and to rows, for millions of keys: in C where that was built, else in Python."""

from stowage.core.table.native import make_rows, make_slots
from stowage.core.table.rows import EXTENT
from stowage.native import is_built, is_wanted

__all__ = ["EXTENT", "is_built", "is_wanted", "make_rows", "make_slots"]
