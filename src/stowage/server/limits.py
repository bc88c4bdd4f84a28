"""What one client, and all of them together, may ask of the server. Every limit has a default; docs/serving.md explains
each. Checked when it is made.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from stowage.config.memory import parse_size, ram_total_bytes
from stowage.errors import ConfigError

BODIES_AT_ONCE = 8
"""Bodies of the largest size that may lie in memory together."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the server.

    Of one request: body_max (bytes, as a size), prompt_tokens_max (0: as many as the model takes), choices_max
    (prompts times n), request_timeout_s (from the first byte of the body to the last of the answer). Of all together:
    queue_max (choices that wait while `sequences_max` of them run), connections_max. Of one connection: header_max
    (bytes), header_timeout_s, body_timeout_s, stall_timeout_s (a client that reads nothing), keep_alive_s. grace_s: how
    long running requests may go on after the signal to stop. Raises ConfigError.
    """

    body_max: int | str = "8MiB"
    prompt_tokens_max: int = 0
    choices_max: int = 128
    request_timeout_s: float = 600.0
    queue_max: int = 128
    connections_max: int = 1024
    header_max: int | str = "16KiB"
    header_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    stall_timeout_s: float = 30.0
    keep_alive_s: float = 75.0
    grace_s: float = 30.0

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name.endswith("_s"):
                least = 0.0 if item.name == "grace_s" else 0.001
                if not least <= value < math.inf:
                    raise ConfigError(
                        f"{item.name} is {value}: it must be a finite number of seconds, {least} or more."
                    )
            elif item.name in ("prompt_tokens_max", "queue_max"):
                self._whole(item.name, 0)
            elif item.name in ("choices_max", "connections_max"):
                self._whole(item.name, 1)
        for name, least in (("body_max", 1024), ("header_max", 1024)):
            if self._bytes(name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}: it must be at least {least} bytes.")

    @property
    def body_bytes_max(self) -> int:
        return self._bytes("body_max")

    @property
    def header_bytes_max(self) -> int:
        return self._bytes("header_max")

    def _whole(self, name: str, least: int) -> None:
        if getattr(self, name) < least:
            raise ConfigError(f"{name} is {getattr(self, name)}: it must be a whole number of {least} or more.")

    def _bytes(self, name: str) -> int:
        try:
            return parse_size(getattr(self, name), ram_total_bytes())
        except ConfigError as error:
            raise ConfigError(f"{name} cannot be used. {error}") from error
