"""What lies where: weights and KV of a running engine by hold, for people and for ``--json``."""

from __future__ import annotations

from dataclasses import dataclass

from stowage.config import format_size
from stowage.engine.engine import Engine
from stowage.tiers.protocol import Probing


@dataclass(frozen=True, slots=True)
class Place:
    """One thing in one hold: ``capacity_bytes`` is what it may take, ``tokens`` how many tokens of KV fit there (0: not
    KV).
    """

    hold: str
    what: str
    capacity_bytes: int
    tokens: int = 0

    def __str__(self) -> str:
        tokens = f", {self.tokens:,} tokens" if self.tokens else ""
        return f"{self.hold:<6} {self.what}: {format_size(self.capacity_bytes)}{tokens}"


def weights_bytes(engine: Engine) -> int:
    """Memory of the weights; those that several layers share count once."""
    return sum({p.data_ptr(): p.numel() * p.element_size() for p in engine.model.parameters()}.values())


def shared_tiers(engine: Engine) -> frozenset[str]:
    """The names of the tiers into which other machines may put what they have computed."""
    tiers = engine.store.tiers if engine.store is not None else ()
    return frozenset(tier.name for tier in tiers if isinstance(tier, Probing))


def placement(engine: Engine) -> list[Place]:
    """The holds of ``engine``, device first."""
    places = [Place("device", "weights, resident", weights_bytes(engine))]
    for pool in engine.parts.pools:
        group = pool.group
        what = f"KV of {len(group.layers)} {group.kind.value} layers"
        places.append(Place("device", what, pool.nbytes, pool.blocks * group.block_tokens))
    if engine.store is not None:
        for slab in engine.store.slabs:
            members = [engine.parts.layout.groups[index] for index in slab.groups]
            kinds = " and ".join(dict.fromkeys(group.kind.value for group in members))
            tokens = slab.slots * members[0].chunk_tokens // len(members)
            places.append(Place("host", f"chunks of {kinds} groups", slab.slots * slab.slot_bytes, tokens))
    if engine.memory.disk_directory is not None:
        per_token = sum(g.bytes_per_chunk / g.chunk_tokens for g in engine.parts.layout.groups)
        tokens = int(engine.memory.disk_bytes / per_token)
        places.append(Place("disk", f"segments in {engine.memory.disk_directory}", engine.memory.disk_bytes, tokens))
    return places
