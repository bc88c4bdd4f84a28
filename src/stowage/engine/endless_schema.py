"""Finds JSON schemas that no finite JSON satisfies, because their references lead in circles.

A part ends if it asks for nothing, or for parts that end. What ends is found by going through the schema again and
again until nothing new is; what is left in the end refers to itself without a way out (the emptiness of a grammar;
Hopcroft and Ullman, *Introduction to Automata Theory*, 1979, 4.4).
"""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import unquote

_SHOWN: Final = 100


def endless(schema: Any) -> str:
    """The reference in ``schema`` that leads in circles, so that no answer would end; empty: none does. Raises
    RecursionError for a schema that is nested too deeply.
    """
    search = _Search(schema)
    while True:
        known = len(search.ends)
        if search.does_end(schema):
            return ""
        if len(search.ends) == known:
            return search.last[:_SHOWN]


class _Search:
    """``ends``: references to parts that are known to end; ``last``: one that was met on its own way."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._way: set[str] = set()
        self.ends: set[str] = set()
        self.last = ""

    def does_end(self, part: Any) -> bool:
        if not isinstance(part, dict) or "enum" in part or "const" in part:
            return True
        if isinstance(name := part.get("$ref"), str) and not self._follow(name):
            return False
        if not all(map(self.does_end, _listed(part.get("allOf")))):
            return False
        for word in ("anyOf", "oneOf"):
            if (options := _listed(part.get(word))) and not any(map(self.does_end, options)):
                return False
        return self._own(part)

    def _own(self, part: dict[str, Any]) -> bool:
        """What an object or a list must have."""
        kinds = part.get("type")
        if isinstance(kinds, list) and not {"object", "array"}.issuperset(map(str, kinds)):
            return True
        fields = part.get("properties")
        if isinstance(fields, dict) and kinds != "array":
            needed = [
                fields[name] for name in _listed(part.get("required")) if isinstance(name, str) and name in fields
            ]
            if not all(map(self.does_end, needed)):
                return False
        least = part.get("minItems")
        if isinstance(least, int) and least > 0 and kinds != "object":
            first = _listed(part.get("prefixItems"))[:least]
            rest = [part.get("items")] if len(first) < least else []
            return all(map(self.does_end, [*first, *rest]))
        return True

    def _follow(self, name: str) -> bool:
        if name in self.ends:
            return True
        if name in self._way:
            self.last = name
            return False
        self._way.add(name)
        found = self.does_end(pointed(self._root, name))
        self._way.remove(name)
        if found:
            self.ends.add(name)
        return found


def pointed(root: Any, name: str) -> Any:
    """What the pointer ``name`` leads to in the schema ``root`` (RFC 6901). ``None`` for what is not there, and for
    names of other kinds: they are left to whoever compiles the schema.
    """
    start, *steps = unquote(name).split("/")
    if start != "#":
        return None
    part = root
    for step in steps:
        if isinstance(part, list):
            part = part[int(step)] if step.isdecimal() and int(step) < len(part) else None
        else:
            part = part.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(part, dict) else None
    return part


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
