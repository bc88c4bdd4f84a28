"""Parts for tests of Stowage and of what is built on it: faults on demand, a simulator, conformance, tiny models.

Imports nothing by itself: `TierConformance` is looked up on first use, because it needs hypothesis.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stowage.testing.conformance import TierConformance

__all__ = ["TierConformance"]


def __getattr__(name: str) -> Any:
    if name == "TierConformance":
        return import_module("stowage.testing.conformance").TierConformance
    raise AttributeError(f"module 'stowage.testing' has no attribute {name!r}")
