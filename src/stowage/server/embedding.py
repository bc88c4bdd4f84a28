"""`/v1/embeddings`, as OpenAI defines it, with an embedding model; without one it is refused, with advice.

Owns the thread that computes, one text at a time, and stops when the client disconnects. Each text is computed alone,
so its embedding does not depend on the others of a request.
"""

from __future__ import annotations

import asyncio
import base64
import math
import struct
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from stowage.engine.prompts import Begin, unasked
from stowage.errors import RequestError
from stowage.server.api_errors import ApiError, bad, busy
from stowage.server.apis.reader import Reader
from stowage.server.body_reader import BodyReader
from stowage.server.fields import Fields, parse_object
from stowage.server.limits import Limits
from stowage.server.memory import Reservation
from stowage.server.metrics import ServerMetrics
from stowage.server.middleware import CONTEXT, RequestContext
from stowage.server.served_model import ServedEmbedder
from stowage.server.stream import encoded, send_json, while_connected

EMBEDDINGS: Final = "/v1/embeddings"
TEXTS_MAX: Final = 2048
"""OpenAI's limit for one request."""
_NUMBER_BYTES: Final = 64
"""Memory of one number of an answer, as a Python object and as JSON."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """One request, parsed: `texts` as text or tokens; `packed`: embeddings are answered in base64."""

    texts: tuple[str | list[int], ...]
    dimension: int
    packed: bool


class Embedding:
    """An ASGI application. `generating`: names of the models here that generate text and have no embeddings."""

    def __init__(
        self,
        served: ServedEmbedder,
        generating: Callable[[], Sequence[str]],
        body_reader: BodyReader,
        limits: Limits,
        metrics: ServerMetrics,
    ) -> None:
        self._served, self._generating = served, generating
        self._body_reader, self._limits, self._metrics = body_reader, limits, metrics
        self._computing = ThreadPoolExecutor(1, "stowage-embed")
        self._open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context: RequestContext = scope[CONTEXT]
        if self._open > self._limits.max_queued_requests:
            raise busy(f"{self._open} requests for embeddings wait; try again later.", 1)
        left = threading.Event()
        self._open += 1
        try:
            async with self._body_reader.reserved(context.client) as reservation:
                body = await self._body_reader.read(Request(scope, receive), reservation)
                answer = await while_connected(receive, self._run(lambda: self._answer(body, reservation, left)))
                await send_json(send, 200, answer)
        finally:
            left.set()
            self._open -= 1

    async def _run(self, work: Callable[[], bytes]) -> bytes:
        return await asyncio.get_running_loop().run_in_executor(self._computing, work)

    def _answer(self, body: bytearray, reservation: Reservation, left: threading.Event) -> bytes:
        """On the computing thread. Raises ApiError."""
        asked = self._read(body)
        reservation.take(len(asked.texts) * asked.dimension * _NUMBER_BYTES)
        embedder = self._served.embedder
        data: list[dict[str, Any]] = []
        tokens = 0
        for index, text in enumerate(asked.texts):
            if left.is_set():
                break
            try:
                ids = embedder.tokens_of(text) if isinstance(text, str) else embedder.checked(text)
            except RequestError as error:
                raise bad(f"input {index}: {error}", "input") from error
            tokens += len(ids)
            vector = _cut(embedder.embed(ids), asked.dimension)
            data.append({"object": "embedding", "index": index, "embedding": _written(vector, packed=asked.packed)})
        self._metrics.prompt_tokens.labels(EMBEDDINGS).observe(tokens)
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return encoded({"object": "list", "data": data, "model": self._served.name, "usage": usage})

    def _read(self, body: bytearray) -> _Asked:
        fields = Fields(parse_object(body))
        model = fields.needed_text("model")
        if model in self._generating():
            raise _generates(model)
        if model != self._served.name:
            what = (
                f"The model {model[:200]!r} does not exist here. This server makes vectors with {self._served.name!r}."
            )
            raise ApiError(404, what, param="model", code="model_not_found")
        most = self._served.embedder.dimension
        texts, dimension = _texts(fields.take("input")), fields.whole("dimensions", most, 1, most) or most
        form = fields.text("encoding_format", "float")
        if form not in ("float", "base64"):
            raise bad("'encoding_format' must be 'float' or 'base64'.", "encoding_format")
        fields.without_effect("user")
        fields.finish()
        return _Asked(texts, dimension, form == "base64")


def refuse(reader: Reader, body: bytes | bytearray, begin: Begin = unasked) -> dict[str, Any]:
    """The route of a server that has no embedding model. Raises ApiError."""
    raise _generates(reader.model(Fields(parse_object(body))))


def _generates(model: str) -> ApiError:
    """The error for embeddings of a model that generates text."""
    what = (
        f"The model {model[:200]!r} generates text and has no embeddings. Start the server with --embedding-model DIR: "
        "a checkpoint of sentence-transformers, which has a modules.json."
    )
    return bad(what, "model", "unsupported_model")


def _texts(given: object) -> tuple[str | list[int], ...]:
    """A text, a list of texts, one of tokens, or a list of such. Raises ApiError."""
    if isinstance(given, list) and given and all(type(item) is int for item in given):
        return (given,)
    items = given if isinstance(given, list) else [given]
    if not items or len(items) > TEXTS_MAX:
        raise bad(f"'input' has {len(items)} texts; give 1 to {TEXTS_MAX}.", "input")
    for item in items:
        tokens = isinstance(item, list) and all(type(token) is int for token in item)
        if not tokens and not isinstance(item, str):
            raise bad("'input' must be a text, a list of texts, a list of tokens, or a list of such lists.", "input")
        if item in ("", []):
            raise bad("'input' has an empty text: there is no vector of it.", "input")
        if isinstance(item, str) and any(0xD800 <= ord(character) < 0xE000 for character in item):
            raise bad("'input' has half a surrogate pair, which is no text.", "input")
    return tuple(items)


def _cut(vector: list[float], dimension: int) -> list[float]:
    """The first `dimension` numbers, normalized again where any were cut (Matryoshka embeddings)."""
    if dimension == len(vector):
        return vector
    length = math.sqrt(sum(number * number for number in vector[:dimension]))
    return [number / (length or 1.0) for number in vector[:dimension]]


def _written(vector: list[float], *, packed: bool) -> str | list[float]:
    if packed:
        return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode("ascii")
    return vector


def described(served: ServedEmbedder, created: int) -> dict[str, Any]:
    """Its entry in `/v1/models`."""
    return {
        "id": served.name,
        "object": "model",
        "created": created,
        "owned_by": "stowage",
        "max_model_len": served.embedder.tokens_max,
        "embedding_dimension": served.embedder.dimension,
    }
