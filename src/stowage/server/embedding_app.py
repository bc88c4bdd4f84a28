"""The routes of a server that has an embedding model and no other."""

from __future__ import annotations

import time
from typing import Final

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from stowage import __version__
from stowage.server.api_errors import bad, no_model
from stowage.server.auth import ApiKeys
from stowage.server.body_reader import BodyReader
from stowage.server.embedding import EMBEDDINGS, Embedding, described
from stowage.server.limits import Limits
from stowage.server.memory import RequestMemory
from stowage.server.metrics import GENERATION, ServerMetrics
from stowage.server.middleware import with_middleware
from stowage.server.served_model import ServedEmbedder

_MODEL: Final = "/v1/models/{model:path}"


def build(
    served: ServedEmbedder,
    keys: ApiKeys,
    limits: Limits,
    metrics: ServerMetrics,
    origins: tuple[str, ...],
    host: str | None,
) -> ASGIApp:
    """The application; `host` as in `app.build`."""
    entry = described(served, int(time.time()))

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def version(request: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def scrape(request: Request) -> Response:
        return Response(metrics.text(), headers={"content-type": CONTENT_TYPE_LATEST})

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [entry]})

    async def model(request: Request) -> Response:
        name = request.path_params["model"]
        if name != served.name:
            raise no_model(name, (served.name,))
        return JSONResponse(entry)

    async def generate(request: Request) -> Response:
        what = f"{served.name!r} makes vectors and generates no text: ask {EMBEDDINGS}, or a server of another model."
        raise bad(what, "model", "unsupported_model")

    plain = {"/health": health, "/version": version, "/metrics": scrape, "/v1/models": models, _MODEL: model}
    body_reader = BodyReader(limits, RequestMemory(limits.request_bytes_max))
    making = Embedding(served, lambda: (), body_reader, limits, metrics)
    routes = [Route(path, found) for path, found in plain.items()]
    routes += [Route(path, generate, methods=["POST"]) for path in GENERATION]
    routes.append(Route(EMBEDDINGS, making, methods=["POST"]))
    return with_middleware(routes, keys, metrics, origins, host)
