"""The longest sequence that fits into device pool and host memory, and how blocks are divided between groups for it.

Pure arithmetic of blocks and slots. A windowed or recurrent group needs a bounded number of blocks, all of them on the
device. A full group needs only the blocks being written there; older chunks may be offloaded (``long_context``).

    tokens   0                                   computed      + piece
             |== host ==|== host ==|-- on the device --|.. new ..|
    chunks        0          1          2         3
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from stowage.core.geometry import PAGE_BYTES, Geometry, Group, Kind, SlabClass, split_arena
from stowage.errors import BudgetError
from stowage.executor.block_pool import blocks_needed, bytes_needed, split_pool
from stowage.executor.replay.graphs.budget import with_share
from stowage.models.layout import BlockLayout

HOST_BYTES_MAX = 1 << 46
"""Upper end of the search for a host memory size."""
Counts = Mapping[int, int]
"""Usable device blocks by group index."""


def blocks_at_work(group: Group, piece_tokens: int) -> int:
    """Blocks of a full group that must be on the device to compute ``piece_tokens`` tokens, at most: those of the
    incomplete chunk, and those of the piece.
    """
    return -(-(group.chunk_tokens - 1 + piece_tokens) // group.block_tokens)


def chunks_offloaded(group: Group, tokens: int, blocks: int) -> int:
    """Chunks of a full group that must be offloaded when a sequence of ``tokens`` has ``blocks`` device blocks."""
    return max(0, -(-(-(-tokens // group.block_tokens) - blocks) // group.blocks_per_chunk))


@dataclass(frozen=True, slots=True)
class Capacity:
    """The groups, the slots of host memory (none: off), and the most and the fewest tokens computed at once."""

    layouts: tuple[BlockLayout, ...]
    slabs: tuple[SlabClass, ...]
    max_num_batched_tokens: int
    piece_tokens: int
    context_tokens: int

    def fits(self, tokens: int, counts: Counts) -> bool:
        """Whether a sequence of ``tokens`` tokens can be run when it is alone."""
        missing = {layout.group.index: self._is_short(layout, tokens, counts) for layout in self.layouts}
        if not any(missing.values()):
            return True
        for layout in self.layouts:
            group = layout.group
            if missing[group.index] and (
                group.kind is not Kind.FULL or counts[group.index] < blocks_at_work(group, self.piece_tokens)
            ):
                return False
        needed = {
            g: chunks_offloaded(self.layouts[g].group, tokens, counts[g]) for g, short in missing.items() if short
        }
        return self.has_slots([needed])

    def has_slots(self, needed: Sequence[Counts]) -> bool:
        """Whether host memory has slots for so many chunks of each group, all of ``needed`` together."""
        total = Counter[int]()
        for chunks in needed:
            total.update(chunks)
        held = {group for slab in self.slabs for group in slab.groups}
        return total.keys() <= held and all(
            sum(total[group] for group in slab.groups) <= slab.slots for slab in self.slabs
        )

    def _is_short(self, layout: BlockLayout, tokens: int, counts: Counts) -> bool:
        return blocks_needed(layout.group, tokens, self.max_num_batched_tokens) > counts[layout.group.index]

    def longest(self, counts: Counts) -> int:
        """Tokens, up to the context, of the longest sequence that can be run when it is alone."""
        least, most = 0, self.context_tokens
        while least < most:
            tokens = (least + most + 1) // 2
            if self.fits(tokens, counts):
                least = tokens
            else:
                most = tokens - 1
        return least

    def divide(self, device_bytes: int) -> Counts:
        """The device's blocks: as ``split_pool`` has them, or, where sequences can become longer so, as much for
        windows and states as one sequence of any length needs, and the rest for full groups. Raises ``BudgetError``.
        """
        even = split_pool(self.layouts, device_bytes, self.context_tokens, self.max_num_batched_tokens)
        bounded = self._bounded_first(device_bytes) if self.slabs else None
        if bounded is None or self.longest(bounded) <= self.longest(even):
            return even
        return bounded

    def _bounded_first(self, device_bytes: int) -> Counts | None:
        full = [layout for layout in self.layouts if layout.group.kind is Kind.FULL]
        counts = {
            layout.group.index: blocks_needed(layout.group, self.context_tokens, self.max_num_batched_tokens)
            for layout in self.layouts
            if layout.group.kind is not Kind.FULL
        }
        every = sum(layout.group.bytes_per_block * (counts.get(layout.group.index, 0) + 1) for layout in self.layouts)
        per_token = sum(layout.group.bytes_per_block / layout.group.block_tokens for layout in full)
        if not full or not counts or device_bytes <= every:
            return None
        tokens = (device_bytes - every) / per_token
        return counts | {layout.group.index: int(tokens / layout.group.block_tokens) for layout in full}

    def least_device_bytes(self, tokens: int, *, recorded: bool) -> int:
        """The KV budget for a sequence of ``tokens`` on the device; ``recorded``: with recorded steps' share."""
        need = bytes_needed(self.layouts, tokens, self.max_num_batched_tokens)
        return with_share(need) if recorded else need

    def least_host_bytes(self, tokens: int, device_bytes: int, snapshot_tokens: int) -> int | None:
        """The least host memory, to 4 KiB, with which a sequence of ``tokens`` tokens can be run on a device of so many
        bytes; ``None``: none is enough.
        """
        geometry = Geometry(tuple(layout.group for layout in self.layouts))

        def suffices(host_bytes: int) -> bool:
            try:
                slabs = split_arena(geometry, host_bytes, snapshot_tokens)
            except BudgetError:
                return False
            tried = replace(self, slabs=slabs)
            return tried.fits(tokens, tried.divide(device_bytes))

        most = 1 << 16
        while not suffices(most):
            most *= 2
            if most > HOST_BYTES_MAX:
                return None
        least = most // 2
        while most - least > PAGE_BYTES:
            middle = (least + most) // 2
            least, most = (least, middle) if suffices(middle) else (middle, most)
        return most
