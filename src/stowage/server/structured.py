"""Reads the fields for structured outputs of OpenAI and vLLM: `response_format`, `structured_outputs`, `guided_*`.

Owns the field names. The grammar is compiled later, where the request is read, off the engine's thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from stowage.engine.sampling_params import STRUCTURES, StructuredOutputs
from stowage.errors import RequestError
from stowage.server.api_errors import ApiError, bad
from stowage.server.fields import Fields

_GUIDED: Final = {f"guided_{kind}": kind for kind in ("json", "regex", "choice", "grammar")}
_FORMATS: Final = "text, json_object, json_schema"


def structured_outputs(fields: Fields) -> tuple[str, StructuredOutputs] | None:
    """The field's name and its structure; None: any text. Raises ApiError for what cannot be used."""
    found = [one for one in (_of_format(fields), _of_vllm(fields), *_guided(fields)) if one is not None]
    if not found:
        return None
    if len(found) > 1:
        raise bad(f"{found[0][0]!r} and {found[1][0]!r} exclude each other; give one of them.", found[1][0])
    return made_of(*found[0])


def made_of(param: str, given: Mapping[str, Any]) -> tuple[str, StructuredOutputs]:
    """The field's name and the structure that `given` describes. Raises ApiError."""
    try:
        return param, StructuredOutputs(**given)
    except RequestError as error:
        raise unusable(param, error) from error


def unusable(param: str, error: RequestError) -> ApiError:
    """An engine's error about `structured_outputs.KIND`, worded for the client's field."""
    if not str(error).startswith("structured_outputs"):
        return bad(f"In {param!r}: {error}", param)
    kind, _, what = str(error).removeprefix("structured_outputs").partition(" ")
    return bad(f"{param + kind if param == 'structured_outputs' else param!r} {what}", param)


def _of_format(fields: Fields) -> tuple[str, dict[str, Any]] | None:
    """OpenAI's `response_format`."""
    inside = fields.inside("response_format")
    if inside is None:
        return None
    kind = inside.needed_text("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise bad(f"'response_format.type' is {kind[:40]!r}; use one of {_FORMATS}.", "response_format.type")
    schema = inside.needed_inside("json_schema") if kind == "json_schema" else None
    inside.finish()
    if schema is not None:
        return schema.where, of_schema(schema)
    return None if kind == "text" else ("response_format", {"json_object": True})


def of_schema(schema: Fields) -> dict[str, Any]:
    """A named schema, as OpenAI's APIs have it."""
    schema.text("name")
    schema.text("description")
    schema.flag("strict")
    schema.need("schema")
    found = schema.mapping("schema")
    schema.finish()
    return {"json": found}


def _of_vllm(fields: Fields) -> tuple[str, dict[str, Any]] | None:
    inside = fields.inside("structured_outputs")
    if inside is None:
        return None
    given = {kind: value for kind in STRUCTURES if (value := inside.take(kind)) is not None}
    inside.finish()
    return "structured_outputs", given


def _guided(fields: Fields) -> list[tuple[str, dict[str, Any]]]:
    """vLLM's older names."""
    taken = [(name, kind, fields.take(name)) for name, kind in _GUIDED.items()]
    return [(name, {kind: value}) for name, kind, value in taken if value is not None]
