"""The parsed choices of an answer: content, reasoning, and tool calls with their ids.

Owns one parser for each choice, so that streamed and unstreamed answers have the same parts.
"""

from __future__ import annotations

import secrets
import string
from dataclasses import dataclass, field

from stowage.engine.request import Completion, Delta
from stowage.server.apis.generation_request import GenerationRequest
from stowage.server.tools.incremental_parser import Part
from stowage.server.tools.parser import OutputParser

_LETTERS = string.ascii_letters + string.digits


@dataclass(slots=True)
class Call:
    """One tool call. arguments: JSON as the model wrote it, complete or not."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class ParsedOutput:
    """The output of one choice so far."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)


class ChoiceParsers:
    """The parsers of one answer's choices. `prefix`: of the ids of calls."""

    def __init__(self, request: GenerationRequest, prefix: str) -> None:
        self._ask = request
        self._prefix = prefix
        self._parsers: dict[int, OutputParser] = {}
        self._spoken: dict[int, ParsedOutput] = {}

    def push(self, choice: int, delta: Delta) -> list[Part]:
        """Parse a piece; the parts that it completes."""
        if self._ask.syntax.is_plain:
            parts = [Part("content", delta.text)] if delta.text else []
        else:
            parser = self._parsers.setdefault(choice, OutputParser(self._ask.syntax))
            parts = parser.push(delta.text)
            if delta.completion is not None:
                parts += parser.finish(is_cut=delta.completion.finish_reason != "stop")
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

    def whole(self, choice: int, completion: Completion) -> ParsedOutput:
        """The output of an ended choice, parsed in one go."""
        self._parsers.pop(choice, None)
        self._spoken.pop(choice, None)
        self.push(choice, Delta(completion.text, [], completion))
        return self.spoken(choice)

    def spoken(self, choice: int) -> ParsedOutput:
        return self._spoken.setdefault(choice, ParsedOutput())

    def _identity(self) -> str:
        form = self._ask.syntax.format
        if form is not None and form.id_characters:
            return "".join(secrets.choice(_LETTERS) for _ in range(form.id_characters))
        return self._prefix + secrets.token_hex(12)
