"""`/v1/embeddings`: refused, with the reason: the engine computes what a model says next, and nothing else."""

from __future__ import annotations

from typing import Any

from stowage.engine.prompts import Begin, unasked
from stowage.server.apis.reader import Reader
from stowage.server.fields import Fields, parse_object
from stowage.server.refusal import bad

__all__ = ["read"]


def read(reader: Reader, body: bytes | bytearray, begin: Begin = unasked) -> dict[str, Any]:
    """Raises ApiError."""
    model = reader.model(Fields(parse_object(body)))
    what = f"The model {model[:200]!r} generates text here and has no embeddings. Ask a server of an embedding model."
    raise bad(what, "model", "unsupported_model")
