"""What may be given to an engine: types at its border, so that nothing odd comes as far as its thread.

Owns no meaning: what values are good for is checked by those who use them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from stowage.config.memory import Memory
from stowage.engine.sampling import SamplingParams
from stowage.errors import ConfigError, RequestError

__all__ = ["check_request", "listed_prompts", "listed_tiers"]


def listed_tiers(memory: Any, salt: Any, tiers: Any) -> tuple[Any, ...]:
    """``tiers`` of a new engine, as often as they are looked at. Raises ``ConfigError``, which names the argument."""
    if memory is not None and not isinstance(memory, Memory):
        raise ConfigError(f"memory is a {type(memory).__name__}: it must be a stowage.Memory.")
    if not isinstance(salt, str):
        raise ConfigError(f"salt is a {type(salt).__name__}: it must be text.")
    if isinstance(tiers, str | bytes) or not isinstance(tiers, Iterable):
        raise ConfigError(f"tiers is a {type(tiers).__name__}: it must be a list of tiers.")
    return tuple(tiers)


def listed_prompts(prompts: Any) -> list[Any]:
    """One text, or a list of prompts, as a list. Raises ``RequestError``."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise RequestError(f"prompts is a {type(prompts).__name__}: it must be text, or a list of prompts.")
    return list(prompts)


def check_request(params: Any, on_delta: Any) -> None:
    """Raises ``RequestError``, which names the argument."""
    if params is not None and not isinstance(params, SamplingParams):
        raise RequestError(f"params is a {type(params).__name__}: it must be stowage.SamplingParams.")
    if on_delta is not None and not callable(on_delta):
        raise RequestError(f"on_delta is a {type(on_delta).__name__}: it must be a function that takes a Delta.")
