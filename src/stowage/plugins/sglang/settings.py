"""Settings in ``--hicache-storage-backend-extra-config``: how they are parsed and checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stowage.config.memory import Memory
from stowage.config.wording import unknown_name
from stowage.errors import ConfigError

OURS = (
    "disk",
    "disk_protection",
    "disk_key_file",
    "compression",
    "valkey",
    "valkey_ttl_s",
    "valkey_password_file",
    "object",
    "object_limit",
    "load_timeout_s",
    "lookup_timeout_s",
)
_SGLANGS = (
    "backend_name",
    "module_path",
    "class_name",
    "interface_v1",
    "prefetch_threshold",
    "prefetch_timeout_base",
    "prefetch_timeout_per_ki_token",
    "hicache_storage_pass_prefix_keys",
)
"""Of the same dictionary, what SGLang itself reads."""


def read(extra: Mapping[str, Any] | None) -> Memory:
    """Raises ``ConfigError`` for a name that is unknown, a value that cannot be used, and where there is no tier."""
    extra = extra or {}
    for name in extra:
        if name not in OURS and name not in _SGLANGS:
            raise ConfigError(unknown_name(f"The setting {name!r} of StowageStorage", name, OURS))
    memory = Memory(**{name: extra[name] for name in OURS if name in extra})
    if not (memory.disk or memory.valkey or memory.object):
        raise ConfigError(
            "StowageStorage has nothing to store in. Give it a disk, such as "
            '"disk": "~/.cache/stowage-sglang:100GiB", or a shared store.'
        )
    return memory
