"""``stowage top [URL]``: what a server's dashboard shows, in a terminal."""

import ipaddress
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from stowage.cli.options import Json, with_settings
from stowage.cli.output import WIDTH_PIPED, print_json
from stowage.config.settings import Settings
from stowage.errors import ConfigError, StowageError

if TYPE_CHECKING:
    from urllib.request import OpenerDirector

_PATH = "/v1/stowage/state"
_TIMEOUT_S = 10.0
_ANSWER_BYTES_MAX = 64 << 20
_INTERVAL_S_LEAST = 0.1
_BACKOFF_S_MOST = 15.0
_EXAMPLE = "http://127.0.0.1:8000"


@with_settings("api_key_file")
def top(
    url: Annotated[str, typer.Argument(metavar="[URL]", help="The server's address.")] = _EXAMPLE,
    *,
    settings: Settings,
    interval: Annotated[float, typer.Option("--interval", metavar="SECONDS", help="Time between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Show one frame and end; so does a pipe.")] = False,
    json: Json = False,
) -> None:
    """Watch a server: memory, requests and where their prefixes came from, transfers. Ctrl-C ends it."""
    if not interval >= _INTERVAL_S_LEAST:
        raise ConfigError(f"--interval {interval:g} is too short: it must be {_INTERVAL_S_LEAST:g} s or more.")
    server = Server(url, _key(settings["api_key_file"]))
    state = server.state()
    if json:
        print_json(state)
    elif once or not sys.stdout.isatty():
        _print_once(server, state)
    else:
        _watch(server, state, interval)


class Server:
    """A server that is asked what it does. Raises StowageError, whose text says why and what to do."""

    def __init__(self, url: str, key: str) -> None:
        self.url = _base(url)
        self._key = key
        self._opener = _opener(self.url)

    def state(self) -> dict[str, Any]:
        """Its picture of itself, as docs/serving.md lists it."""
        import json
        from http.client import HTTPException
        from urllib.error import HTTPError
        from urllib.request import Request

        request = Request(self.url + _PATH)
        if self._key:  # not for whoever it may be redirected to
            request.add_unredirected_header("authorization", f"Bearer {self._key}")
        try:
            with self._opener.open(request, timeout=_TIMEOUT_S) as answer:
                state = json.loads(answer.read(_ANSWER_BYTES_MAX))
        except HTTPError as error:
            raise self._refused(error.code) from error
        except (OSError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            why = getattr(reason, "strerror", None) or reason
            raise StowageError(
                f"No server answers at {self.url} ({why}). Start one with: stowage serve MODEL. "
                "If it listens elsewhere, name it: stowage top http://HOST:PORT"
            ) from error
        except ValueError as error:
            raise self._strange() from error
        if not isinstance(state, dict):
            raise self._strange()
        return state

    def frame(self, state: dict[str, Any], before: dict[str, Any] | None, **how: Any) -> Any:
        """The state as rich shows it."""
        from stowage.cli.frame import frame

        try:
            return frame(state, before, **how)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise self._strange() from error

    def _refused(self, status: int) -> StowageError:
        if status == 401:
            what = "does not know this API key" if self._key else "wants an API key"
            return ConfigError(f"The server at {self.url} {what}. Give --api-key-file FILE, or set STOWAGE_API_KEYS.")
        if status == 403:
            return ConfigError(f"The server at {self.url} is asked by its address, or as localhost: use such a URL.")
        if status == 404:
            return self._strange()
        return StowageError(f"The server at {self.url} answered with status {status}; its log may say why.")

    def _strange(self) -> StowageError:
        return StowageError(
            f"What answers at {self.url} is no `stowage serve` that this version understands. Check the address, and "
            f"{self.url}/version."
        )


def _print_once(server: Server, state: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else WIDTH_PIPED, highlight=False)
    console.print(server.frame(state, None, width=console.width, plain=_plain(console.encoding)))


def _watch(server: Server, state: dict[str, Any], interval_s: float) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    before, trouble, failures = None, "", 0
    with suppress(KeyboardInterrupt), Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            how = {"width": console.width, "height": console.height, "plain": _plain(console.encoding)}
            live.update(server.frame(state, before, trouble=trouble, **how), refresh=True)
            time.sleep(min(_BACKOFF_S_MOST, interval_s * 2**failures))
            try:
                state, before, trouble, failures = server.state(), state, "", 0
            except StowageError as error:
                trouble, failures = str(error), min(failures + 1, 10)


def _plain(encoding: str) -> bool:
    """Whether bars must be made of ASCII."""
    return not encoding.lower().startswith("utf")


def _key(path: str) -> str:
    """The first key of the variable or the file; empty: none."""
    from stowage.server.auth import read

    keys = read(Path(path).expanduser().absolute() if path else None, os.environ)
    return keys[0] if keys else ""


def _base(url: str) -> str:
    """The address without a path of the API. Raises ConfigError."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        usable = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        usable = False
    if not usable or parts.query or parts.fragment or not url.isprintable():
        raise ConfigError(f"{url!r} is no address of a server. Write it as {_EXAMPLE}.")
    if "@" in parts.netloc:
        raise ConfigError("An API key does not belong into the address. Give --api-key-file FILE.")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1').rstrip('/')}"


def _opener(url: str) -> "OpenerDirector":
    """Asks this machine directly, and others as the environment says (http_proxy)."""
    from urllib.request import ProxyHandler, build_opener

    host = urlsplit(url).hostname or ""
    try:
        here = ipaddress.ip_address(host).is_loopback
    except ValueError:
        here = host == "localhost"
    return build_opener(ProxyHandler({})) if here else build_opener()
