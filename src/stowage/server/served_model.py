"""What a server serves: the model's name, and the formats of its tool calls and reasoning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stowage.config.wording import unknown_name
from stowage.errors import ConfigError
from stowage.server.tools.formats import AUTO, FORMATS, REASONING

if TYPE_CHECKING:
    from stowage.engine.embedder import Embedder


@dataclass(frozen=True, slots=True)
class ServedEmbedder:
    """An embedder, and the name that clients know it by."""

    name: str
    embedder: Embedder


@dataclass(frozen=True, slots=True)
class ServedModel:
    """name: the model's, for clients. tool_call_parser, reasoning_parser: formats of tool calls and reasoning, under
    vLLM's names; `auto`: as the chat template says. allowed_origins: for CORS; `*`: all. embedding: an embedding model
    that is served beside it. Raises ConfigError.
    """

    name: str
    tool_call_parser: str = AUTO
    reasoning_parser: str = AUTO
    allowed_origins: tuple[str, ...] = ()
    embedding: ServedEmbedder | None = None

    def __post_init__(self) -> None:
        for name, known in (("tool_call_parser", (AUTO, *FORMATS)), ("reasoning_parser", REASONING)):
            value = getattr(self, name)
            if value not in known:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(unknown_name(f"{flag} {value!r}", value, known))
        for origin in self.allowed_origins:
            if origin != "*" and ("://" not in origin or origin.endswith("/")):
                raise ConfigError(f"allowed_origins has {origin!r}: write https://HOST, https://HOST:PORT or *.")
