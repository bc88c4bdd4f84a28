"""`/v1/embeddings` of a server without an embedding model: refused, with advice how to serve one."""

from __future__ import annotations

from typing import Any

from stowage.engine.prompts import Begin, unasked
from stowage.server.api_errors import ApiError, bad
from stowage.server.apis.reader import Reader
from stowage.server.fields import Fields, parse_object


def generates(model: str) -> ApiError:
    """The error for embeddings of a model that generates text."""
    what = (
        f"The model {model[:200]!r} generates text and has no embeddings. Start the server with --embedding-model DIR: "
        "a checkpoint of sentence-transformers, which has a modules.json."
    )
    return bad(what, "model", "unsupported_model")


def read(reader: Reader, body: bytes | bytearray, begin: Begin = unasked) -> dict[str, Any]:
    """Raises ApiError."""
    model = reader.model(Fields(parse_object(body)))
    raise generates(model)
