"""What an engine's log says about the store when it starts."""

from __future__ import annotations

from collections.abc import Sequence

from stowage.cache.store import TieredStore
from stowage.config.addresses import shown
from stowage.config.memory import Memory, format_size
from stowage.core.geometry import Group, Kind, tokens_per_slot
from stowage.plugins.vllm.division import Division


def store_line(
    memory: Memory, store: TieredStore, groups: Sequence[Group], snapshot_tokens: int, step_tokens: int
) -> str:
    """One line. ``step_tokens``: vLLM computes so many tokens of a prompt at a time."""
    tokens = min(
        int(slab.slots / sum(1 / tokens_per_slot(groups[index], snapshot_tokens) for index in slab.groups))
        for slab in store.slabs
        if slab.slots
    )
    lower = [text for text in (memory.disk, shown(memory.valkey), shown(memory.object)) if text]
    chunks = ", ".join(f"{g.kind} {g.chunk_tokens} tokens, {format_size(g.bytes_per_chunk)}" for g in groups)
    text = f"Stowage: host {format_size(store.arena.bytes)} (about {tokens} tokens), below it "
    text += f"{', '.join(lower) or 'nothing'}. Chunks: {chunks}."
    if any(group.kind is Kind.RECURRENT for group in groups):
        text += f" States of recurrent layers are kept where steps end: at most every {step_tokens} tokens of a long "
        text += (
            "prompt, where prompts part that begin alike, and at the end; a smaller --max-num-batched-tokens has more."
        )
    return text


def ranks_line(division: Division, by_name: bool) -> str:
    """What is stored once for several ranks, and which layers keep a chunk to one number of ranks."""
    once, held = sum(division.bytes_per_block), sum(division.bytes_held)
    text = f" What several ranks hold is stored once: {once / held:.0%} of their bytes." if once < held else ""
    if by_name:
        own = sum(piece.is_of_one_size for pieces in division.pieces for piece in pieces)
        text += f" {own} tensors show no heads: chunks serve this number of ranks alone." if own else ""
        text += "" if own else " Chunks serve engines of any number of ranks."
    return text
