"""Checks the types of what callers pass to an engine, so that a wrong one fails there and not on the engine's thread.

Values are checked where they are used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stowage.config import arguments
from stowage.config.memory import Memory
from stowage.engine.sampling_params import SamplingParams
from stowage.errors import ConfigError, RequestError


def check_engine(model: Any, memory: Any, given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Check an engine's arguments; returns its tiers. Raises ``ConfigError``, which names the argument."""
    arguments.checkpoint("model", model)
    if memory is not None and not isinstance(memory, Memory):
        raise ConfigError(f"memory is a {type(memory).__name__}: it must be a stowage.Memory.")
    for name in ("dtype", "device"):
        arguments.text(name, given[name])
    arguments.text("salt", given["salt"], encode=str.encode)
    for name in ("deterministic", "batch_dependent", "int8_activations"):
        arguments.flag(name, given[name])
    arguments.flag_or_none("cuda_graphs", given["cuda_graphs"])
    if given["tokenizer"] is not None and not hasattr(given["tokenizer"], "decode"):
        kind = type(given["tokenizer"]).__name__
        raise ConfigError(f"tokenizer is a {kind}: it must be a tokenizer of Transformers.")
    return arguments.listed("tiers", given["tiers"], "tiers")


def prompt_list(prompts: Any) -> list[Any]:
    """One text, or a list of prompts, as a list. Raises ``RequestError``."""
    if isinstance(prompts, str):
        return [prompts]
    items = arguments.items_of(prompts)
    if items is None:
        raise RequestError(f"prompts is a {type(prompts).__name__}: it must be text, or a list of prompts.")
    return list(items)


def check_request(params: Any, on_delta: Any) -> None:
    """Raises ``RequestError``, which names the argument."""
    if params is not None and not isinstance(params, SamplingParams):
        raise RequestError(f"params is a {type(params).__name__}: it must be stowage.SamplingParams.")
    if on_delta is not None and not callable(on_delta):
        raise RequestError(f"on_delta is a {type(on_delta).__name__}: it must be a function that takes a Delta.")
