"""API keys: authentication, and the salts that isolate one client's cached prefixes from another's.

Owns the keys. They are kept as digests, compared in constant time and never shown: no message, log line or metric
holds one. A client's prefixes are found only under salts that HMAC derives from its own key, so clients with different
keys share nothing, and the `cache_salt` of a request divides a client's own prefixes further.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from stowage.config.secret_file import open_secret
from stowage.errors import ConfigError

VARIABLE: Final = "STOWAGE_API_KEYS"
KEY_CHARACTERS_LEAST: Final = 16
KEYS_MAX: Final = 1000
_FILE_BYTES_MAX: Final = 1 << 20
_CONTEXT: Final = b"stowage 2026 salt of an API key, encoding 1"


@dataclass(frozen=True, slots=True)
class Tenant:
    """One client. Without API keys all clients are one tenant, whose secret is empty."""

    secret: bytes = field(default=b"", repr=False)

    def salt(self, cache_salt: str) -> bytes:
        """The engine's salt for this client's prefixes; empty without API keys and without a `cache_salt`."""
        if not self.secret and not cache_salt:
            return b""
        return hmac.digest(self.secret or _CONTEXT, cache_salt.encode(), "sha256")


class ApiKeys:
    """The valid keys. Without any, every request is accepted."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._known = [
            (hashlib.sha256(key.encode()).digest(), Tenant(hmac.digest(key.encode(), _CONTEXT, "sha256")))
            for key in dict.fromkeys(keys)
        ]

    def __len__(self) -> int:
        return len(self._known)

    def tenant(self, authorization: bytes | None, *, basic: bool = False) -> Tenant | None:
        """The tenant of the key in the header `authorization`; None: no valid key. A wrong key takes as long as a right
        one. `basic`: the key may also be the password of HTTP Basic, which browsers can send; the user name is ignored.
        """
        if not self._known:
            return Tenant()
        scheme, _, given = (authorization or b"").partition(b" ")
        kind, given = scheme.lower(), given.strip()
        if basic and kind == b"basic":
            kind, given = b"bearer", _password(given)
        digest = hashlib.sha256(given).digest()
        found = None
        for known, tenant in self._known:
            if hmac.compare_digest(known, digest):
                found = tenant
        return found if kind == b"bearer" else None


def _password(encoded: bytes) -> bytes:
    """The password in `base64(user:password)`; empty for anything else."""
    try:
        return base64.b64decode(encoded, validate=True).partition(b":")[2]
    except binascii.Error:
        return b""


def load(path: Path | None, environ: Mapping[str, str]) -> ApiKeys:
    """The keys that `read` finds. Raises ConfigError."""
    return ApiKeys(read(path, environ))


def read(path: Path | None, environ: Mapping[str, str]) -> list[str]:
    """The keys of STOWAGE_API_KEYS (separated by commas) and of the file. Raises ConfigError."""
    given = environ.get(VARIABLE, "")
    keys = _checked(given.split(","), f"The variable {VARIABLE}")
    if given and not keys:
        raise ConfigError(f"The variable {VARIABLE} is set, but holds no key. Give it one, or unset it.")
    if path is not None:
        found = _checked(_read(path).splitlines(), f"The API key file {path}")
        if not found:
            make = _HOW_TO_MAKE.format(file=shlex.quote(str(path)))
            raise ConfigError(f"The API key file {path} holds no key. Make one: {make}")
        keys += found
    if len(keys) > KEYS_MAX:
        raise ConfigError(f"There are {len(keys)} API keys; at most {KEYS_MAX} can be used.")
    return keys


_HOW_TO_MAKE: Final = "(umask 077; openssl rand -hex 32 >> {file})"


def _checked(lines: Iterable[str], where: str) -> list[str]:
    """The keys among `lines`, without empty lines and comments. An error does not show the key."""
    keys = []
    for number, line in enumerate(lines, start=1):
        key = line.strip()
        if not key or key.startswith("#"):
            continue
        if not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigError(
                f"{where} cannot be used: key {number} has a space or a character that is not plain ASCII."
            )
        if len(key) < KEY_CHARACTERS_LEAST:
            raise ConfigError(
                f"{where} cannot be used: key {number} is {len(key)} characters long, and a key of fewer than "
                f"{KEY_CHARACTERS_LEAST} can be guessed. Make one: openssl rand -hex 32"
            )
        keys.append(key)
    return keys


def _read(path: Path) -> str:
    """The text of the file. Raises ConfigError."""
    fd = open_secret(path, "API key file", _HOW_TO_MAKE.format(file=shlex.quote(str(path))))
    try:
        if os.fstat(fd).st_size > _FILE_BYTES_MAX:
            raise ConfigError(f"The API key file {path} cannot be used: it is larger than {_FILE_BYTES_MAX} bytes.")
        return os.read(fd, _FILE_BYTES_MAX).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"The API key file {path} cannot be used: byte {error.start} is not text.") from error
    except OSError as error:
        raise ConfigError(f"The API key file {path} cannot be read: {error.strerror}.") from error
    finally:
        os.close(fd)
