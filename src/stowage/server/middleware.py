"""The middleware around all routes: request ids, API keys, the host check, metrics, the log line and error answers.

What a route raises ends here as an error answer; the server goes on.
"""

from __future__ import annotations

import difflib
import ipaddress
import logging
import re
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote

from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stowage.server.api_errors import ApiError, anthropic_body, bad, encoded_error, internal
from stowage.server.auth import ApiKeys, Tenant
from stowage.server.metrics import CLIENT_LEFT, MESSAGES, ServerMetrics
from stowage.server.stream import ClientDisconnected, EventStream, send_json

logger = logging.getLogger("stowage.server")
OPEN_TO_ALL: Final = "/health"
PAGE: Final = "/"
STATE: Final = "/v1/stowage/state"
FOR_BROWSERS: Final = (PAGE, STATE)
"""Routes that accept a key as the password of HTTP Basic. A browser sends that by itself, even for a request that a
page of another origin makes; so these routes change nothing, and let no other origin read their answers.
"""
_ABSOLUTE: Final = re.compile(rb"https?://([^/]+)", re.IGNORECASE)
CONTEXT: Final = "stowage.request"


@dataclass(slots=True)
class RequestContext:
    """What the middleware tells routes about one request, and what they record about it."""

    route: str
    id: str
    tenant: Tenant
    began_s: float
    peer: str = ""
    """The client's address."""
    status: int = 0
    events: EventStream | None = None
    """The answer's event stream, once it has begun."""
    first_token_s: float | None = None
    error: int = 0
    """The status of the error that the request ended with, also where a stream had begun; 0: none."""
    on_end: Callable[[], None] | None = None
    """Called after the request has ended."""

    @property
    def client(self) -> str:
        """Identifies the client for fair queueing: its key, or else its address."""
        return self.tenant.secret.hex() or self.peer

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began_s


def with_middleware(
    routes: Sequence[Route], keys: ApiKeys, metrics: ServerMetrics, origins: Sequence[str], host: str | None
) -> ASGIApp:
    """The application of ``routes``. ``origins``: of web pages that may call it. ``host``: the name that the server
    listens under; None: any `Host` header is accepted.
    """
    router = Router(list(routes), redirect_slashes=False)
    app = Middleware(router, keys, metrics, [route.path for route in routes], host)
    if not origins:
        return app
    exposed = ("x-request-id", "retry-after")
    return CORSMiddleware(app, origins, allow_methods=("GET", "POST"), allow_headers=("*",), expose_headers=exposed)


class Middleware:
    """An ASGI application around another."""

    def __init__(
        self, app: ASGIApp, keys: ApiKeys, metrics: ServerMetrics, routes: Sequence[str], host: str | None
    ) -> None:
        self._app = app
        self._keys = keys
        self._metrics = metrics
        self._routes = routes
        self._host = host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "neither websockets nor lifespan are switched on"
        _to_origin_form(scope)
        scope["app"] = self  # so that the router raises what it refuses
        identity = "req-" + secrets.token_hex(12)
        context = scope[CONTEXT] = RequestContext(
            self._route(scope["path"]), identity, Tenant(), time.monotonic(), (scope["client"] or ("",))[0]
        )

        async def note(message: Message) -> None:
            if message["type"] == "http.response.start":
                context.status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", identity.encode())]
            await send(message)

        try:
            await self._enter(scope, receive, note, context)
        finally:
            self._metrics.observe_request(context.route, context.status or CLIENT_LEFT, context.seconds)
            self._log(scope["method"], context)
            if context.on_end is not None:
                context.on_end()

    async def _enter(self, scope: Scope, receive: Receive, send: Send, context: RequestContext) -> None:
        try:
            headers = dict(scope["headers"])
            if context.route != OPEN_TO_ALL:
                self._check_host(headers.get(b"host"))
                if sum(name == b"authorization" for name, _ in scope["headers"]) > 1:
                    raise bad("The header 'authorization' was given more than once: send one key.", code="invalid_http")
                given = headers.get(b"authorization")
                if given is None and b"x-api-key" in headers:  # as Anthropic's clients send it
                    given = b"Bearer " + headers[b"x-api-key"]
                context.tenant = self._who(given, context.route, scope["method"])
            await self._app(scope, receive, send)
        except ApiError as error:
            await self._answer(send, context, error)
        except HTTPException as error:
            await self._answer(send, context, self._refusal(error, scope))
        except ClientDisconnected:
            context.status = context.error = CLIENT_LEFT
        except Exception:  # the request's outermost frame: a bug; its client is told, the server lives on
            logger.exception("a request failed", extra={"stowage_event": "fault"})
            await self._answer(send, context, internal())

    async def _answer(self, send: Send, context: RequestContext, error: ApiError) -> None:
        context.error = error.status
        if context.events is not None:
            await context.events.fail(error)
        elif not context.status:
            body = anthropic_body(error) if context.route.startswith(MESSAGES) else error.body
            await send_json(send, error.status, encoded_error(body), error.headers)

    def _who(self, authorization: bytes | None, route: str, method: str) -> Tenant:
        tenant = self._keys.tenant(authorization, basic=route in FOR_BROWSERS and method in ("GET", "HEAD"))
        if tenant is None:
            what = "Incorrect API key provided." if authorization else "You did not provide an API key."
            how = "Send it in the header 'authorization: Bearer KEY'."
            challenge = "Bearer"
            if route == PAGE:  # only for the page itself may a browser ask its user for a password
                how = "In a browser: any user name, and the key as the password."
                challenge = 'Basic realm="Stowage: an API key as the password", charset="UTF-8"'
            raise ApiError(401, f"{what} {how}", code="invalid_api_key", headers={"www-authenticate": challenge})
        return tenant

    def _check_host(self, host: bytes | None) -> None:
        """Protects a server without keys from DNS rebinding, where a web page's own host name resolves to this machine:
        only addresses, `localhost` and the name that the server listens under are served.
        """
        if len(self._keys) or host is None or self._host is None:
            return
        name = host.decode("latin-1").rsplit(":", 1)[0] if not host.endswith(b"]") else host.decode("latin-1")
        if name.lower() in ("localhost", self._host.lower()) or _is_address(name):
            return
        raise ApiError(
            403,
            "Without API keys this server is asked by its address, or as localhost, and by no other name; with "
            "--api-key-file by any.",
            code="host_not_allowed",
        )

    def _route(self, path: str) -> str:
        """The route as a label: one of a fixed list."""
        if path in self._routes:
            return path
        return "/v1/models/{model}" if path.startswith("/v1/models/") else "other"

    def _refusal(self, error: HTTPException, scope: Scope) -> ApiError:
        """The router's own errors: no such route, no such method."""
        path, what = scope["path"], error.detail
        if error.status_code == 404:
            near = difflib.get_close_matches("/v1" + path.removeprefix("/v1")[:80], self._routes, n=1, cutoff=0.75)
            advice = f"Did you mean {near[0]}?" if near else "/openapi.json lists all there are."
            what = f"There is no route {path[:80]}. {advice}"
        elif error.status_code == 405:
            methods = " or ".join(sorted((error.headers or {})["Allow"].split(", ")))
            what = f"{path[:80]} is asked with {methods}, not with {scope['method']}."
        return ApiError(error.status_code, what, headers=error.headers)

    def _log(self, method: str, context: RequestContext) -> None:
        """Logs no prompts, keys or client's paths. The dashboard's requests, one a second, are debug lines."""
        known = method if method in ("GET", "HEAD", "POST") else "other"
        fields = {"method": known, "route": context.route, "status": context.status or CLIENT_LEFT, "id": context.id}
        fields["seconds"] = round(context.seconds, 3)
        told = " ".join(f"{name}={value}" for name, value in fields.items())
        extra = {"stowage_event": "request", "stowage_text": "a request has ended", "stowage_fields": fields}
        level = logging.DEBUG if context.route == STATE and context.status == 200 else logging.INFO
        logger.log(level, "a request has ended (%s)", told, extra=extra)


def _to_origin_form(scope: Scope) -> None:
    """Take a URI in the request line for its path, and its host for the header `Host` (RFC 9112, section 3.2.2)."""
    found = _ABSOLUTE.match(scope["raw_path"])
    if found is None:
        return
    scope["raw_path"] = scope["raw_path"][found.end() :] or b"/"
    scope["path"] = unquote(scope["raw_path"].decode("ascii"))
    others = [(name, value) for name, value in scope["headers"] if name != b"host"]
    scope["headers"] = [*others, (b"host", found[1])]


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
