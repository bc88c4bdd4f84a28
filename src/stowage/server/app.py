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
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from stowage import __version__
from stowage.engine.engine import Delta
from stowage.server import page
from stowage.server.apis import (
    chat,
    completions,
    embeddings,
    messages,
    openapi,
    response_events,
    responses,
    tokenization,
)
from stowage.server.apis.answer import Answer, Scores
from stowage.server.apis.ask import Ask
from stowage.server.auth import ApiKeys
from stowage.server.bodies import Bodies, took_too_long
from stowage.server.bridge import Bridge, Exchange, Read
from stowage.server.counts import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Counts, tasks
from stowage.server.embedding import EMBEDDINGS, Embedding, described
from stowage.server.front import PAGE, STATE, VISIT, Front, Visit
from stowage.server.journal import Journal
from stowage.server.limits import Limits
from stowage.server.memory import Reservation, bytes_asked, bytes_encoded, bytes_to_read, entries
from stowage.server.refusal import bad, no_model
from stowage.server.stream import DONE, Events, encoded, patiently, send_json, while_connected
from stowage.server.watch import Watch


def build(bridge: Bridge, keys: ApiKeys, limits: Limits, counts: Counts, watch: Watch, host: str | None) -> ASGIApp:
    """The application. `host` is the name that the server listens under; None: it may be asked under any name."""
    plain = Plain(bridge, counts)
    dashboard = Dashboard(watch)
    bodies, journal = Bodies(limits), watch.journal
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
            Route(route, Generation(api, bridge, limits, counts, bodies, journal), methods=["POST"])
            for route, api in APIS
        ),
    ]
    routes += [Route(path, Lookup(read, bridge, limits, bodies), methods=["POST"]) for path, read in LOOKUPS]
    embedding = bridge.served.embedding
    if embedding is not None:
        routes.insert(
            0, Route(EMBEDDINGS, Embedding(embedding, plain.names, bridge.memory, limits, counts), methods=["POST"])
        )
    loop = asyncio.get_running_loop()
    counts.watch(
        bridge.stats,
        choices_open=("choices that are served or wait", lambda: bridge.choices_open),
        choices_limit=("choices that may be open together", lambda: bridge.max_choices),
        request_memory_bytes=("held for requests: bodies, their reading, answers", lambda: bridge.memory.held_bytes),
        request_memory_limit_bytes=("that may be held for requests", lambda: bridge.memory.limit_bytes),
        request_memory_refused=("requests that were refused for lack of it", lambda: bridge.memory.refused),
        engine_reopened=("times the engine was opened again after a failure", lambda: bridge.engines.reopened),
        server_tasks=("tasks of the server's event loop", tasks(loop)),
    )
    router = Router(routes, redirect_slashes=False)
    front = Front(router, keys, counts, [route.path for route in routes], host)
    if not bridge.served.allowed_origins:
        return front
    methods, shown = ("GET", "POST"), ("x-request-id", "retry-after")
    origins = bridge.served.allowed_origins
    return CORSMiddleware(
        front, allow_origins=origins, allow_methods=methods, allow_headers=("*",), expose_headers=shown
    )


class Plain:
    """Routes that compute nothing."""

    def __init__(self, bridge: Bridge, counts: Counts) -> None:
        self._bridge = bridge
        self._counts = counts
        self._created = int(time.time())

    async def health(self, request: Request) -> Response:
        """200 while requests are taken in."""
        status, reopened = self._bridge.status, self._bridge.engines.reopened
        told = {"status": status} | ({"reopened": reopened} if reopened else {})
        return JSONResponse(told, 200 if status == "ok" else 503)

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(openapi.described(self._bridge.name))

    async def metrics(self, request: Request) -> Response:
        return Response(await self._bridge.look(self._counts.text), headers={"content-type": CONTENT_TYPE_LATEST})

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._described(name) for name in self._listed]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        if name not in self._listed:
            raise no_model(name, self._listed)
        return JSONResponse(self._described(name))

    def names(self) -> tuple[str, ...]:
        """Of what generates."""
        return (self._bridge.name, *self._bridge.engine.adapter_names)

    @property
    def _listed(self) -> tuple[str, ...]:
        embedding = self._bridge.served.embedding
        return (*self.names(), *([] if embedding is None else [embedding.name]))

    def _described(self, name: str) -> dict[str, Any]:
        embedding = self._bridge.served.embedding
        if embedding is not None and name == embedding.name:
            return described(embedding, self._created)
        return {
            "id": name,
            **({} if name == self._bridge.name else {"parent": self._bridge.name}),
            "object": "model",
            "created": self._created,
            "owned_by": "stowage",
            "max_model_len": self._bridge.tokens_max,
        }


class Dashboard:
    """The page at /, and what it shows."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._page, self._headers = page.load()

    async def page(self, request: Request) -> Response:
        return Response(self._page, headers=self._headers)

    async def state(self, request: Request) -> Response:
        after_s = _seconds(request.query_params.get("after", "0"))
        visit: Visit = request.scope[VISIT]
        return JSONResponse(await self._watch.state(visit.tenant, after_s), headers=page.PRIVATE)


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
    """One that generates: how its requests are read, and what answers them."""

    read: Read[Ask]
    answer: type[Answer]


APIS: Final = (
    (COMPLETIONS, Api(completions.read, completions.TextAnswer)),
    (CHAT, Api(chat.read, chat.ChatAnswer)),
    (MESSAGES, Api(messages.read, messages.MessageAnswer)),
    (RESPONSES, Api(responses.read, response_events.ResponseAnswer)),
)


LOOKUPS: Final[tuple[tuple[str, Read[dict[str, Any]]], ...]] = (
    (MESSAGES + "/count_tokens", messages.count),
    (EMBEDDINGS, embeddings.read),
    ("/tokenize", tokenization.tokenize),
    ("/detokenize", tokenization.detokenize),
)


class Generation:
    """One API that generates: an ASGI application."""

    def __init__(
        self, api: Api, bridge: Bridge, limits: Limits, counts: Counts, bodies: Bodies, journal: Journal
    ) -> None:
        self._api = api
        self._bridge = bridge
        self._limits = limits
        self._counts = counts
        self._bodies = bodies
        self._journal = journal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        visit: Visit = scope[VISIT]
        self._bridge.refuse_if_full()
        hold = Reservation(self._bridge.memory, visit.client)
        try:
            async with asyncio.timeout(self._limits.request_timeout_s):
                body = await self._bodies.read(Request(scope, receive), hold)
                hold.take(bytes_to_read(body))
                ask = await while_connected(receive, self._bridge.read(self._api.read, body, hold))
                del body
                hold.shrink(bytes_asked(ask))
                await while_connected(receive, self._serve(ask, visit, send, hold))
        except TimeoutError as error:
            raise took_too_long(self._limits) from error
        finally:
            hold.close()

    async def _serve(self, ask: Ask, visit: Visit, send: Send, hold: Reservation) -> None:
        self._counts.asked(visit.route, ask)
        exchange = await self._bridge.open(ask, visit.tenant.salt(ask.cache_salt), hold)
        self._journal.begin(visit, exchange)
        try:
            answer = self._api.answer(ask, exchange.vocabulary, exact=exchange.exact)
            await (self._stream if ask.stream else self._whole)(exchange, answer, visit, send)
        finally:
            exchange.close()

    async def _whole(self, exchange: Exchange, answer: Answer, visit: Visit, send: Send) -> None:
        logprobs = characters = 0
        async for _, delta in self._pieces(exchange, answer, visit):
            logprobs += entries(delta.logprobs) + entries(delta.prompt_logprobs)
            characters += len(delta.text)
        exchange.hold.take(bytes_encoded(logprobs, characters))
        await send_json(send, 200, await self._bridge.run(lambda: encoded(answer.whole(exchange.scores))))

    async def _stream(self, exchange: Exchange, answer: Answer, visit: Visit, send: Send) -> None:
        events = visit.events = Events(send, answer.failure)
        await events.begin()
        for name, opening in answer.opening():
            await events.event(encoded(opening), name)
        ask, pieces = exchange.ask, self._pieces(exchange, answer, visit)
        while (piece := await patiently(lambda: anext(pieces, None), events.still_there)) is not None:
            choice, delta = piece
            scores = exchange.scores.get(choice // ask.n, ())
            if scores:  # with them a piece may be long
                found = await self._bridge.run(partial(_events, answer, choice, delta, scores))
            else:
                found = _events(answer, choice, delta, ())
            for name, event in found:
                await events.event(event, name)
        for name, last in answer.closing():
            await events.event(encoded(last), name)
        await events.end(DONE if answer.done_event else b"")

    async def _pieces(self, exchange: Exchange, answer: Answer, visit: Visit) -> AsyncIterator[tuple[int, Delta]]:
        """The exchange's pieces; notes in passing what is counted, and which choices have ended."""
        async for choice, delta in exchange.pieces():
            if visit.first_token_s is None:
                visit.first_token_s = visit.seconds
                self._counts.first_token.labels(visit.route).observe(visit.first_token_s)
            if delta.completion is not None:
                answer.ended(choice, delta.completion)
                self._counts.ended(visit.route, exchange.ask, choice, delta.completion)
            yield choice, delta


def _events(answer: Answer, choice: int, delta: Delta, scores: Scores) -> list[tuple[str, bytes]]:
    return [(name, encoded(value)) for name, value in answer.events(choice, delta, scores)]


class Lookup:
    """A question that is answered without the engine: an ASGI application. `read` understands the body and answers."""

    def __init__(self, read: Read[dict[str, Any]], bridge: Bridge, limits: Limits, bodies: Bodies) -> None:
        self._read = read
        self._bridge = bridge
        self._limits = limits
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        visit: Visit = scope[VISIT]
        hold = Reservation(self._bridge.memory, visit.client)
        try:
            async with asyncio.timeout(self._limits.request_timeout_s):
                body = await self._bodies.read(Request(scope, receive), hold)
                hold.take(bytes_to_read(body))
                found = await while_connected(receive, self._bridge.read(self._read, body, hold))
                await send_json(send, 200, await self._bridge.run(lambda: encoded(found)))
        except TimeoutError as error:
            raise took_too_long(self._limits) from error
        finally:
            hold.close()
