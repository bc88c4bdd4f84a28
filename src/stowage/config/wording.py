"""Wording of messages: how they show a value that may be anything, and what they suggest for an unknown name."""

import difflib
import reprlib
from collections.abc import Iterable

_NUMBER_MAX = 1 << 62


def shown_value(value: object) -> str:
    """What a message says of a value that may be anything, of any length."""
    if isinstance(value, int) and abs(value) > _NUMBER_MAX:
        return "a very large number"
    try:
        return reprlib.repr(value)
    except ValueError:  # it holds a number that is too large to be written
        return f"a {type(value).__name__} with a very large number"


def unknown_name(what: str, name: str, valid: Iterable[str]) -> str:
    """Text for an unknown name: the nearest valid one, or all of them where none is near."""
    names = sorted(valid)
    near = difflib.get_close_matches(name.lower().replace("-", "_"), names, n=1, cutoff=0.5)
    advice = f"Did you mean {near[0]!r}?" if near else f"Valid: {', '.join(names)}."
    return f"{what} is unknown. {advice}"
