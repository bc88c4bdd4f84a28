"""Reads the fields of a JSON object one by one. A field of the wrong type or range, or one that no reader took, is
refused by name. `null` is the same as leaving a field out, as it is for OpenAI.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable
from typing import Any, NoReturn

from stowage.server.api_errors import ApiError, bad

_SHOWN_CHARACTERS = 40


def parse_object(body: bytes | bytearray) -> dict[str, Any]:
    """The JSON object that `body` is. Raises ApiError for anything else, for NaN and for infinite numbers."""
    if not body:
        raise bad("The body is empty: send a JSON object.", code="invalid_json")
    try:
        value = json.loads(body, parse_constant=_refuse_constant)
    except (
        ValueError,
        RecursionError,
    ) as error:  # UnicodeDecodeError, JSONDecodeError and overlong numbers are ValueErrors
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise bad(f"The body is not JSON that can be used: {reason}.", code="invalid_json") from error
    if not isinstance(value, dict):
        raise bad(f"The body must be a JSON object, not {_kind(value)}.", code="invalid_json")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


class Fields:
    """One object's fields. Each method takes its field out; `finish` refuses those that are left."""

    def __init__(self, value: dict[str, Any], where: str = "") -> None:
        self._left = {name: item for name, item in value.items() if item is not None}
        self._names = set(value)
        self.where = where
        """Its own path; empty for a request's."""
        self._read: set[str] = set()

    def path(self, name: str) -> str:
        return f"{self.where}.{name}" if self.where else name

    def take(self, name: str) -> Any:
        """The field's value, unchecked; None where it is missing."""
        self._read.add(name)
        return self._left.pop(name, None)

    def peek(self, name: str) -> Any:
        """The field's value, which stays to be read."""
        return self._left.get(name)

    def given(self, name: str) -> bool:
        return name in self._left

    def need(self, name: str) -> None:
        """Raises ApiError where the field is not given."""
        if name not in self._left:
            raise bad(f"You must give {self.path(name)!r}.", self.path(name))

    def text(self, name: str, default: str | None = None) -> str | None:
        value = self.take(name)
        return default if value is None else self.as_text(name, value)

    def needed_text(self, name: str) -> str:
        self.need(name)
        return self.as_text(name, self.take(name))

    def as_text(self, name: str, value: object) -> str:
        if not isinstance(value, str):
            raise self.wrong(name, value, "a string")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise self.wrong(name, value, "text: it has half a surrogate pair") from error
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return value

    def whole(self, name: str, default: int | None, least: int, most: int) -> int | None:
        value = self.take(name)
        if value is None:
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.wrong(name, value, f"a whole number from {least} to {most}")
        return value

    def number(self, name: str, default: float, least: float, most: float) -> float:
        value = self.take(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise self.wrong(name, value, f"a number from {least:g} to {most:g}")
        return float(value)

    def texts(self, name: str, most: int, characters_most: int) -> tuple[str, ...]:
        """A text or a list of texts, none of them empty or longer than `characters_most`."""
        value = self.take(name)
        if value is None:
            return ()
        items = value if isinstance(value, list) else [value]
        if len(items) > most:
            raise bad(f"{self.path(name)!r} holds {len(items)} strings; at most {most} can be used.", self.path(name))
        found = tuple(self.as_text(name, item) for item in items)
        if "" in found:
            raise bad(f"{self.path(name)!r} holds an empty string.", self.path(name))
        if (longest := max(map(len, found), default=0)) > characters_most:
            what = f"{self.path(name)!r} holds a string of {longest} characters; at most {characters_most} can be used."
            raise bad(what, self.path(name))
        return found

    def wholes(self, name: str, most: int) -> tuple[int, ...]:
        value = self.take(name)
        if value is None:
            return ()
        if not isinstance(value, list):
            raise self.wrong(name, value, "a list of whole numbers")
        if (other := next((item for item in value if type(item) is not int), self)) is not self:
            what = f"{self.path(name)!r} holds {_kind(other)}; it must be a list of whole numbers."
            raise bad(what, self.path(name))
        if len(value) > most:
            raise bad(f"{self.path(name)!r} holds {len(value)} numbers; at most {most} can be used.", self.path(name))
        return tuple(value)

    def tokens(self, name: str, most: int, vocabulary: int) -> tuple[int, ...]:
        """Token ids."""
        found = self.wholes(name, most)
        wrong = next((token for token in found if not 0 <= token < vocabulary), None)
        if wrong is not None:
            last = vocabulary - 1
            what = f"{self.path(name)!r} has {str(wrong)[:20]}, which is no token of this model (0 to {last})."
            raise bad(what, self.path(name))
        return found

    def biases(self, name: str, most: int, vocabulary: int) -> dict[int, float]:
        """Numbers from -100 to 100 by token id; JSON has the ids as strings."""
        value = self.take(name)
        if value is None:
            return {}
        if not isinstance(value, dict) or len(value) > most:
            raise self.wrong(name, value, f"an object of at most {most} numbers by token")
        found = {}
        for token, bias in value.items():
            if not (token.isascii() and token.isdigit() and len(token) < 10 and int(token) < vocabulary):
                last = vocabulary - 1
                what = f"{self.path(name)!r} has {_short(token)!r}, which is no token of this model (0 to {last})."
                raise bad(what, self.path(name))
            if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
                raise self.wrong(f"{name}.{token}", bias, "a number from -100 to 100")
            found[int(token)] = float(bias)
        return found

    def mapping(self, name: str) -> dict[str, Any]:
        """An object as it is; empty where there is none."""
        return dict(self._object(name) or {})

    def inside(self, name: str) -> Fields | None:
        """The fields of an object that is a field."""
        value = self._object(name)
        return None if value is None else Fields(value, self.path(name))

    def needed_inside(self, name: str) -> Fields:
        self.need(name)
        return Fields(self._object(name) or {}, self.path(name))

    def _object(self, name: str) -> dict[str, Any] | None:
        value = self.take(name)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(name, value, "an object")
        return value

    def without_effect(self, *names: str) -> None:
        """Accept and ignore fields that change nothing about an answer."""
        for name in names:
            self.take(name)

    def neutral(self, name: str, *values: object) -> None:
        """Accept a field that is not supported, but only with one of `values`, which ask for nothing."""
        value = self.take(name)
        if value is not None and not any(value == item and type(value) in _alike(item) for item in values):
            what = f"{self.path(name)!r} is not supported by this server. Leave it out."
            raise bad(what, self.path(name), "unsupported_parameter")

    def finish(self) -> None:
        """Refuse fields that were not read, `null` or not."""
        for name in sorted(self._names - self._read):
            shown = _short(name)
            near = difflib.get_close_matches(name[:_SHOWN_CHARACTERS], self._read, n=1, cutoff=0.75)
            advice = f" Did you mean {self.path(near[0])!r}?" if near else ""
            raise bad(f"Unrecognized request argument supplied: {self.path(shown)}.{advice}", self.path(shown))

    def wrong(self, name: str, value: object, wanted: str) -> ApiError:
        return bad(f"{self.path(name)!r} is {_kind(value)}; it must be {wanted}.", self.path(name))


def _alike(value: object) -> Iterable[type]:
    return (int, float) if type(value) in (int, float) else (type(value),)


def _kind(value: object) -> str:
    if isinstance(value, bool | int | float | str):
        if isinstance(value, float) and math.isinf(value):
            return "a number that is too large"
        return _short(
            json.dumps(value) if not isinstance(value, int) or abs(value) < 1 << 64 else "a very large number"
        )
    return {dict: "an object", list: "a list", type(None): "null"}[type(value)]


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."
