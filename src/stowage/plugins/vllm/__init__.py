"""vLLM's KV cache in host memory, on disk and in shared stores: checked, bounded, and there after a restart.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "StowageConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"host_memory": "8GiB", "disk": "~/.cache/stowage:100GiB"}}'

One process of an engine, vLLM's scheduler, owns the store and knows what is where; the workers copy bytes between their
KV cache and the arena, which they map. A chunk holds the parts of all ranks, so it is found only when all have written
theirs. docs/vllm.md tells the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stowage.errors import ConfigError

if TYPE_CHECKING:
    from stowage.plugins.vllm.connector import StowageConnector

__all__ = ["StowageConnector", "register"]


def register() -> None:
    """What vLLM's plugin loader calls: makes the connector known by its name alone. Calling again does nothing."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if "StowageConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector("StowageConnector", __name__, "StowageConnector")


def __getattr__(name: str) -> Any:
    """The connector's class, which imports vLLM, when somebody asks for it.

    Raises ``ConfigError`` when it cannot be had from a release of vLLM that is not supported.
    """
    if name == "StowageConnector":
        from stowage.plugins.vllm import adapter

        unknown = adapter.unknown_release()
        try:
            from stowage.plugins.vllm.connector import StowageConnector
        except ImportError as error:
            if unknown:
                raise ConfigError(f"{unknown} This one lacks what it needs: {error}.") from error
            raise
        if unknown:
            adapter.warn(f"{unknown} It starts, but nobody has tried it.")
        return StowageConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
