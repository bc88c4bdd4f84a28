"""Addresses of shared stores: how they are written, and which part of them a message may show.

    s3://bucket/prefix   gs://bucket/prefix   az://account/container/prefix   file:///directory   memory:///
    redis://[user:password@]host[:6379][/database][?cluster=true&prefix=...]        rediss:// with TLS
    valkey:// and valkeys:// are the same

Imports only the standard library. A password is in no text that this module makes: no repr, no error, no `shown`.
"""

import difflib
import os
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from stowage.config.secret_file import open_secret
from stowage.errors import ConfigError

OBJECT_SCHEMES: Final = ("s3", "gs", "az", "file", "memory")
VALKEY_SCHEMES: Final = ("redis", "rediss", "valkey", "valkeys")
PASSWORD_VARIABLE: Final = "STOWAGE_VALKEY_PASSWORD"
_VALKEY_OPTIONS: Final = ("ca_file", "cert_file", "cluster", "key_file", "prefix")
_PREFIX: Final = re.compile(r"[\w.:/-]{1,128}", re.ASCII)
_PASSWORD_BYTES_MAX: Final = 4096
_MAKE: Final = "(umask 077; cat > {file})"
_OBJECT_FORMS: Final = "s3://bucket/prefix, gs://bucket/prefix, az://account/container/prefix or file:///directory"
_VALKEY_FORMS: Final = "redis://host:6379/0, or rediss://host:6379/0 for TLS"


@dataclass(frozen=True, slots=True)
class Valkey:
    """A key-value server. `prefix` begins every name there."""

    host: str
    port: int = 6379
    database: int = 0
    user: str = ""
    password: str = field(default="", repr=False)
    tls: bool = False
    cluster: bool = False
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    prefix: str = "stowage"

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'rediss' if self.tls else 'redis'}://{host}:{self.port}/{self.database}"


def shown(url: str) -> str:
    """The address without what may be, or hold, a password: whatever stands before the last @, and the options."""
    scheme, colon, rest = url.partition("://")
    credentials, at, host = rest.rpartition("@")
    return scheme + colon + (credentials and "***") + at + host.partition("?")[0]


def parse_object(url: str) -> str:
    """The address of an object store, checked. Raises ConfigError."""
    parts = _split("object", url, OBJECT_SCHEMES, _OBJECT_FORMS)
    if "@" in parts.netloc:
        raise ConfigError(
            f"The object store {shown(url)!r} has credentials in its address. Leave them out, and give them as the "
            f"store's own tools take them, for example in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."
        )
    if parts.query or parts.fragment:
        raise ConfigError(
            f"The object store {shown(url)!r} has options in its address, and it takes none. Give them as the store's "
            f"own tools take them, for example AWS_REGION and AWS_ENDPOINT_URL."
        )
    local = parts.scheme in ("file", "memory")
    if local == bool(parts.netloc) or (parts.scheme == "file" and len(parts.path) < 2):
        raise ConfigError(f"The object store {url!r} is not understood. Write {_OBJECT_FORMS}.")
    return url.rstrip("/") if not local else url


def parse_valkey(url: str) -> Valkey:
    """The server that is meant. Raises ConfigError."""
    parts = _split("valkey", url, VALKEY_SCHEMES, _VALKEY_FORMS)
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    path = parts.path.strip("/")
    if not host or parts.fragment or not (path == "" or re.fullmatch("[0-9]{1,4}", path)):
        raise ConfigError(f"The valkey {shown(url)!r} is not understood. Write {_VALKEY_FORMS}.")
    options = _options(url, parts.query)
    cluster = options.pop("cluster", "false").lower()
    if cluster not in ("true", "false"):
        raise ConfigError(f"The valkey {shown(url)!r} has cluster={cluster}: it must be true or false.")
    prefix = options.pop("prefix", "stowage")
    if not _PREFIX.fullmatch(prefix):
        raise ConfigError(
            f"The valkey {shown(url)!r} has a prefix that cannot be used: up to 128 letters, digits and . : / _ - "
            f"(no braces: all names would lie on one node of a cluster)."
        )
    address = Valkey(
        host=host,
        port=port or 6379,
        database=int(path or 0),
        user=unquote(parts.username or ""),
        password=unquote(parts.password or ""),
        tls=parts.scheme in ("rediss", "valkeys"),
        cluster=cluster == "true",
        prefix=prefix,
        **options,
    )
    _check(url, address)
    return address


def _check(url: str, address: Valkey) -> None:
    if address.cluster and address.database:
        raise ConfigError(f"The valkey {shown(url)!r} names database {address.database}: a cluster has only 0.")
    if (address.ca_file or address.cert_file or address.key_file) and not address.tls:
        raise ConfigError(f"The valkey {shown(url)!r} names files for TLS, and uses none. Write rediss://.")
    if bool(address.cert_file) != bool(address.key_file):
        raise ConfigError(f"The valkey {shown(url)!r} needs cert_file and key_file together, or neither.")


def _options(url: str, query: str) -> dict[str, str]:
    options = dict(parse_qsl(query, keep_blank_values=True))
    for name in options:
        if name not in _VALKEY_OPTIONS:
            near = difflib.get_close_matches(name, _VALKEY_OPTIONS, n=1, cutoff=0.5)
            advice = f"Did you mean {near[0]!r}?" if near else f"Valid: {', '.join(_VALKEY_OPTIONS)}."
            raise ConfigError(f"The option {name!r} of the valkey {shown(url)!r} is unknown. {advice}")
    return options


def _split(name: str, url: str, schemes: tuple[str, ...], forms: str) -> SplitResult:
    try:
        parts = urlsplit(url)
    except ValueError:
        parts = SplitResult("", "", "", "", "")
    if parts.scheme not in schemes or any(c.isspace() or not c.isprintable() for c in url):
        raise ConfigError(f"The address {shown(url)!r} of {name} is not understood. Write {forms}.")
    return parts


def valkey_password(url: str, path: Path | None) -> str | None:
    """From the file, if there is one, else from the environment; None: the one in the address, or none at all."""
    if path is not None:
        return read_password(path)
    return None if parse_valkey(url).password else os.environ.get(PASSWORD_VARIABLE) or None


def read_password(path: Path) -> str:
    """The first line of a file, which must be this user's alone (`secret_file`). Raises ConfigError."""
    try:
        with open(open_secret(path, "password file", _MAKE.format(file=shlex.quote(str(path)))), "rb") as file:
            content = file.read(_PASSWORD_BYTES_MAX + 1)
        password = content.partition(b"\n")[0].rstrip(b"\r").decode()
    except OSError as error:
        raise ConfigError(f"The password file {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"The password file {path} is not text.") from error
    if not password or len(content) > _PASSWORD_BYTES_MAX:
        raise ConfigError(f"The password file {path} must hold the password as its first line.")
    return password
