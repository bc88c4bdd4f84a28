"""The device pool: per group a fixed number of blocks, who uses them, and which chunks can still be found in them.

Owns the device bytes of the KV cache and the device prefix cache. Invariants (``check``): a block is in exactly one of
{in use, free, cached}; only unused blocks are given out; a block is named by at most one chunk; the bytes
never exceed the budget.

Never reads or writes what lies in a block (attention and ``transfer`` do), except that a block is zeroed before it is
given out: stale values of another sequence may be infinite or NaN, and zero times NaN in a masked position is NaN.

Row 0 of the storage is the padding block: always zero, never given out. Block ids therefore start at 1; ``NULL_BLOCK``
marks a hole in a block table.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from stowage.core.geometry import ALIGNMENT_BYTES, NULL_BLOCK, PAGE_BYTES, Group, Kind
from stowage.errors import BudgetError
from stowage.models.layout import BlockLayout
from stowage.native.memory import HUGE_BYTES, pages

PLANNED_CONTEXT_TOKENS = 8192
PADDING_BLOCK = 0
_AHEAD_BYTES: Final = 64 << 20
"""Some prompts' worth; what a process that was asked little takes more of its budget than it needs."""


class BlockPool:
    """The usable ``blocks`` of the group of ``layout`` on the device, and one row more, for padding."""

    def __init__(self, layout: BlockLayout, blocks: int, device: torch.device) -> None:
        self.group = layout.group
        self.layout = layout
        self.blocks = blocks
        self.evicted = 0
        self.storage = _zeros(blocks + 1, self.group.bytes_per_block, device)
        self.views = {layer.index: self._layer_views(layer.index) for layer in layout.layers}
        for layer in layout.layers:
            self.views.update(dict.fromkeys(layer.readers, self.views[layer.index]))
        self.offloaded: dict[int, tuple[torch.Tensor, ...]] = {}
        self._users = np.zeros(blocks + 1, dtype=np.int32)
        self._free = list(range(blocks, 0, -1))  # the lowest is given out first
        self._highest = 0  # of the blocks given out so far: those above it are zero still
        self._touched_bytes = 0
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._masks: dict[bytes, int] = {}
        self._chunks: dict[bytes, list[int]] = {}
        self._names: dict[int, tuple[bytes, int]] = {}

    def _layer_views(self, index: int) -> tuple[torch.Tensor, ...]:
        """Views ``[rows, block_tokens, heads, head_dim]`` (attention) or ``[rows, *state]`` over the storage."""
        return self._views_of(self.storage.view(-1), index, self.blocks + 1, self.group.bytes_per_block)

    def _views_of(self, memory: torch.Tensor, index: int, rows: int, row_bytes: int) -> tuple[torch.Tensor, ...]:
        """A layer's tensors of ``rows`` blocks that begin every ``row_bytes`` bytes of ``memory``."""
        layer = next(layer for layer in self.layout.layers if layer.index == index)
        views = []
        for tensor, offset in zip(layer.tensors, self.layout.offsets[index], strict=True):
            per_token = () if self.group.kind is Kind.RECURRENT else (self.group.block_tokens // tensor.every,)
            shape = (*per_token, *tensor.shape)
            if tensor.name and per_token:  # the fallback reads whole blocks, head by head
                shape = (tensor.shape[0], *per_token, *tensor.shape[1:])
            strides = [1]
            for extent in reversed(shape[1:]):
                strides.insert(0, strides[0] * extent)
            itemsize = tensor.dtype.itemsize
            typed = memory.view(tensor.dtype)
            views.append(typed.as_strided((rows, *shape), (row_bytes // itemsize, *strides), offset // itemsize))
        return tuple(views)

    def map_host_arena(self, arena: torch.Tensor) -> None:
        """Let blocks that lie in ``arena``, all bytes of host memory, be read where they are: afterwards ``offloaded``
        has for each layer what ``views`` has, of the blocks that begin at every multiple of ``ALIGNMENT_BYTES``.
        """
        rows = (arena.numel() - self.group.bytes_per_block) // ALIGNMENT_BYTES + 1
        for layer in self.layout.layers:
            self.offloaded[layer.index] = self._views_of(arena, layer.index, rows, ALIGNMENT_BYTES)
            self.offloaded.update(dict.fromkeys(layer.readers, self.offloaded[layer.index]))

    @property
    def nbytes(self) -> int:
        return self.storage.numel()

    @property
    def available(self) -> int:
        """Blocks that ``allocate`` can give out now, counting cached ones that it would evict."""
        return len(self._free) + len(self._cached)

    @property
    def cached_blocks(self) -> int:
        return len(self._cached)

    def allocate(self, count: int) -> list[int] | None:
        """``count`` zeroed blocks with one user each, evicting the least recently used; ``None``: there are fewer."""
        if count > self.available:
            return None
        taken = [self._free.pop() for _ in range(min(count, len(self._free)))]
        while len(taken) < count:
            block, _ = self._cached.popitem(last=False)
            self._unname(block)
            self.evicted += 1
            taken.append(block)
        self._users[taken] = 1
        self._zero([block for block in taken if block <= self._highest])
        self._highest = max([self._highest, *taken])
        return taken

    def touch_ahead(self) -> bool:
        """Have the system give memory, a huge page, for blocks that will be given out next. True: there is more to do.

        A prompt whose blocks are new waits for it otherwise: 1 ms for 12 MB, and up to 24 ms where a virtual machine's
        host gives it, too. To be called when nothing else is to be done.
        """
        given_bytes = (self._highest + 1) * self.group.bytes_per_block
        begin, end = max(self._touched_bytes, given_bytes), min(given_bytes + _AHEAD_BYTES, self.nbytes)
        if self.storage.device.type != "cpu" or begin >= end:
            return False
        self._touched_bytes = min(begin + HUGE_BYTES, end)
        self.storage.view(-1)[begin : self._touched_bytes : PAGE_BYTES].zero_()  # as they are
        return self._touched_bytes < end

    def _zero(self, blocks: list[int]) -> None:
        if self.storage.device.type == "cpu":  # a call each: quicker here than one for scattered rows
            for block in blocks:
                self.storage[block].zero_()
        elif blocks:
            self.storage.index_fill_(0, torch.tensor(blocks, device=self.storage.device), 0)

    def retain(self, blocks: Iterable[int]) -> None:
        """Add a user to each of ``blocks``, which may be cached."""
        for block in blocks:
            self._users[block] += 1
            if self._users[block] == 1:
                del self._cached[block]

    def release(self, blocks: Sequence[int]) -> None:
        """Remove a user of each of ``blocks``. Later ones are evictable first: a prefix outlives what follows."""
        for block in reversed(blocks):
            self._users[block] -= 1
            assert self._users[block] >= 0, f"block {block} released once too often"
            if self._users[block] == 0:
                if block in self._names:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def name(self, key: bytes, blocks: Sequence[int]) -> None:
        """Let chunk ``key`` be found in ``blocks`` (``NULL_BLOCK``: none). Blocks found before keep their place."""
        known = self._chunks.setdefault(key, [NULL_BLOCK] * self.group.blocks_per_chunk)
        for offset, block in enumerate(blocks):
            if block != NULL_BLOCK and known[offset] == NULL_BLOCK and block not in self._names:
                known[offset] = block
                self._names[block] = (key, offset)
                self._masks[key] = self._masks.get(key, 0) | 1 << offset
        if key not in self._masks:
            del self._chunks[key]

    def _unname(self, block: int) -> None:
        key, offset = self._names.pop(block)
        self._chunks[key][offset] = NULL_BLOCK
        self._masks[key] &= ~(1 << offset)
        if not self._masks[key]:
            del self._masks[key], self._chunks[key]

    def lookup(self, keys: Sequence[bytes]) -> NDArray[np.uint64]:
        """The valid-block mask of each chunk, 0 where none of its blocks is here."""
        return np.fromiter(map(self._masks.get, keys, repeat(0)), dtype=np.uint64, count=len(keys))

    def find(self, key: bytes) -> list[int]:
        """The blocks of a chunk, ``NULL_BLOCK`` where one is absent."""
        return self._chunks.get(key) or [NULL_BLOCK] * self.group.blocks_per_chunk

    def drop_cache(self) -> int:
        """Forget every cached chunk, also those that sequences still use; returns how many blocks became free."""
        freed = list(self._cached)
        self._cached.clear()
        self._free.extend(freed)
        self._names.clear()
        self._chunks.clear()
        self._masks.clear()
        return len(freed)

    def stats(self) -> dict[str, int | str]:
        """Blocks and bytes of now; ``evicted`` counts since the start."""
        return {
            "group": self.group.index,
            "kind": self.group.kind.value,
            "blocks": self.blocks,
            "used": self.blocks - self.available,
            "cached": self.cached_blocks,
            "evicted": self.evicted,
            "bytes": self.nbytes,
        }

    def check(self) -> None:
        """Assert the invariants named in the module's docstring."""
        used = {int(b) for b in np.flatnonzero(self._users)}
        free, cached = set(self._free), set(self._cached)
        assert len(self._free) == len(free), "a block is free twice"
        assert not used & free and not used & cached and not free & cached, "a block is in two states"
        assert used | free | cached == set(range(1, self.blocks + 1)), "a block is lost"
        assert cached <= set(self._names), "a cached block has no name"
        assert not free & set(self._names), "a free block has a name"
        named = {(k, o): b for k, blocks in self._chunks.items() for o, b in enumerate(blocks) if b != NULL_BLOCK}
        assert {b: n for n, b in named.items()} == self._names and len(named) == len(self._names), "names disagree"
        assert all(
            self._masks[k] == sum(1 << o for o, b in enumerate(v) if b != NULL_BLOCK) for k, v in self._chunks.items()
        )


def blocks_needed(group: Group, tokens: int, max_num_batched_tokens: int) -> int:
    """Blocks that one sequence of ``tokens`` tokens holds at once in this group, at most, while it is computed
    ``max_num_batched_tokens`` at a time; 0: that one query reads.
    """
    if group.kind is Kind.RECURRENT:
        return 2  # the live state, and a snapshot until it has been stored
    every = group.blocks_of(tokens)
    if group.kind is Kind.FULL:
        return every
    return min(every, -(-(group.window + max_num_batched_tokens) // group.block_tokens) + 1)


def bytes_needed(layouts: Sequence[BlockLayout], tokens: int, max_num_batched_tokens: int) -> int:
    """Device bytes that one sequence of ``tokens`` tokens needs, with each group's padding block."""
    return sum((blocks_needed(b.group, tokens, max_num_batched_tokens) + 1) * b.group.bytes_per_block for b in layouts)


def split_pool(
    layouts: Sequence[BlockLayout], device_bytes: int, context_tokens: int, max_num_batched_tokens: int
) -> Mapping[int, int]:
    """Divide ``device_bytes`` over the groups, so that the same number of sequences fits into each; blocks by group
    index.

    Sequences are taken to be ``min(context, 8192)`` tokens long, or as long as one can be when not even one such fits.
    Raises ``BudgetError`` when the budget holds no sequence of even one block, and says what the least is.
    """
    least = bytes_needed(layouts, max(b.group.block_tokens for b in layouts), max_num_batched_tokens)
    if device_bytes < least:
        raise BudgetError(
            f"a device KV budget of {device_bytes:,} bytes holds no sequence at all. The least that works for this "
            f"model is {least:,} bytes: --kv-cache-memory {-(-least // 1024)}KiB (more, to run prompts of a useful "
            "length)."
        )
    tokens = _longest(layouts, device_bytes, min(context_tokens, PLANNED_CONTEXT_TOKENS), max_num_batched_tokens)
    padding = sum(b.group.bytes_per_block for b in layouts)
    share = (device_bytes - padding) / (bytes_needed(layouts, tokens, max_num_batched_tokens) - padding)
    return {b.group.index: int(blocks_needed(b.group, tokens, max_num_batched_tokens) * share) for b in layouts}


def _longest(layouts: Sequence[BlockLayout], device_bytes: int, limit_tokens: int, max_num_batched_tokens: int) -> int:
    """The longest sequence, up to ``limit_tokens``, that fits into ``device_bytes`` alone; at least 1."""
    lengths = range(1, limit_tokens + 1)
    return max(1, bisect_right(lengths, device_bytes, key=lambda n: bytes_needed(layouts, n, max_num_batched_tokens)))


def _zeros(rows: int, row_bytes: int, device: torch.device) -> torch.Tensor:
    """Memory that is zero. The CPU's is given page by page when it is first written, in huge ones: torch writes all of
    it at once, which takes a second for 2 GiB.
    """
    if device.type != "cpu":
        return torch.zeros((rows, row_bytes), dtype=torch.uint8, device=device)
    return torch.frombuffer(pages(rows * row_bytes), dtype=torch.uint8).view(rows, row_bytes)
