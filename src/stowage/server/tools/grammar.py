"""Grammars of answers that call tools: so that what must be a call is one, with arguments of the tool's schema.

    calls    required, or a function is named
    mixed    any text; but where a call begins, it is a call of a tool, and of `strict` tools the schema holds
    answer   what `response_format` asks for, unless it is calls

Between tags, strings are text: their patterns and lengths are not enforced there.

Owns how these are put together, in llguidance's Lark notation. They are compiled where the request is read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from stowage.engine.grammar import Grammars
from stowage.engine.sampling_params import StructuredOutputs, Thinking
from stowage.errors import RequestError
from stowage.server.api_errors import ApiError
from stowage.server.structured import unusable
from stowage.server.tools.formats import INDEX, Tags, ToolFormat
from stowage.server.tools.request_tools import RequestTools, Tool
from stowage.server.tools.tagged import allows_text, fields_of, view

_TEXT: Final = "/(.|\\n)*/"
_NO_BRACE: Final = "/([^{ \\n](.|\\n)*)?/"
_WHITESPACE: Final = {"x-guidance": {"whitespace_pattern": r"[ \n]{0,20}"}}
_ANYTHING: Final = {"type": "object"}
_PARTS: Final = frozenset(("$ref", "allOf", "anyOf", "oneOf"))
"""What may name further fields of an object, in a schema's other parts."""
Literal = Callable[[str], str]


def enforced_grammar(
    form: ToolFormat,
    tools: RequestTools,
    asked: tuple[str, StructuredOutputs] | None,
    grammars: Grammars,
    thinking: Thinking | None,
) -> StructuredOutputs | None:
    """What the answer to a request must be; None: any text. Compiled, so that it can be used. asked: what is wanted of
    an answer that calls nothing, and the field that says so.

    Raises ApiError, which names the field of what cannot be.
    """
    param, wanted = ("tools", None) if asked is None or tools.is_forced else asked
    forced, strict = tools.is_forced, any(tool.strict for tool in tools.callable)
    try:
        if not forced and wanted is None and not strict:
            return None
        for tool in tools.callable:
            if forced or tool.strict:
                _check(tool, grammars)
        if not tools.callable and not form.harmony and wanted is not None:
            made = replace(wanted, thinking=thinking)
        else:
            if wanted is not None and wanted.kind != "grammar":
                grammars.begin(wanted)  # what is wrong with it is said of it, not of what it is a part of
            lark = _Lark(form, tools, grammars.literal).whole(wanted)
            made = StructuredOutputs(grammar=lark, thinking=thinking)
        grammars.begin(made)
    except ApiError:
        raise
    except RequestError as error:
        raise unusable(param, error) from error
    return made


def _check(tool: Tool, grammars: Grammars) -> None:
    try:
        grammars.check(json.dumps(tool.parameters))
    except RequestError as error:
        raise unusable(f"{tool.where}.{tool.schema}", error) from error


class _Lark:
    """One grammar, rule by rule."""

    def __init__(self, form: ToolFormat, tools: RequestTools, literal: Literal) -> None:
        self._form, self._request_tools, self._tools = form, tools, tools.callable
        self._literal = literal
        self._rules: list[str] = []

    def whole(self, wanted: StructuredOutputs | None) -> str:
        form, tools = self._form, self._request_tools
        answer = None if wanted is None else self._answer(wanted)
        if self._tools:
            self._arguments()
        if form.harmony:
            start = self._channels(answer)
        elif tools.is_forced:
            start = self._calls("")
        elif answer is not None:
            start = f"({self._calls('')}) | {answer}"
        elif form.trigger:
            start = f"({self._until('lead', form.trigger)} {self._calls(form.trigger)})? TEXT"
        else:
            start = f"({self._calls('')}) | NOCALL"
            self._rules.append(f"NOCALL: {_NO_BRACE}")
        return "\n".join([f"start: {start}", f"TEXT: {_TEXT}", *self._rules]) + "\n"

    def _until(self, rule: str, mark: str) -> str:
        """Text, and then the first `mark`; as a rule where that is no token by itself."""
        literal = self._literal(mark)
        if literal.startswith("<["):
            return f"TEXT {literal}"
        line = f"{rule}[lazy]: TEXT {literal}"
        if line not in self._rules:
            self._rules.append(line)
        return rule

    def _calls(self, said: str) -> str:
        """All calls, but for `said`, with which they begin."""
        form = self._form
        opening = form.opening.removeprefix(said)
        first = "" if form.opening else said
        parts = [self._maybe(opening), self._one("first", first)]
        if self._request_tools.parallel and self._request_tools.choice != "named":
            parts.append(f"({self._maybe(form.between)} {self._one('next', '')})*")
        return " ".join([*parts, self._maybe(form.closing)]).strip()

    def _one(self, rule: str, said: str) -> str:
        """Any one call, as a rule."""
        options = []
        for at, tool in enumerate(self._tools):
            before = self._form.before.removeprefix(said)
            head = " /[0-9]+/ ".join(self._maybe(part.replace("NAME", tool.name)) for part in before.split(INDEX))
            options.append(f"{head} arguments_{at} {self._maybe(self._form.after)}".strip())
        self._rules.append(f"{rule}: " + " | ".join(options))
        return rule

    def _arguments(self) -> None:
        for at, tool in enumerate(self._tools):
            if self._form.tags is not None:
                self._tagged(f"arguments_{at}", self._schema(tool), self._form.tags)
                continue
            self._rules.append(f"arguments_{at}: %json {json.dumps(self._schema(tool))}")

    def _schema(self, tool: Tool) -> dict[str, Any]:
        if not (tool.strict or self._request_tools.is_forced):
            return _WHITESPACE | _ANYTHING
        schema = _WHITESPACE | _ANYTHING | tool.parameters
        named = schema.get("properties") is not None or schema.keys() <= {"type", "x-guidance"}
        if named and _PARTS.isdisjoint(schema):
            schema.setdefault("additionalProperties", False)  # what is not named is of no use to the tool
        return schema

    def _tagged(self, rule: str, schema: dict[str, Any], tags: Tags) -> None:
        """Arguments between tags, in the schema's order: those that must be there, and those that may."""
        properties, required = fields_of(schema)
        parts = []
        for at, (key, value) in enumerate(properties.items()):
            opens = self._literal(tags.opens.replace("KEY", key))
            one = f"{opens} {self._value(f'{rule}_{at}', value, schema, tags)} {self._maybe(tags.space)}".strip()
            parts.append(one if key in required else f"({one})?")
        if view(schema, schema).get("additionalProperties", True) is not False:
            before, after = map(self._maybe, tags.opens.split("KEY"))
            parts.append(f"({before} /[^<>\\n]+/ {after} {self._until('value', tags.end)} {self._maybe(tags.space)})*")
        self._rules.append(f"{rule}: " + (" ".join(parts) or '""'))

    def _value(self, rule: str, schema: Any, whole: dict[str, Any], tags: Tags) -> str:
        """One value and its end: a string is text, of any length; what is listed is one of that; all else is JSON."""
        end = "\n" * tags.lines + tags.end
        known = view(schema, whole)
        listed = known.get("enum", [known["const"]] if "const" in known else None)
        if listed and all(isinstance(one, str) for one in listed):
            return f"({' | '.join(map(self._literal, listed))}) {self._literal(end)}"
        if allows_text(schema, whole):
            return self._until("text" if tags.lines else "value", end)
        shared = {name: whole[name] for name in ("$defs", "definitions") if name in whole}
        body = _WHITESPACE | shared | schema if isinstance(schema, dict) else schema
        self._rules.append(f"{rule}: %json {json.dumps(body)}")
        return f"{rule} {self._literal(end)}"

    def _channels(self, answer: str | None) -> str:
        """gpt-oss: thoughts and remarks in channels of their own, then a call, or what is said at last."""
        text = self._literal
        ends = f'{text("<|end|>")} {text("<|start|>")} "assistant"'
        self._rules.append(f'say: {text("<|channel|>")} ("analysis" | "commentary") {text("<|message|>")} TEXT {ends}')
        last = f'{text("<|channel|>")} "final" {text("<|message|>")} {answer or "TEXT"}'
        options = [] if self._request_tools.is_forced else [last]
        if self._tools:
            options.append(self._one("call", ""))
        return f"say* ({' | '.join(options)})"

    def _answer(self, wanted: StructuredOutputs) -> str:
        self._rules.append(f"answer: {_BODIES[wanted.kind](wanted.text)}")
        return "answer"

    def _maybe(self, text: str) -> str:
        return self._literal(text) if text else ""


def _json_body(text: str) -> str:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"this JSON schema is no JSON: {error}.") from error
    return f"%json {json.dumps(_WHITESPACE | schema if isinstance(schema, dict) else schema)}"


def _choice_body(text: str) -> str:
    choices: Sequence[str] = json.loads(text)
    return " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)


def _no_grammar(_text: str) -> str:
    raise RequestError(
        "structured_outputs.grammar cannot be used together with tools, nor with models that answer in channels. Leave "
        "'tools' out, or give a schema, a regex or choices."
    )


_BODIES: Final[dict[str, Callable[[str], str]]] = {
    "json": _json_body,
    "json_object": lambda _: f"%json {json.dumps(_WHITESPACE | _ANYTHING)}",
    "choice": _choice_body,
    "regex": lambda text: "/" + re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", text, flags=re.DOTALL) + "/",
    "grammar": _no_grammar,
}
