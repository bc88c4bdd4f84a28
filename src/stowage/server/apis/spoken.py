"""What the choices of an answer consist of: texts that were said and thought, and calls with their identities.

Owns one parser for each choice, so that a stream and a whole answer have the same parts.
"""

from __future__ import annotations

import secrets
import string
from dataclasses import dataclass, field

from stowage.engine.engine import Completion, Delta
from stowage.server.apis.ask import Ask
from stowage.server.tools.parser import OutputParser, Part

__all__ = ["Call", "Spoken", "Voices"]

_LETTERS = string.ascii_letters + string.digits


@dataclass(slots=True)
class Call:
    """One call of a tool. arguments: JSON as the model wrote it, whole or not."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Spoken:
    """One choice, as far as it has come."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)


class Voices:
    """Of one answer. `prefix`: of the identities of calls."""

    def __init__(self, ask: Ask, prefix: str) -> None:
        self._ask = ask
        self._prefix = prefix
        self._parsers: dict[int, OutputParser] = {}
        self._spoken: dict[int, Spoken] = {}

    def grown(self, choice: int, delta: Delta) -> list[Part]:
        """The parts that a piece of a stream brings."""
        if self._ask.speech.is_plain:
            parts = [Part("content", delta.text)] if delta.text else []
        else:
            parser = self._parsers.setdefault(choice, OutputParser(self._ask.speech))
            parts = parser.push(delta.text) + (parser.finish() if delta.completion is not None else [])
        spoken = self.spoken(choice)
        for part in parts:
            if part.kind == "content":
                spoken.content += part.text
            elif part.kind == "reasoning":
                spoken.reasoning += part.text
            elif part.kind == "call":
                spoken.calls.append(Call(self._identity(), part.text))
            else:
                spoken.calls[-1].arguments += part.text
        return parts

    def whole(self, choice: int, completion: Completion) -> Spoken:
        """What a choice has come to, read at once."""
        self._parsers.pop(choice, None)
        self._spoken.pop(choice, None)
        self.grown(choice, Delta(completion.text, [], completion))
        return self.spoken(choice)

    def spoken(self, choice: int) -> Spoken:
        return self._spoken.setdefault(choice, Spoken())

    def _identity(self) -> str:
        form = self._ask.speech.format
        if form is not None and form.id_characters:
            return "".join(secrets.choice(_LETTERS) for _ in range(form.id_characters))
        return self._prefix + secrets.token_hex(12)
