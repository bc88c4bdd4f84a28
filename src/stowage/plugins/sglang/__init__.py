"""A storage backend for SGLang's HiCache: pages on disk and in shared stores, checked, bounded, there after a restart.

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name": "stowage",
        "module_path": "stowage.plugins.sglang", "class_name": "StowageStorage", "disk": "~/.cache/stowage:100GiB"}'

SGLang's own host pools stay the tier above. docs/sglang.md tells the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stowage.plugins.sglang.storage import StowageStorage

__all__ = ["StowageStorage"]


def __getattr__(name: str) -> Any:
    """The backend's class, which imports SGLang's interface, when somebody asks for it."""
    if name == "StowageStorage":
        from stowage.plugins.sglang.storage import StowageStorage

        return StowageStorage
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
