"""Tables of keys that stay quick and small with millions of them: in C where that was built, else in Python."""

from stowage.core.table.native import is_built, is_wanted, make_rows, make_slots
from stowage.core.table.rows import EXTENT

__all__ = ["EXTENT", "is_built", "is_wanted", "make_rows", "make_slots"]
