"""Values of settings as they are given, as text or as TOML has them, made into what a setting holds.

Owns what is said of a value of the wrong kind: all raise ``ConfigError``, whose text goes on where ``settings`` begins.
"""

import json
import re
from collections.abc import Mapping
from typing import TypeGuard

from stowage.config.memory import SIZE_FIX, parse_tokens
from stowage.config.wording import shown_value
from stowage.errors import ConfigError

_DIGITS_MAX = 40


def _digits(text: str) -> int:
    if len(text) > _DIGITS_MAX:
        raise ConfigError(f"it has {len(text)} digits: no machine has so many of anything.")
    return int(text)


def as_size(value: object) -> int | str:
    """A number of bytes, or text that `memory.parse_size` reads."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ConfigError(f"it is {shown_value(value)}, not a size. {SIZE_FIX}")
    return _digits(value) if isinstance(value, str) and value.strip().isdecimal() and value.isascii() else value


def as_text(value: object) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"it is {shown_value(value)}, not text. Write it in quotes.")
    return value


def as_int(value: object) -> int:
    if isinstance(value, str) and re.fullmatch(r"\s*[+-]?[0-9]+\s*", value):
        return _digits(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"it is {shown_value(value)}; write a whole number.")
    return value


def as_tokens(value: object) -> int:
    """A number of tokens: 0, 4096, 32k."""
    text = str(value).strip()
    return parse_tokens(text) if isinstance(value, str) and text.strip("0") else as_int(value)


def as_float(value: object) -> float:
    try:
        if not isinstance(value, bool) and isinstance(value, int | float | str):
            return float(value)
    except (ValueError, OverflowError):
        pass
    raise ConfigError(f"it is {shown_value(value)}, not a number. Write one, such as 0.5.")


def as_switch(value: object) -> bool:
    if isinstance(value, bool):
        return value
    known = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if isinstance(value, str) and value.strip().lower() in known:
        return known[value.strip().lower()]
    raise ConfigError(f"it is {shown_value(value)}; write true or false.")


def as_seed(value: object) -> int | None:
    return None if value is None or value == "" else as_int(value)


def as_maybe(value: object) -> bool | None:
    """A switch that may be left to the program."""
    return None if value is None or value in ("", "auto") else as_switch(value)


def as_texts(value: object) -> tuple[str, ...]:
    """A list of texts. One text that is such a list in JSON is that list; any other is the only one."""
    if isinstance(value, str):
        listed = _from_json(value) if value.lstrip().startswith("[") else None
        return tuple(listed) if _are_texts(listed) else (value,)
    if _are_texts(value):
        return tuple(value)
    raise ConfigError(f"it is {shown_value(value)}, not text or a list of texts. Write each in quotes.")


def _are_texts(value: object) -> TypeGuard[list[str]]:
    return isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)


def _from_json(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def as_addresses(value: object) -> tuple[str, ...]:
    """A list of texts, of which each may be several: an address holds no comma."""
    parts = [part.strip() for text in as_texts(value) for part in text.split(",")]
    return tuple(part for part in parts if part)


def as_kinds(value: object) -> dict[str, int]:
    """Numbers of tokens by kind of group: `sliding=32,recurrent=512`, or a mapping."""
    if isinstance(value, str):
        pairs = [part.partition("=") for part in value.split(",") if part.strip()]
        if all(equals for _, equals, _ in pairs):
            return {name.strip(): as_int(number) for name, _, number in pairs}
    if isinstance(value, Mapping):
        return {str(name): as_int(number) for name, number in value.items()}
    raise ConfigError(f"it is {shown_value(value)}; write kind=tokens, for example sliding=32,recurrent=512.")
