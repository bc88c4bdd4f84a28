"""KV cache events: which blocks are below the device, for routers that send a prompt where its prefix is.

Owns the list of what was announced. A chunk is announced when all ranks have written it, by the hashes that vLLM gives
its blocks; that it has gone from every tier is noticed by asking for some of them again, now and then. Blocks of the
first group with full attention stand for all groups: events of others carry nothing that a router could use.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from stowage.cache.store import TieredStore
from stowage.core.geometry import Group, IntArray

MEDIUM = "stowage"
_AUDIT_S = 1.0
_AUDIT_KEYS = 4096


@dataclass(slots=True)
class _Chunk:
    key: bytes
    hashes: list[Any]
    parent: Any
    tokens: list[int]
    lora: Any


class Announcements:
    """The KV cache events of one engine. ``hash_tokens``: tokens per block hash of vLLM's."""

    def __init__(self, store: TieredStore, group: Group, hash_tokens: int) -> None:
        self.group = group
        self._store = store
        self._hash_tokens = hash_tokens
        self._planned: dict[int, list[_Chunk]] = {}
        self._there: OrderedDict[bytes, list[Any]] = OrderedDict()
        self._events: list[Any] = []
        self._audit_s = 0.0

    def planned(self, number: int, request: Any, chunks: IntArray, keys: Sequence[bytes]) -> None:
        """The store ``number`` will write these chunks of a request."""
        new = [self._chunk(request, chunk, keys[chunk]) for chunk in chunks.tolist()]
        self._planned.setdefault(number, []).extend(new)

    def _chunk(self, request: Any, chunk: int, key: bytes) -> _Chunk:
        size, each = self.group.chunk_tokens, self.group.block_tokens
        ends = range(chunk * size + each, (chunk + 1) * size + 1, each)
        hashes = request.block_hashes
        parent = hashes[chunk * size // self._hash_tokens - 1] if chunk else None
        return _Chunk(
            key,
            [hashes[end // self._hash_tokens - 1] for end in ends],
            parent,
            list(request.all_token_ids[chunk * size : (chunk + 1) * size]),
            request.lora_request,
        )

    def ended(self, number: int, stored: bool) -> None:
        """All ranks have written it, or not."""
        for chunk in self._planned.pop(number, ()):
            if stored:
                self._there[chunk.key] = chunk.hashes
                self._events.append(self._stored(chunk))

    def _stored(self, chunk: _Chunk) -> Any:
        from vllm.distributed.kv_events import BlockStored
        from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

        return BlockStored(
            block_hashes=[maybe_convert_block_hash(one) for one in chunk.hashes],
            parent_block_hash=None if chunk.parent is None else maybe_convert_block_hash(chunk.parent),
            token_ids=chunk.tokens,
            block_size=self.group.block_tokens,
            lora_id=None if chunk.lora is None else chunk.lora.lora_int_id,
            lora_name=None if chunk.lora is None else chunk.lora.lora_name,
            medium=MEDIUM,
            group_idx=self.group.index,
        )

    def take(self) -> list[Any]:
        """The events since the last call."""
        now_s = time.monotonic()
        if self._there and now_s >= self._audit_s:
            self._audit_s = now_s + _AUDIT_S
            self._audit()
        events, self._events = self._events, []
        return events

    def _audit(self) -> None:
        """Ask for those that were not asked for the longest."""
        from vllm.distributed.kv_events import BlockRemoved
        from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

        keys = list(islice(self._there, _AUDIT_KEYS))
        gone = np.flatnonzero(self._store.sources(keys) < 0)
        hashes = [one for index in gone.tolist() for one in self._there.pop(keys[index])]
        for key in keys:
            if key in self._there:
                self._there.move_to_end(key)
        if hashes:
            converted = [maybe_convert_block_hash(one) for one in hashes]
            self._events.append(BlockRemoved(block_hashes=converted, medium=MEDIUM, group_idx=self.group.index))

    def clear(self) -> None:
        """Nothing that was announced can be found any more."""
        from vllm.distributed.kv_events import BlockRemoved
        from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

        hashes = [maybe_convert_block_hash(one) for chunk in self._there.values() for one in chunk]
        if hashes:
            self._events.append(BlockRemoved(block_hashes=hashes, medium=MEDIUM, group_idx=self.group.index))
        self._there.clear()
        self._planned.clear()
