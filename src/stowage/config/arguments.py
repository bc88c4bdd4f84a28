"""Type checks of arguments in the Python API: an error names the wrong argument before anything uses it.

Owns no meaning: what values are good for is checked by those who use them. All raise ``ConfigError``.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any, Final

from stowage.config.wording import shown_value
from stowage.errors import ConfigError

TEXT_MAX: Final = 4096
"""Characters of a path, an address or a name."""
_ITEMS_MAX: Final = 1 << 20


def text(name: str, value: Any, most: int = TEXT_MAX, encode: Callable[[str], bytes] = os.fsencode) -> str:
    """Text of at most ``most`` characters, without a zero byte, that ``encode`` takes; by default a name of files."""
    if not isinstance(value, str):
        raise ConfigError(f"{name} is a {type(value).__name__}: it must be text.")
    if len(value) > most:
        raise ConfigError(f"{name} has {len(value)} characters: it may have {most}.")
    try:
        encode(value)
    except UnicodeEncodeError as error:
        raise ConfigError(f"{name} is no text: it has half a surrogate pair at {error.start}.") from error
    if "\0" in value:
        raise ConfigError(f"{name} holds a zero byte: leave it out.")
    return value


def flag(name: str, value: Any) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {shown_value(value)}: it must be True or False.")
    return value


def flag_or_none(name: str, value: Any) -> bool | None:
    """True, false, or left to the program."""
    return None if value is None else flag(name, value)


def listed(name: str, values: Any, what: str) -> tuple[Any, ...]:
    """Items of a list, as often as they are looked at. ``what``: how they are called."""
    items = items_of(values)
    if items is None:
        raise ConfigError(f"{name} is a {type(values).__name__}: it must be a list of {what}.")
    return items


def items_of(values: Any) -> tuple[Any, ...] | None:
    """The items of anything that has some, but no more than any list may have; ``None``: it has none."""
    if isinstance(values, str | bytes | bytearray | Mapping) or not isinstance(values, Iterable):
        return None
    try:
        return tuple(islice(values, _ITEMS_MAX))
    except Exception:  # noqa: BLE001 - what iterates may be anybody's
        return None


def checkpoint(name: str, value: Any) -> Any:
    """A checkpoint's directory or hub id, or a model in memory, which has a config."""
    if isinstance(value, str):
        if not text(name, value).strip():
            raise ConfigError(f"{name} is empty: give a checkpoint's directory, a hub id, or a Transformers model.")
    elif isinstance(value, os.PathLike):
        text(name, os.fspath(value))
    elif getattr(value, "config", None) is None or isinstance(value, type):
        raise ConfigError(
            f"{name} is a {type(value).__name__}: it must be a checkpoint's directory, a hub id, or a model of "
            "Transformers."
        )
    return value
