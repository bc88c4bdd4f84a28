"""Stowage as a child of vLLM's ``MultiConnector``: the configuration around it, and which other children there are.

vLLM gives each child a copy of the engine's configuration, and one child's handshake to all of them. What a child needs
of the real one is read where ``MultiConnector`` makes it: in the frames that call the child's constructor.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from stowage.plugins.vllm.weight_updates import callers


def outermost_config(own: Any) -> Any:
    """The engine's configuration, while a connector is made: ``own``, or that of the ``MultiConnector`` around it."""
    found = own
    for local in callers():
        if isinstance(local.get("self"), MultiConnector) and "vllm_config" in local:
            found = local["vllm_config"]
    return found


def others_shake_hands(config: Any, own: type) -> bool:
    """Whether another child of ``config`` has handshake metadata. vLLM then hands those of one child to every child."""
    if not config.kv_transfer_config.kv_connector_extra_config.get("connectors"):
        return False
    children = MultiConnector._get_connector_classes_and_configs(config)
    return any(
        others_shake_hands(inner, own)
        if issubclass(child, MultiConnector)
        else child is not own and child.get_handshake_metadata is not KVConnectorBase_V1.get_handshake_metadata
        for child, inner in children
    )
