"""``PrefixCache``: prefixes of prompts, kept in host memory, on disk and in shared stores, as Transformers caches.

    input_ids --restore--> DynamicCache --generate--> output ids, and a cache that has grown --keep--> chunks

Owns the way between a caller's caches and the store; the keys, groups, boundaries, plans, tiers and budgets are those
of the engine. Exact or absent: what ``restore`` puts into a cache are the bytes that ``keep`` saw after these tokens
and no others, and a chunk that is damaged, late or gone makes the prefix shorter, never an exception. ``restore`` only
reads; ``keep`` has copied everything when it returns, and writes go on in the background.

May be called from several threads, one of which is served at a time.
"""

from __future__ import annotations

import math
import sys
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from stowage.cache.background import Background
from stowage.cache.cost_model import CostModel
from stowage.cache.opening import check_tiers, open_store
from stowage.config import arguments
from stowage.config.memory import Memory
from stowage.config.wording import unknown_name
from stowage.core.geometry import Geometry, Kind
from stowage.core.groups import snapshot_spacing, strategy
from stowage.core.key import SequenceKeys, namespace
from stowage.errors import ConfigError, StowageError
from stowage.executor.determinism.pieces import torch_name
from stowage.executor.peak_compute import prefill_tokens_per_s_most
from stowage.models.loading import Loaded
from stowage.models.namespace import block_tokens_of, namespace_fields
from stowage.plugins.transformers import caches
from stowage.plugins.transformers.cached_model import CachedModel
from stowage.plugins.transformers.inputs import Rows, Tokens, padding_of, rows_of
from stowage.plugins.transformers.reading import Reader
from stowage.plugins.transformers.transfer import CacheTransfer
from stowage.plugins.transformers.writing import Writer
from stowage.storage.protocol import Tier

FORMAT = 1
"""How chunks are laid out here; raised whenever the same tokens come to other bytes."""
_NOT_OURS = ("device_memory", "weights", "kv_cache_memory", "max_num_seqs", "max_model_len", "host_memory", "disk")
_CLOSE_S = 5.0


@dataclass(slots=True)
class Counts:
    """What was done so far, in calls and tokens (of all rows)."""

    restores: int = 0
    restores_hit: int = 0
    tokens_asked: int = 0
    tokens_restored: int = 0
    restore_s: float = 0.0
    keeps: int = 0
    tokens_kept: int = 0
    bytes_kept: int = 0
    tokens_prefilled: int = 0


class PrefixCache:
    """Prefixes of one ``model``, a causal one of Transformers in memory, in evaluation mode, on any device. Every
    weight is read once, to name it.

    ``host_memory``: a hard limit; a prefix passes through it whole, so it should hold the longest. ``disk``:
    ``"DIR:SIZE"``, a hard limit; processes may share it. ``exact``: answers after ``prefill`` are the same to the bit
    whether anything was stored or not; see there. ``salt``: caches with different salts share nothing. ``tiers``: of
    your own, below those of the settings, fastest first; closed with it. ``settings``: further fields of ``Memory``
    (``valkey``, ``object``, ``snapshot_tokens``, ``disk_protection``, ...), as docs/reference/settings.md has them.

    Raises ``ModelError`` (``UnsupportedModelError``) for a model whose caches cannot be kept exactly, ``ConfigError``
    (``BudgetError``) or ``StorageError`` for settings that cannot work.
    """

    def __init__(
        self,
        model: Any,
        host_memory: int | str = "1GiB",
        disk: str = "",
        *,
        exact: bool = False,
        salt: str = "",
        tiers: Iterable[Tier] = (),
        **settings: Any,
    ) -> None:
        memory = _memory(host_memory, disk, settings)
        arguments.text("salt", salt, encode=str.encode)
        arguments.flag("exact", exact)
        others = arguments.listed("tiers", tiers, "tiers")
        check_tiers(others, memory)
        block_tokens = block_tokens_of(memory)
        self._cached_model = CachedModel(model, block_tokens, memory.chunk_blocks)
        layout = self._cached_model.layout
        geometry = Geometry(layout.model.groups)
        loaded = Loaded(model, None, self._cached_model.identity, type(model).__name__)
        self._exact = exact
        writer = f"transformers-cache/{FORMAT}{'/pieces' if exact else ''}"
        name = namespace(namespace_fields(loaded, layout.model, salt, writer, self._cached_model.attention))
        grid = math.lcm(*(group.chunk_tokens for group in geometry.groups))
        self._grid = grid
        self._snapshot_tokens = snapshot_spacing(memory.snapshot_tokens, grid)
        self._step_tokens = memory.max_num_batched_tokens
        store = open_store(geometry, memory, name, self._snapshot_tokens, time.monotonic, others)
        assert store is not None, "host_memory was checked"
        transfer = CacheTransfer(store.arena.numpy(), store.slabs, layout.blocks)
        self._background = Background(store, transfer)
        self._finalizer = weakref.finalize(self, self._background.close, _CLOSE_S)
        self._namespace, self._groups = name, geometry.groups
        strategies = [strategy(group) for group in geometry.groups]
        most = prefill_tokens_per_s_most(model) if store.tiers else 0.0
        self._cost_model = CostModel(memory.load_timeout_s, memory.max_num_batched_tokens, most)
        self._reader = Reader(store, transfer, layout, strategies, self._cost_model, memory.lookup_timeout_s)
        self._writer = Writer(store, transfer, layout, strategies)
        self._padding = padding_of(model)
        self._counts = Counts()

    # what users call

    def restore(
        self, input_ids: Tokens, *, attention_mask: Tensor | None = None, timeout_s: float | None = None
    ) -> DynamicCache:
        """A cache with the longest stored prefix of a prompt, to be given to ``generate(past_key_values=...)`` together
        with the whole ``input_ids``; empty when nothing is stored. At least one token is left to compute.

        Args:
            input_ids: ``[tokens]`` or ``[rows, tokens]``, rows without padding; all rows resume at the same position.
            attention_mask: all ones, where the prompt has pad tokens that are not padding.
            timeout_s: the longest wait for disk and shared stores; by default what computing would take.

        Raises ``RequestError`` for padded batches, ``ModelError`` when the model was changed.
        """
        self._check()
        rows = rows_of(input_ids, attention_mask, self._padding)
        began_s = time.monotonic()
        with self._turn():
            keys = self._keys(rows, rows.length)
            cache = self._reader.read(self._cached_model.model.config, rows, keys, timeout_s)
            self._background.notice()
            found = caches.length_of(cache, self._cached_model.layout)
            counts = self._counts
            counts.restores += 1
            counts.restores_hit += found > 0
            counts.tokens_asked += rows.count * rows.length
            counts.tokens_restored += rows.count * found
            counts.restore_s += time.monotonic() - began_s
        caches.set_origin(cache, self._namespace, rows.tokens, found)
        return cache

    def prefill(
        self, input_ids: Tokens, *, attention_mask: Tensor | None = None, timeout_s: float | None = None
    ) -> DynamicCache:
        """``restore``, and compute and keep what was not stored, up to the last position before its end where a
        later prompt can resume; ``generate`` computes the few tokens that are left.

        What models with recurrent layers need: their state can be kept only while it stands at such a position. Others
        may use it too. With ``exact`` every piece between two of them is a forward of its own, so that it has the
        same bits whatever was stored, and only these pieces are kept: what ``generate`` computes has other shapes.
        """
        cache = self.restore(input_ids, attention_mask=attention_mask, timeout_s=timeout_s)
        rows = rows_of(input_ids, attention_mask, self._padding)
        ids = torch.tensor(rows.tokens, device=self._cached_model.model.device)
        begin = caches.length_of(cache, self._cached_model.layout)
        last = min(rows.length - 1, rows.plain) // self._grid * self._grid
        keys = self._keys(rows, begin)
        while begin < last:
            end = min(last, self._cut(begin))
            began_s = time.monotonic()
            self._cached_model.forward(ids[:, begin:end], begin, cache)
            self._cost_model.computed(rows.count * (end - begin), time.monotonic() - began_s)
            self._keep(cache, rows, keys, end, states=end == last or end % self._snapshot_tokens == 0)
            self._counts.tokens_prefilled += rows.count * (end - begin)
            begin = end
        caches.set_origin(cache, self._namespace, rows.tokens, begin)
        return cache

    def keep(self, cache: DynamicCache, ids: Tokens, *, attention_mask: Tensor | None = None) -> int:
        """Store what of a cache is not stored yet. The cache may be used on as soon as this returns.

        Args:
            cache: one of ``restore`` or ``prefill`` that ``generate`` has filled (or a plain ``DynamicCache``).
            ids: all tokens that it has seen, ``[tokens]`` or ``[rows, tokens]``: what ``generate`` returned.

        Returns how many of these tokens a later prompt that begins with them need not compute. Raises ``RequestError``
        for a cache that is not this model's or not of these tokens.
        """
        self._check()
        rows = rows_of(ids, attention_mask, self._padding, prompt=False)
        caches.check(cache, self._cached_model.layout, self._namespace)
        length = caches.length_of(cache, self._cached_model.layout)
        plain = min(length, rows.plain)
        if not caches.check_tokens(cache, rows.tokens, length) and rows.count > 1 and plain:
            self._cached_model.check_rows(cache, [row[:plain] for row in rows.tokens])
        self._counts.keeps += 1
        most = caches.in_pieces(cache) if self._exact else length
        return self._keep(cache, rows, self._keys(rows, 0), length, most=most)

    def stats(self) -> dict[str, Any]:
        """Counters since the start: ``prefixes`` (calls and tokens), ``store`` (host, disk and shared stores)."""
        with self._turn():
            return {"prefixes": asdict(self._counts), "store": self._background.store.stats()}

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Wait until everything kept has reached disk and shared stores, at most ``timeout_s``; whether it has."""
        with self._turn():
            return self._background.store.flush(timeout_s)

    def drop_host(self) -> int:
        """Forget what is in host memory; lower tiers keep theirs. How many chunks there were."""
        with self._turn():
            return self._background.store.drop_host()

    def check(self) -> None:
        """Assert the invariants of the store."""
        with self._turn():
            self._background.store.check()

    def close(self, timeout_s: float = 30.0) -> None:
        """Let writes finish within ``timeout_s``, give all memory back. Caches that were restored stay usable."""
        self._background.close(timeout_s)
        self._finalizer.detach()

    def __enter__(self) -> PrefixCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # inside

    def _check(self) -> None:
        self._check_open()
        self._cached_model.check()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """This thread has the store for itself, which is open."""
        self._check_open()
        with self._background.turn:
            self._check_open()
            yield

    def _check_open(self) -> None:
        if self._background.forked:
            raise StowageError(
                "this process was forked after the PrefixCache was made, whose memory and thread are its parent's: "
                "make a PrefixCache in this process."
            )
        if self._background.closed:
            raise StowageError("this PrefixCache is closed.")

    def _keys(self, rows: Rows, length: int) -> list[SequenceKeys]:
        """The keys of each row's first ``length`` tokens; they can be extended."""
        name = self._namespace
        if self._exact:  # as one of several rows a prompt is computed in another shape
            numerics = torch_name(self._cached_model.model.device)
            name = namespace({"prompts": name.hex(), "rows": rows.count, "torch": numerics})
        found = [SequenceKeys(name, self._groups) for _ in rows.tokens]
        for keys, tokens in zip(found, rows.tokens, strict=True):
            keys.extend(tokens, length)
        return found

    def _keep(
        self,
        cache: DynamicCache,
        rows: Rows,
        keys: Sequence[SequenceKeys],
        length: int,
        *,
        most: int = sys.maxsize,
        states: bool = True,
    ) -> int:
        """Store what the cache holds after ``length`` tokens, of those that count as they are, at ``most`` so many.
        ``keys``: of at most so many tokens of each row, extended here. ``states``: of recurrent layers too.
        """
        with self._turn():
            plain = min(length, rows.plain, most)
            for of_row, tokens in zip(keys, rows.tokens, strict=True):
                of_row.extend(tokens, plain)
            done = self._writer.write(cache, keys, length, plain, states=states)
            self._background.notice()
            self._counts.tokens_kept += done.tokens
            self._counts.bytes_kept += done.nbytes
            return done.resumable

    def _cut(self, begin: int) -> int:
        """Where a forward that begins at ``begin`` ends: at the next snapshot, if any are taken, and not too late."""
        if self._exact:
            return begin + self._grid
        end = begin + max(self._grid, self._step_tokens // self._grid * self._grid)
        if any(group.kind is Kind.RECURRENT for group in self._groups):
            end = min(end, begin // self._snapshot_tokens * self._snapshot_tokens + self._snapshot_tokens)
        return end


def _memory(host_memory: int | str, disk: str, settings: Mapping[str, Any]) -> Memory:
    allowed = [field.name for field in fields(Memory) if field.name not in _NOT_OURS]
    for name in settings:
        if name not in allowed:
            raise ConfigError(unknown_name(f"The setting {name!r} of a PrefixCache", name, allowed))
    memory = Memory(host_memory=host_memory, disk=disk, **settings)
    if not memory.host_memory_bytes:
        raise ConfigError(
            "host_memory is 0: a PrefixCache keeps prefixes in host memory first. Give it a size, such as 1GiB."
        )
    return memory
