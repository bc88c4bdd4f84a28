"""Names of SGLang's pages: its own hash of the tokens, and everything else that their bytes depend on.

SGLang's hash tells the tokens up to a page's end, a request's ``cache_salt`` and its ``extra_key`` (an adapter). It
does not tell the weights, the layout, or which part of a page a rank holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from blake3 import blake3

from stowage.core.key import Field, namespace
from stowage.models import hub, identity
from stowage.storage.format import envelope, segment

FORMAT = 1
"""How pages are named and laid out; raised whenever the same tokens come to other bytes."""
KV, MAMBA = "kv", "mamba"


def page_bytes(pool: Any) -> int:
    """Bytes of one page of a host pool on this rank."""
    page = pool.get_dummy_flat_data_page()
    return int(page.nbytes)


class Names:
    """The names of the pages of one engine's rank. ``pools``: the host pools by name; ``version``: SGLang's. ``tier``:
    the namespace that ranks share, since some of their pages are the same.
    """

    def __init__(self, config: Any, pools: Mapping[str, Any], version: str) -> None:
        self._config = config
        self.tier = namespace(
            {
                "format": [envelope.VERSION, segment.VERSION],
                "engine": f"sglang/{FORMAT}",
                "code": f"sglang/{version}",
                "weights": _weights(config.model_name),
                "pipeline": [config.pp_rank, config.pp_size],
                "context": [config.attn_cp_rank, config.attn_cp_size],
                "decode_context": [getattr(config, "dcp_rank", 0), getattr(config, "dcp_size", 1)],
                "page_first": bool(config.is_page_first_layout),
            }
        )
        self._pools = {name: self._pool(name, pool) for name, pool in pools.items()}
        self._generation = 0

    def _pool(self, name: str, pool: Any) -> bytes:
        """MLA's latents are alike on all tensor ranks; states are divided between them all the same."""
        alike = self._config.is_mla_model and name != MAMBA
        fields: dict[str, Field] = {
            "tier": self.tier,
            "pool": name,
            "kind": type(pool).__name__,
            "page_bytes": page_bytes(pool),
            "page_tokens": int(getattr(pool, "page_size", 1) or 1),
            "dtype": str(getattr(pool, "dtype", "")),
            "layout": str(getattr(pool, "layout", "")),
            "tensor": [0, 0] if alike else [self._config.tp_rank, self._config.tp_size],
        }
        return namespace(fields)

    def of(self, pool: str, keys: list[str]) -> list[bytes]:
        """The 32-byte names of pages, by SGLang's hashes of them."""
        prefix = str(self._generation).encode() + b" "
        return [blake3(prefix + key.encode(), key=self._pools[pool]).digest() for key in keys]

    def knows(self, pool: str) -> bool:
        """Whether the pool was there when the names were made."""
        return pool in self._pools

    def renew(self) -> None:
        """From now on nothing that was stored is found by this engine. All its ranks are told, and agree."""
        self._generation += 1


def _weights(model: str | None) -> str:
    """A digest of the files of a directory, of what was downloaded of a repository on the hub, or of a file and those
    that it is split over; else the name, as it was given. SGLang does not say which revision it serves: of a repository
    it is the one that was downloaded last under its default name.
    """
    path = hub.local_path(model) if model else None
    return (path and identity.of_path(path)) or f"name:{model}"
