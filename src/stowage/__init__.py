"""Stowage: language models under hard memory budgets, whose prefixes survive in host memory and on disk.

This module holds the public names and nothing else. They are looked up on first use, so that ``import stowage``
costs milliseconds and leaves torch out of ``sys.modules``. ``tests/unit/test_import.py`` pins the list.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stowage.config.memory import Memory
    from stowage.engine.engine import Engine
    from stowage.engine.request import Completion, Delta
    from stowage.engine.sampling import TokenLogprob
    from stowage.engine.sampling_params import SamplingParams, StructuredOutputs
    from stowage.errors import (
        BudgetError,
        CheckpointError,
        ConfigError,
        DirectoryError,
        FormatError,
        ModelError,
        RequestError,
        StorageError,
        StowageError,
        TransferError,
        UnsupportedModelError,
    )
    from stowage.plugins.transformers.offload import offload
    from stowage.plugins.transformers.prefix_cache import PrefixCache

__version__ = "0.1.0"

_HOMES = {
    "Memory": "stowage.config.memory",
    "offload": "stowage.plugins.transformers.offload",
    "PrefixCache": "stowage.plugins.transformers.prefix_cache",
    "Engine": "stowage.engine.engine",
    "Completion": "stowage.engine.request",
    "Delta": "stowage.engine.request",
    "SamplingParams": "stowage.engine.sampling_params",
    "StructuredOutputs": "stowage.engine.sampling_params",
    "TokenLogprob": "stowage.engine.sampling",
    "BudgetError": "stowage.errors",
    "CheckpointError": "stowage.errors",
    "ConfigError": "stowage.errors",
    "DirectoryError": "stowage.errors",
    "FormatError": "stowage.errors",
    "ModelError": "stowage.errors",
    "RequestError": "stowage.errors",
    "StorageError": "stowage.errors",
    "StowageError": "stowage.errors",
    "TransferError": "stowage.errors",
    "UnsupportedModelError": "stowage.errors",
}

__all__ = [
    "BudgetError",
    "CheckpointError",
    "Completion",
    "ConfigError",
    "Delta",
    "DirectoryError",
    "Engine",
    "FormatError",
    "Memory",
    "ModelError",
    "PrefixCache",
    "RequestError",
    "SamplingParams",
    "StorageError",
    "StowageError",
    "StructuredOutputs",
    "TokenLogprob",
    "TransferError",
    "UnsupportedModelError",
    "__version__",
    "offload",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'stowage' has no attribute {name!r}")
    try:
        value = getattr(import_module(home), name)
    except ModuleNotFoundError as error:
        from stowage.extras import absent

        told = absent(error)
        if told is None:
            raise
        raise told from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
