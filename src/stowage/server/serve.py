"""Runs the server until it is told to stop, and shuts it down in order.

    signal ── no new connections or requests ── running requests end, at most shutdown_timeout_s ── the others get an
              error ── the engine's owner closes it, which writes its cached chunks to its tiers

A second signal ends the process at once. When the engine has failed and may not be opened again, the server shuts down
the same way, and `serve` returns False.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import uvicorn
from starlette.types import ASGIApp

from stowage.errors import ConfigError
from stowage.server import embedding_app
from stowage.server.api_errors import stopping
from stowage.server.app import build
from stowage.server.async_engine import AsyncEngine
from stowage.server.auth import ApiKeys
from stowage.server.connections import protocol
from stowage.server.limits import Limits
from stowage.server.listen import ListenAddress, cannot_listen
from stowage.server.metrics import ServerMetrics
from stowage.server.monitor import Monitor
from stowage.server.served_model import ServedEmbedder, ServedModel
from stowage.server.supervisor import EngineSupervisor

logger = logging.getLogger("stowage.server")
_BACKLOG: Final = 512
_LAST_WORDS_S: Final = 2.0
"""Time to send clients the error that their requests will not be finished."""
_TICK_S: Final = 0.02
_FILES: Final = 1024
"""Open files besides connections, at most: of the disk tier, of weights, of shared stores."""
_TOLD_S: Final = 60.0
_LOOK_S: Final = 0.2
"""How often the engine is asked whether it has failed."""


def serve(
    supervisor: EngineSupervisor,
    served: ServedModel,
    address: ListenAddress,
    limits: Limits,
    keys: ApiKeys,
    ready: Callable[[], None],
) -> bool:
    """Serve until SIGINT, SIGTERM, SIGHUP, or until the engine has failed and no other may be opened: then False. Calls
    `ready` once requests are accepted. Raises ConfigError. To be called on the main thread, which gets the signals.
    """

    async def until_signal() -> bool:
        return await run(supervisor, served, address, limits, keys, _signalled(), ready)

    return asyncio.run(until_signal())


def serve_embeddings(
    served: ServedEmbedder,
    origins: tuple[str, ...],
    address: ListenAddress,
    limits: Limits,
    keys: ApiKeys,
    ready: Callable[[], None],
) -> None:
    """`serve` for an embedding model alone. Raises ConfigError."""

    async def until_signal() -> None:
        stop, guarded = _signalled(), len(keys) or address.loopback
        app = embedding_app.build(served, keys, limits, ServerMetrics(), origins, address.host if guarded else None)
        server = _server(app, limits)
        running = asyncio.create_task(server.serve(sockets=[address.socket]))
        if await _started(server, running, ready):
            await asyncio.wait({running, asyncio.create_task(stop.wait())}, return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        if not (await asyncio.wait({running}, timeout=limits.shutdown_timeout_s))[0]:
            server.force_exit = True
        await running

    try:
        asyncio.run(until_signal())
    except OSError as error:
        raise ConfigError(cannot_listen(address.text, error)) from error


def _signalled() -> asyncio.Event:
    """Set by the first signal."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
        numbers.append(signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, _first_signal, loop, stop, numbers)
    return stop


def _first_signal(loop: asyncio.AbstractEventLoop, stop: asyncio.Event, numbers: list[signal.Signals]) -> None:
    for number in numbers:
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_DFL)
    stop.set()


async def run(
    supervisor: EngineSupervisor,
    served: ServedModel,
    address: ListenAddress,
    limits: Limits,
    keys: ApiKeys,
    stop: asyncio.Event,
    ready: Callable[[], None],
) -> bool:
    """`serve` without signals, until `stop` is set."""
    async_engine, metrics = AsyncEngine(supervisor, served, limits), ServerMetrics()
    watch = Monitor(async_engine, metrics)
    guarded = len(keys) or address.loopback
    app = build(async_engine, keys, limits, metrics, watch, address.host if guarded else None)
    server = _server(app, limits)
    running = asyncio.create_task(server.serve(sockets=[address.socket]))
    sampling = asyncio.create_task(watch.sample_for_ever())
    try:
        if await _started(server, running, ready):
            while await _fails(supervisor, running, stop) and await _reopened(async_engine):
                pass
        await _stop(server, running, async_engine, limits)
    except OSError as error:
        raise ConfigError(cannot_listen(address.text, error)) from error
    finally:
        sampling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sampling
        async_engine.close()
    return not supervisor.failed


async def _started(server: uvicorn.Server, running: asyncio.Task[None], ready: Callable[[], None]) -> bool:
    """Wait until requests are accepted, and say so; False where the server has ended before."""
    while not server.started and not running.done():
        await asyncio.sleep(_TICK_S)
    if server.started:
        ready()
    return server.started


async def _fails(supervisor: EngineSupervisor, running: asyncio.Task[None], stop: asyncio.Event) -> bool:
    """Wait for the end of the server; returns whether the engine has failed and another may be opened."""
    ends = {asyncio.create_task(stop.wait()), asyncio.create_task(_failure(supervisor))}
    await asyncio.wait({running, *ends}, return_when=asyncio.FIRST_COMPLETED)
    for end in ends:
        end.cancel()
    return supervisor.failed and supervisor.left > 0 and not stop.is_set() and not running.done()


async def _failure(supervisor: EngineSupervisor) -> None:
    while not supervisor.failed:
        await asyncio.sleep(_LOOK_S)


async def _reopened(async_engine: AsyncEngine) -> bool:
    """Replace the failed engine; False where that fails."""
    try:
        await async_engine.reopen()
    except Exception:  # whatever it is, the server ends, and its log says why
        logger.exception("another engine cannot be opened", extra={"stowage_event": "fault"})
        return False
    return True


async def _stop(server: uvicorn.Server, running: asyncio.Task[None], async_engine: AsyncEngine, limits: Limits) -> None:
    async_engine.stopping = True
    server.should_exit = True
    if not (await asyncio.wait({running}, timeout=limits.shutdown_timeout_s))[0]:
        async_engine.end_all(stopping())
        await asyncio.wait({running}, timeout=_LAST_WORDS_S)
        server.force_exit = True
        for connection in list(server.server_state.connections):
            connection.transport.abort()
        if tasks := list(server.server_state.tasks):
            await asyncio.wait(tasks, timeout=_LAST_WORDS_S)
    await running


def allow_files(max_connections: int) -> None:
    """Raise the soft limit of open files, which is often 1024, as far as may be: to what so many connections need, and
    as many that are being refused.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * max_connections + _FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        least = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (least, hard))


class OutOfFiles:
    """An event loop's exception handler. asyncio tries to accept 512 times a second while there is no descriptor for a
    connection, and logs each with a traceback: it is told once a minute instead.
    """

    def __init__(self, timer: Callable[[], float] = time.monotonic) -> None:
        self._timer = timer
        self._quiet_until_s = -float("inf")

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE) and "socket" in context):
            loop.default_exception_handler(context)
        elif self._timer() >= self._quiet_until_s:
            self._quiet_until_s = self._timer() + _TOLD_S
            logger.error(
                "connections wait, and are not accepted: %s. Raise the limit of open files, or lower max_connections",
                error.strerror,
            )


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _server(app: ASGIApp, limits: Limits) -> uvicorn.Server:
    allow_files(limits.max_connections)
    asyncio.get_running_loop().set_exception_handler(OutOfFiles())
    config = uvicorn.Config(
        app,
        loop="asyncio",
        http=protocol(limits),
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        log_level="critical",  # clients' mistakes are not logged; failed requests are, in `middleware`
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=_BACKLOG,
        h11_max_incomplete_event_size=limits.header_bytes_max,
    )
    return _Server(config)
