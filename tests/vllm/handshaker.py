"""A connector that caches nothing and has a handshake, as those have that move KV between engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    SupportsHMA,
)


@dataclass
class Hello(KVConnectorHandshakeMetadata):
    """What its workers tell."""

    address: str


class Handshaker(KVConnectorBase_V1, SupportsHMA):
    """Refuses to begin without its own handshake."""

    def get_handshake_metadata(self) -> Hello:
        return Hello("here")

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Any) -> None:
        assert all(isinstance(hello, Hello) for hello in metadata.values())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None
