"""ValkeyTier: chunks as values of a Valkey or Redis server, or of a cluster of them.

One value per chunk, `prefix:namespace:key`, namespace and key hex. No braces: the names of a prompt's chunks spread
over all nodes of a cluster, and a batch is sent to the nodes at the same time. Everything is pipelined; values are read
by range, so that no answer is longer than was asked for. The server forgets as its memory policy says, and what has not
been used for `ttl_s`; what is gone is a miss.

The client is redis-py (asyncio). Its error texts are not passed on, because they may hold what was sent.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

from stowage.config.addresses import Valkey, parse_valkey
from stowage.errors import ConfigError
from stowage.storage.remote.backend import Answer, Bounds, Cause, Failure
from stowage.storage.remote.replies import bounded
from stowage.storage.remote.tier import RemoteTier

BOUNDS: Final = Bounds(
    batch_keys=256, batch_bytes=8 << 20, reads_max=4, writes_max=2, probes_max=2, search_widths=(512, 512)
)
CONNECT_S: Final = 2.0
ABSENT_S: Final = 1.0
TTL_S: Final = 86_400.0


class ValkeyTier(RemoteTier):
    """Chunks in a Valkey or Redis server, or a cluster of them. `url`: see `stowage.config.addresses`. `password`: in
    the place of the one in the address.

    `ttl_s`: seconds after which what was neither stored nor loaded is forgotten by the server; 0: never. At most
    `reads_max + writes_max + probes_max` connections to each node. Other options: see `RemoteTier`. Raises ConfigError
    for an address that cannot be used, a file for TLS that cannot be read, and a package that is missing.
    """

    def __init__(
        self,
        url: str,
        namespace: bytes,
        *,
        password: str | None = None,
        ttl_s: float = TTL_S,
        bounds: Bounds = BOUNDS,
        absent_s: float = ABSENT_S,
        request_timeout_s: float = 5.0,
        **options: Any,
    ) -> None:
        address = parse_valkey(url)
        start = f"{address.prefix}:{namespace.hex()}:"
        secret = address.password if password is None else password
        super().__init__(
            "valkey",
            _ValkeyBackend(lambda: _connect(address, secret, bounds, request_timeout_s), bounds, ttl_s),
            namespace,
            lambda key: start + key.hex(),
            absent_s=absent_s,
            request_timeout_s=request_timeout_s,
            **options,
        )


def _connect(address: Valkey, password: str, bounds: Bounds, timeout_s: float) -> Any:
    """A client that has not connected yet."""
    try:
        import redis.asyncio as client
        from redis.asyncio.connection import DefaultParser
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
    except ImportError as error:
        raise ConfigError(
            "The valkey tier needs the package redis, which is not installed. Install it: pip install 'stowage[valkey]'"
        ) from error
    options: dict[str, Any] = {
        "host": address.host,
        "port": address.port,
        "username": address.user or None,
        "password": password or None,
        "client_name": f"stowage-{os.getpid()}",
        "protocol": 2,
        "socket_connect_timeout": CONNECT_S,
        "socket_timeout": timeout_s,
        "socket_keepalive": True,
        "max_connections": bounds.reads_max + bounds.writes_max + bounds.probes_max,
    }
    if address.tls:
        options |= {"ssl": True, "ssl_cert_reqs": "required", "ssl_check_hostname": True}
        options |= {"ssl_ca_certs": address.ca_file or None}
        options |= {"ssl_certfile": address.cert_file or None, "ssl_keyfile": address.key_file or None}
    for file in filter(None, (address.ca_file, address.cert_file, address.key_file)):
        if not os.access(file, os.R_OK):
            raise ConfigError(f"The file {file} of the valkey {address} cannot be read.")
    parser = {"parser_class": bounded(DefaultParser)}
    if address.cluster:
        cluster = client.RedisCluster(**options, require_full_coverage=False, retry=Retry(NoBackoff(), 1))
        cluster.connection_kwargs.update(parser)
        for node in cluster.nodes_manager.startup_nodes.values():
            node.connection_kwargs.update(parser)
        return cluster
    one = client.Redis(**options, db=address.database, retry=Retry(NoBackoff(), 0))
    one.connection_pool.connection_kwargs.update(parser)
    return one


class _ValkeyBackend:
    """Values by name. See `Backend`."""

    def __init__(self, connect: Callable[[], Any], bounds: Bounds, ttl_s: float) -> None:
        self.bounds = bounds
        self._client = connect()
        self._ttl_ms = round(ttl_s * 1000)

    async def head(self, names: Sequence[str], length: int) -> Sequence[Answer]:
        replies = await self._send([("GETRANGE", name, 0, length - 1) for name in names])
        return [_value(reply) for reply in replies]

    async def get(self, names: Sequence[str], lengths: Sequence[int]) -> Sequence[Answer]:
        """One byte more than said, where there is more. What is used lives on."""
        commands: list[tuple[Any, ...]] = [
            ("GETRANGE", name, 0, length) for name, length in zip(names, lengths, strict=True)
        ]
        if self._ttl_ms:
            commands += [("PEXPIRE", name, self._ttl_ms) for name in names]
        replies = await self._send(commands)
        return [_value(reply) for reply in replies[: len(names)]]

    async def put(self, names: Sequence[str], values: Sequence[bytearray]) -> Sequence[Failure | None]:
        lifetime = ("PX", self._ttl_ms) if self._ttl_ms else ()
        replies = await self._send(
            [("SET", name, memoryview(value), *lifetime) for name, value in zip(names, values, strict=True)]
        )
        return [_failure(reply) if isinstance(reply, Exception) else None for reply in replies]

    async def _send(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The reply to each command, or the error in its place."""
        try:
            pipeline = self._client.pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)
            return cast(list[Any], await pipeline.execute(raise_on_error=False))
        except Exception as error:  # noqa: BLE001 - whatever the client raises is an answer
            return [error] * len(commands)

    async def close(self) -> None:
        with contextlib.suppress(Exception):
            await self._client.aclose()

    def stats(self) -> dict[str, int | float | str]:
        return {}


def _value(reply: Any) -> Answer:
    """A range of what is not there is empty."""
    if isinstance(reply, Exception):
        return b"" if "WRONGTYPE" in str(reply) else _failure(reply)
    if not isinstance(reply, bytes):
        return Failure(Cause.REFUSED, "the server does not answer as Valkey does")
    return reply or None


def _failure(error: Exception) -> Failure:
    """What the client's error means, by its class and the server's code."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    kind = type(error).__name__
    if kinds & {"AuthenticationError", "AuthorizationError", "AuthenticationWrongNumberOfArgsError"}:
        return Failure(Cause.REFUSED, "the server refused the password")
    if kinds & {"NoPermissionError", "ReadOnlyError"}:
        return Failure(Cause.REFUSED, f"the server refused ({kind})")
    if "AskError" in kinds:
        return Failure(Cause.REFUSED, "the server is a node of a cluster: add cluster=true to its address")
    text = str(error)
    if "OutOfMemoryError" in kinds or text.startswith(("OOM", "MISCONF")):
        return Failure(Cause.FULL, "the server takes nothing more")
    if "ResponseError" in kinds and "ClusterError" not in kinds:
        transient = text.startswith(("LOADING", "BUSY", "TRYAGAIN", "CLUSTERDOWN", "MASTERDOWN"))
        said = text.partition(" ")[0][:20] or "nothing"
        return Failure(Cause.NETWORK if transient else Cause.REFUSED, f"the server said {said}")
    return Failure(Cause.NETWORK, f"no connection ({kind})")
