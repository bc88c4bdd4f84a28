"""Reports what each tier of a running engine holds, weights and KV, for people and for ``--json``."""

from __future__ import annotations

from dataclasses import dataclass

from stowage.config.memory import format_size
from stowage.engine.engine import Engine
from stowage.storage.protocol import Probing
from stowage.weights.source import WeightSource
from stowage.weights.weight_unit import Delivery


@dataclass(frozen=True, slots=True)
class TierUse:
    """One use of one tier. ``capacity_bytes``: its size; ``tokens``: how many tokens of KV fit there (0: not KV)."""

    tier: str
    what: str
    capacity_bytes: int
    tokens: int = 0

    def __str__(self) -> str:
        tokens = f", {self.tokens:,} tokens" if self.tokens else ""
        return f"{self.tier:<6} {self.what}: {format_size(self.capacity_bytes)}{tokens}"


def weights_bytes(engine: Engine) -> int:
    """Device memory of the weights; those that several layers share count once."""
    if engine.weights is not None:
        return engine.weights.placement.device_bytes
    return sum({p.data_ptr(): p.numel() * p.element_size() for p in engine.model.parameters()}.values())


def shared_tiers(engine: Engine) -> frozenset[str]:
    """The names of the tiers into which other machines may put what they have computed."""
    tiers = engine.store.tiers if engine.store is not None else ()
    return frozenset(tier.name for tier in tiers if isinstance(tier, Probing))


def _weights(source: WeightSource) -> list[TierUse]:
    placement = source.placement
    mapped = "weights, read there by the device" if placement.to_device else "weights, mapped from the checkpoint"
    held = {
        ("device", "weights, resident"): placement.small_bytes + placement.nbytes(Delivery.RESIDENT),
        ("device", f"weights, ring of {placement.ring_slots} buffers"): source.ring_bytes,
        ("device", f"weights, cache of {source.stats()['cache_experts']} experts"): source.cache_bytes,
        ("host", mapped): placement.nbytes(Delivery.MAPPED),
        ("host", "weights, copied ahead"): placement.nbytes(Delivery.PREFETCH),
        ("host", "weights, on their way to the device"): placement.staging_bytes,
        ("disk", "weights, read for every step"): placement.pass_bytes,
        ("host", "experts, copied as they are chosen"): placement.held_bytes,
        ("disk", "experts, read as they are chosen"): placement.nbytes(Delivery.EXPERTS) - placement.held_bytes,
        ("disk", "embeddings, read row by row"): placement.nbytes(Delivery.ROWS),
        ("disk", "weights, in another form than the checkpoint's"): source.scratch_bytes,
    }
    return [TierUse(tier, what, nbytes) for (tier, what), nbytes in held.items() if nbytes]


def placement(engine: Engine) -> list[TierUse]:
    """The tiers of ``engine``, device first."""
    found = _weights(engine.weights) if engine.weights is not None else []
    found = found or [TierUse("device", "weights, resident", weights_bytes(engine))]
    for pool in engine.parts.pools:
        group = pool.group
        what = f"KV of {len(group.layers)} {group.kind.value} layers"
        found.append(TierUse("device", what, pool.nbytes, pool.blocks * group.block_tokens))
    if engine.store is not None:
        for slab in engine.store.slabs:
            members = [engine.parts.layout.groups[index] for index in slab.groups]
            kinds = " and ".join(dict.fromkeys(group.kind.value for group in members))
            tokens = slab.slots * members[0].chunk_tokens // len(members)
            found.append(TierUse("host", f"chunks of {kinds} groups", slab.slots * slab.slot_bytes, tokens))
    if engine.memory.disk_directory is not None:
        per_token = sum(g.bytes_per_chunk / g.chunk_tokens for g in engine.parts.layout.groups)
        tokens = int(engine.memory.disk_bytes / per_token)
        found.append(TierUse("disk", f"segments in {engine.memory.disk_directory}", engine.memory.disk_bytes, tokens))
    return found
