"""The routes of the server."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from stowage import __version__
from stowage.engine.request import Delta
from stowage.server import dashboard_page
from stowage.server.api_errors import bad, no_model
from stowage.server.apis import chat, completions, messages, openapi, response_events, responses, tokenization
from stowage.server.apis.answer import Answer, Scores
from stowage.server.apis.generation_request import GenerationRequest
from stowage.server.async_engine import AsyncEngine, Exchange, Read
from stowage.server.auth import ApiKeys
from stowage.server.body_reader import BodyReader
from stowage.server.embedding import EMBEDDINGS, Embedding, described
from stowage.server.embedding import refuse as refuse_embeddings
from stowage.server.limits import Limits
from stowage.server.memory import Reservation, bytes_asked, bytes_encoded, entries
from stowage.server.metrics import CHAT, COMPLETIONS, MESSAGES, RESPONSES, ServerMetrics, tasks
from stowage.server.middleware import CONTEXT, PAGE, STATE, RequestContext, with_middleware
from stowage.server.monitor import Monitor
from stowage.server.request_history import RequestHistory
from stowage.server.stream import DONE, EventStream, encoded, send_json, while_connected, with_keep_alive


def build(
    async_engine: AsyncEngine, keys: ApiKeys, limits: Limits, metrics: ServerMetrics, watch: Monitor, host: str | None
) -> ASGIApp:
    """The application; `host` as in `middleware.with_middleware`."""
    plain = Plain(async_engine, metrics)
    dashboard = Dashboard(watch)
    memory = async_engine.memory
    body_reader, request_history = BodyReader(limits, memory), watch.request_history
    routes = [
        Route(PAGE, dashboard.page),
        Route(STATE, dashboard.state),
        Route("/health", plain.health),
        Route("/version", plain.version),
        Route("/openapi.json", plain.openapi),
        Route("/metrics", plain.metrics),
        Route("/v1/models", plain.models),
        Route("/v1/models/{model:path}", plain.model),
        *(
            Route(route, Generation(api, async_engine, metrics, body_reader, request_history), methods=["POST"])
            for route, api in APIS
        ),
        *(Route(path, Lookup(read, async_engine, body_reader), methods=["POST"]) for path, read in LOOKUPS),
    ]
    embedding = async_engine.served.embedding
    if embedding is not None:
        vectors = Embedding(embedding, plain.names, body_reader, limits, metrics)
        routes.insert(0, Route(EMBEDDINGS, vectors, methods=["POST"]))
    metrics.watch(
        async_engine.stats,
        choices_open=("choices that are served or wait", lambda: async_engine.choices_open),
        choices_limit=("choices that may be open together", lambda: async_engine.max_choices),
        request_memory_bytes=("held for requests: bodies, their reading, answers", lambda: memory.held_bytes),
        request_memory_limit_bytes=("that may be held for requests", lambda: memory.limit_bytes),
        request_memory_refused=("requests that were refused for lack of it", lambda: memory.refused),
        engine_reopened=("times the engine was opened again after a failure", lambda: async_engine.supervisor.reopened),
        server_tasks=("tasks of the server's event loop", tasks(asyncio.get_running_loop())),
    )
    return with_middleware(routes, keys, metrics, async_engine.served.allowed_origins, host)


class Plain:
    """Routes that generate nothing."""

    def __init__(self, async_engine: AsyncEngine, metrics: ServerMetrics) -> None:
        self._async_engine = async_engine
        self._metrics = metrics
        self._created = int(time.time())

    async def health(self, request: Request) -> Response:
        """200 while requests are accepted, and the engine does not hang."""
        status, reopened = self._async_engine.status, self._async_engine.supervisor.reopened
        told = {"status": status} | ({"reopened": reopened} if reopened else {})
        if status == "hanging":
            step_s, hangs_s = self._async_engine.step_s, self._async_engine.hangs_s
            told["reason"] = f"a step of the engine goes on for {step_s:.0f} s, and none may for {hangs_s:.0f} s"
        return JSONResponse(told, 200 if status == "ok" else 503)

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(openapi.described(self._async_engine.name))

    async def metrics(self, request: Request) -> Response:
        return Response(
            await self._async_engine.look(self._metrics.text), headers={"content-type": CONTENT_TYPE_LATEST}
        )

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._described(name) for name in self._listed]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        if name not in self._listed:
            raise no_model(name, self._listed)
        return JSONResponse(self._described(name))

    def names(self) -> tuple[str, ...]:
        """The names of the models that generate: the base model and its adapters."""
        return (self._async_engine.name, *self._async_engine.engine.adapter_names)

    @property
    def _listed(self) -> tuple[str, ...]:
        embedding = self._async_engine.served.embedding
        return (*self.names(), *([] if embedding is None else [embedding.name]))

    def _described(self, name: str) -> dict[str, Any]:
        embedding = self._async_engine.served.embedding
        if embedding is not None and name == embedding.name:
            return described(embedding, self._created)
        return {
            "id": name,
            **({} if name == self._async_engine.name else {"parent": self._async_engine.name}),
            "object": "model",
            "created": self._created,
            "owned_by": "stowage",
            "max_model_len": self._async_engine.tokens_max,
        }


class Dashboard:
    """The page at / and the state that it shows."""

    def __init__(self, watch: Monitor) -> None:
        self._watch = watch
        self._page, self._headers = dashboard_page.load()

    async def page(self, request: Request) -> Response:
        return Response(self._page, headers=self._headers)

    async def state(self, request: Request) -> Response:
        after_s = _seconds(request.query_params.get("after", "0"))
        context: RequestContext = request.scope[CONTEXT]
        return JSONResponse(await self._watch.state(context.tenant, after_s), headers=dashboard_page.PRIVATE)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds):
        raise bad("'after' must be a number of seconds: the `now_s` of an earlier answer.", param="after")
    return seconds


@dataclass(frozen=True, slots=True)
class Api:
    """An API that generates: how its requests are read, and the class of its answers."""

    read: Read[GenerationRequest]
    answer: type[Answer]


APIS: Final = (
    (COMPLETIONS, Api(completions.read, completions.TextAnswer)),
    (CHAT, Api(chat.read, chat.ChatAnswer)),
    (MESSAGES, Api(messages.read, messages.MessageAnswer)),
    (RESPONSES, Api(responses.read, response_events.ResponseAnswer)),
)


LOOKUPS: Final[tuple[tuple[str, Read[dict[str, Any]]], ...]] = (
    (MESSAGES + "/count_tokens", messages.count),
    (EMBEDDINGS, refuse_embeddings),
    ("/tokenize", tokenization.tokenize),
    ("/detokenize", tokenization.detokenize),
)


@dataclass(frozen=True, slots=True)
class Generation:
    """One API that generates: an ASGI application."""

    api: Api
    async_engine: AsyncEngine
    metrics: ServerMetrics
    body_reader: BodyReader
    request_history: RequestHistory

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context: RequestContext = scope[CONTEXT]
        self.async_engine.refuse_if_full()
        async with self.body_reader.reserved(context.client) as reservation:
            body = await self.body_reader.read(Request(scope, receive), reservation)
            request = await while_connected(receive, self.async_engine.read(self.api.read, body, reservation))
            del body
            reservation.shrink(bytes_asked(request))
            await while_connected(receive, self._serve(request, context, send, reservation))

    async def _serve(
        self, request: GenerationRequest, context: RequestContext, send: Send, reservation: Reservation
    ) -> None:
        self.metrics.prompt_tokens.labels(context.route).observe(request.prompt_tokens)
        exchange = await self.async_engine.open(request, context.tenant.salt(request.cache_salt), reservation)
        self.request_history.begin(context, exchange)
        try:
            answer = self.api.answer(request, exchange.vocabulary, exact=exchange.exact)
            await (self._stream if request.stream else self._whole)(exchange, answer, context, send)
        finally:
            exchange.close()

    async def _whole(self, exchange: Exchange, answer: Answer, context: RequestContext, send: Send) -> None:
        logprobs = characters = 0
        async for _, delta in self._pieces(exchange, answer, context):
            logprobs += entries(delta.logprobs) + entries(delta.prompt_logprobs)
            characters += len(delta.text)
        exchange.reservation.take(bytes_encoded(logprobs, characters))
        await send_json(send, 200, await self.async_engine.run(lambda: encoded(answer.whole(exchange.scores))))

    async def _stream(self, exchange: Exchange, answer: Answer, context: RequestContext, send: Send) -> None:
        events = context.events = EventStream(send, answer.failure)
        await events.begin()
        for name, opening in answer.opening():
            await events.event(encoded(opening), name)
        request, pieces = exchange.request, self._pieces(exchange, answer, context)
        while (piece := await with_keep_alive(lambda: anext(pieces, None), events.keep_alive)) is not None:
            choice, delta = piece
            scores = exchange.scores.get(choice // request.n, ())
            if scores:  # with prompt log-probabilities a piece may be long to encode
                found = await self.async_engine.run(partial(_events, answer, choice, delta, scores))
            else:
                found = _events(answer, choice, delta, ())
            for name, event in found:
                await events.event(event, name)
        for name, last in answer.closing():
            await events.event(encoded(last), name)
        await events.end(DONE if answer.done_event else b"")

    async def _pieces(
        self, exchange: Exchange, answer: Answer, context: RequestContext
    ) -> AsyncIterator[tuple[int, Delta]]:
        """The exchange's pieces. Updates the counters, and tells the answer which choices have ended."""
        async for choice, delta in exchange.pieces():
            if context.first_token_s is None:
                context.first_token_s = context.seconds
                self.metrics.first_token.labels(context.route).observe(context.first_token_s)
            if delta.completion is not None:
                answer.ended(choice, delta.completion)
                self.metrics.observe_choice(context.route, exchange.request, choice, delta.completion)
            yield choice, delta


def _events(answer: Answer, choice: int, delta: Delta, scores: Scores) -> list[tuple[str, bytes]]:
    return [(name, encoded(value)) for name, value in answer.events(choice, delta, scores)]


@dataclass(frozen=True, slots=True)
class Lookup:
    """A route that generates nothing: an ASGI application. `read` parses the body and returns the answer."""

    read: Read[dict[str, Any]]
    async_engine: AsyncEngine
    body_reader: BodyReader

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context: RequestContext = scope[CONTEXT]
        async with self.body_reader.reserved(context.client) as reservation:
            body = await self.body_reader.read(Request(scope, receive), reservation)
            found = await while_connected(receive, self.async_engine.read(self.read, body, reservation))
            await send_json(send, 200, await self.async_engine.run(lambda: encoded(found)))
