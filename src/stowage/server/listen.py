"""The address that the server listens on. Bound before a model is loaded, so that a port in use is reported at once."""

from __future__ import annotations

import errno
import ipaddress
import socket
from dataclasses import dataclass

from stowage.errors import ConfigError

_EXAMPLE = "--host 127.0.0.1, --host ::1, or --host 0.0.0.0 for every address of this machine"


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """A bound socket, which does not listen yet, and the host that was given."""

    socket: socket.socket
    host: str
    text: str

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach it."""
        return ipaddress.ip_address(self.socket.getsockname()[0].partition("%")[0]).is_loopback

    @property
    def url(self) -> str:
        address, port = self.socket.getsockname()[:2]
        return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


def bind(host: str, port: int) -> ListenAddress:
    """Bind a socket to a host (address or name) and port. Port 0: any that is free. Raises ConfigError."""
    host = host.strip()
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if not host:
        raise ConfigError(f"host is empty: the server must listen somewhere. Write {_EXAMPLE}.")
    if not 0 <= port <= 65535:
        raise ConfigError(f"port is {port}: it must be from 1 to 65535, or 0 for any that is free.")
    text = f"{host} --port {port}"
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"--host (STOWAGE_HOST) {host!r} is not known ({reason}). Write {_EXAMPLE}.") from error
    found.sort(key=lambda item: item[0] != socket.AF_INET)
    family, kind, number, _, address = found[0]
    listener = socket.socket(family, kind, number)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ConfigError(cannot_listen(text, error)) from error
    return ListenAddress(listener, host, text)


def cannot_listen(text: str, error: OSError) -> str:
    """The error message for an address that cannot be used."""
    reasons = {
        errno.EADDRINUSE: "another program listens there. Stop it, or choose another port (0 takes any that is free)",
        errno.EADDRNOTAVAIL: f"this machine has no such address. Write {_EXAMPLE}",
        errno.EACCES: "ports below 1024 are for privileged users. Choose a larger one",
    }
    return f"--host {text} cannot be used: {reasons.get(error.errno or 0, error.strerror)}."
