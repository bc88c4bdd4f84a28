"""The server's limits, for one client and for all together. Each has a default; docs/serving.md explains them."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from stowage.config.memory import parse_size, ram_total_bytes
from stowage.config.wording import shown_value
from stowage.errors import ConfigError

BODIES_AT_ONCE = 8
"""`request_memory` must hold at least this many bodies of the largest size."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the server.

    Of one request: max_body_size (bytes, as a size), max_prompt_tokens (0: as many as the model takes), max_choices
    (prompts times n), request_timeout_s (from the first byte of the body to the last of the answer). Of all together:
    max_queued_requests (choices that wait while `max_num_seqs` of them run), max_connections, request_memory (bytes of
    bodies, their reading, and answers that are not sent). Of one client: reading_timeout_s (of the processor, in a
    minute, for prompts that take long to read). Of one connection: max_header_size (bytes), header_timeout_s,
    body_timeout_s, stall_timeout_s (a client that reads nothing), keep_alive_s. max_reopens: how often another engine
    is opened for one that failed. shutdown_timeout_s: how long running requests may go on after the signal to stop.
    Raises ConfigError.
    """

    max_body_size: int | str = "8MiB"
    max_prompt_tokens: int = 0
    max_choices: int = 128
    request_timeout_s: float = 600.0
    max_queued_requests: int = 128
    max_connections: int = 1024
    request_memory: int | str = "256MiB"
    reading_timeout_s: float = 30.0
    max_header_size: int | str = "16KiB"
    header_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    stall_timeout_s: float = 30.0
    keep_alive_s: float = 75.0
    shutdown_timeout_s: float = 30.0
    max_reopens: int = 0

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name.endswith("_s"):
                least = 0.0 if item.name == "shutdown_timeout_s" else 0.001
                if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < math.inf:
                    raise ConfigError(
                        f"{item.name} is {shown_value(value)}: it must be a finite number of seconds, {least} or more."
                    )
            elif item.name in ("max_prompt_tokens", "max_queued_requests", "max_reopens"):
                self._whole(item.name, 0)
            elif item.name in ("max_choices", "max_connections"):
                self._whole(item.name, 1)
        if self.request_bytes_max < BODIES_AT_ONCE * self.body_bytes_max:
            raise ConfigError(
                f"request_memory is {self.request_memory}: it must hold {BODIES_AT_ONCE} bodies of max_body_size "
                f"({self.max_body_size}), because reading one takes several times its size. Give it at least "
                f"{BODIES_AT_ONCE * self.body_bytes_max} bytes, or make max_body_size smaller."
            )
        for name, least in (("max_body_size", 1024), ("max_header_size", 1024)):
            if self._bytes(name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}: it must be at least {least} bytes.")

    @property
    def body_bytes_max(self) -> int:
        return self._bytes("max_body_size")

    @property
    def request_bytes_max(self) -> int:
        return self._bytes("request_memory")

    @property
    def header_bytes_max(self) -> int:
        return self._bytes("max_header_size")

    def _whole(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"{name} is {shown_value(value)}: it must be a whole number of {least} or more.")

    def _bytes(self, name: str) -> int:
        try:
            return parse_size(getattr(self, name), ram_total_bytes())
        except ConfigError as error:
            raise ConfigError(f"{name} cannot be used. {error}") from error
