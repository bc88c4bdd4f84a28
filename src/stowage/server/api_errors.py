"""Error answers: HTTP status, and the error object that OpenAI clients read.

{"error": {"message": "...", "type": "invalid_request_error", "param": "top_p", "code": null}}
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from stowage.errors import RequestError

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(RequestError):
    """An error answer. `message` is for the author of the request: what is wrong, and how to mend it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def encoded(self) -> bytes:
        return encoded_error(self.body)


def encoded_error(body: Mapping[str, Any]) -> bytes:
    """The body of an error answer, as JSON."""
    return json.dumps(body).encode("ascii")


def anthropic_body(error: ApiError) -> dict[str, Any]:
    """The error object that Anthropic's clients read."""
    kinds = {413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error"}
    kind = kinds.get(error.status) or _TYPES.get(error.status)
    kind = kind or ("api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def bad(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: a field that cannot be used."""
    return ApiError(400, message, param=param, code=code)


def no_model(name: str, names: Iterable[str]) -> ApiError:
    """404: `names` are the models that there are."""
    what = f"The model {name[:200]!r} does not exist here. This server has {', '.join(map(repr, names))}."
    return ApiError(404, what, param="model", code="model_not_found")


def busy(message: str, retry_after_s: int) -> ApiError:
    """429: the request itself is valid, and clients retry it by themselves."""
    headers = {"retry-after": str(retry_after_s)}
    return ApiError(429, message, code="rate_limit_exceeded", headers=headers)


def stopping() -> ApiError:
    headers = {"retry-after": "5", "connection": "close"}
    return ApiError(503, "The server is shutting down; try again later.", code="shutting_down", headers=headers)


def reopening() -> ApiError:
    what = "The engine has failed and is being opened again; try again later."
    return ApiError(503, what, code="reopening", headers={"retry-after": "5"})


def internal() -> ApiError:
    return ApiError(500, "The server failed to answer this request; its log says why.", code="internal_error")
