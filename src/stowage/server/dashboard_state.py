"""The dashboard's state made from an engine's statistics: memory, transfers and totals.

Owns the shape of these parts of the state (docs/serving.md lists it). Numbers are copied or summed; a number that a
tier does not have is None. Paths and addresses of tiers are not included.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from stowage.engine.engine import Engine
from stowage.engine.placement_report import placement, shared_tiers, weights_bytes
from stowage.metrics import tiers_in

TRANSFER_NUMBERS: Final = (
    "transfers_under_way spills_waiting promoted promoted_bytes spills spilled_bytes timeouts"
).split()
Stats = Mapping[str, Any]
_USED: Final = "used."
TIER_NUMBERS: Final = (
    "bytes_used bytes_filled bytes_limit chunks loads_under_way stores_under_way reads read_bytes writes write_bytes "
    "corrupt read_errors write_errors timed_out"
).split()


class MemoryLayout:
    """How an engine's memory is divided, which does not change while it lives."""

    def __init__(self, engine: Engine) -> None:
        groups = engine.parts.layout.groups
        self._weights_bytes = weights_bytes(engine)
        uses = placement(engine)
        self._host_weights_bytes = sum(one.capacity_bytes for one in uses if one.tier == "host" and not one.tokens)
        self._groups = [
            {"kind": group.kind.value, "layers": len(group.layers), "block_tokens": group.block_tokens}
            for group in groups
        ]
        self._slabs: list[list[int]] = []
        self._tiers: list[tuple[str, bool]] = []
        if engine.store is not None:
            self._slabs = [list(slab.groups) for slab in engine.store.slabs]
            shared = shared_tiers(engine)
            self._tiers = [(tier.name, tier.name in shared) for tier in engine.store.tiers]

    def memory(self, stats: Stats) -> dict[str, Any]:
        """The use of `device`, of `host` (None without host memory), and of the `tiers` below, fastest first."""
        store = stats["store"]
        return {
            "device": {"weights_bytes": self._weights_bytes, "groups": [self._pool(pool) for pool in stats["pools"]]},
            "host": None if store is None else self._host(store),
            "tiers": [] if store is None else [self._tier(store, *tier) for tier in self._tiers],
        }

    def _pool(self, pool: Mapping[str, Any]) -> dict[str, Any]:
        each = pool["bytes"] // pool["blocks"]
        held = {"used_bytes": pool["used"] * each, "cached_bytes": pool["cached"] * each}
        return {**pool, **held, **self._groups[pool["group"]]}

    def _host(self, store: Mapping[str, Any]) -> dict[str, Any]:
        slabs = [
            {
                "slab": number,
                "groups": groups,
                "kinds": list(dict.fromkeys(self._groups[group]["kind"] for group in groups)),
                "bytes_used": store[f"slab{number}.bytes_used"],
                "bytes": store[f"slab{number}.bytes"],
            }
            for number, groups in enumerate(self._slabs)
        ]
        weights = {"weights_bytes": self._host_weights_bytes}
        return {"bytes": store["host_bytes"], "chunks_pinned": store["chunks_pinned"], "slabs": slabs, **weights}

    @staticmethod
    def _tier(store: Mapping[str, Any], name: str, shared: bool) -> dict[str, Any]:
        numbers = {number: store.get(f"{name}.{number}") for number in TIER_NUMBERS}
        breaker = {"breaker": store[f"{name}.breaker"], "breaker_opened": store[f"{name}.breaker_opened"]}
        return {"name": name, "shared": shared} | numbers | breaker


def totals(stats: Stats, counts: Mapping[str, float]) -> dict[str, Any]:
    """Since the start. `seconds_saved`: what computing the reused tokens would have taken, less the waits for tiers."""
    engine, store = stats["engine"], stats["store"] or {}
    looked_up = engine["tokens_reused"] + engine["prompt_tokens_computed"]
    corrupt = sum(value for name, value in store.items() if name.endswith(".corrupt"))
    return {
        **engine,
        "hit_rate": engine["tokens_reused"] / looked_up if looked_up else None,
        "seconds_saved": max(0.0, engine["recompute_saved_s"] - engine["tiers_waited_s"]),
        "corrupt_chunks": corrupt,
        "prefill_tokens_per_s": stats["prefill_tokens_per_s"],
        **counts,
    }


def transfers(stats: Stats) -> dict[str, Any] | None:
    """Between the host and the tiers below it; None without host memory."""
    store = stats["store"]
    if store is None:
        return None
    return {name: store[name] for name in TRANSFER_NUMBERS}


def sample_names(engine: Engine) -> list[str]:
    """The names of one sample's numbers: totals, and the share of each tier that is used, from 0 to 1."""
    names = "tokens_reused prompt_tokens_computed answer_tokens first_tokens first_token_s choices_open".split()
    tiers = ["device"]
    if engine.store is not None:
        names += ["promoted_bytes", "spilled_bytes"]
        tiers += ["host", *(tier.name for tier in engine.store.tiers)]
    return names + [_USED + tier for tier in tiers]


def sample(stats: Stats, counts: Mapping[str, float], choices_open: int) -> dict[str, float | None]:
    """The numbers of `sample_names`, and maybe more."""
    engine, pools, store = stats["engine"], stats["pools"], stats["store"]
    found: dict[str, float | None] = {
        "tokens_reused": engine["tokens_reused"],
        "prompt_tokens_computed": engine["prompt_tokens_computed"],
        "choices_open": choices_open,
        f"{_USED}device": _share(sum(map(_held_bytes, pools)), sum(pool["bytes"] for pool in pools)),
        **counts,
    }
    if store is not None:
        used = sum(value for name, value in store.items() if name.startswith("slab") and name.endswith(".bytes_used"))
        found |= {name: store[name] for name in ("promoted_bytes", "spilled_bytes")}
        found[f"{_USED}host"] = _share(used, store["host_bytes"])
        for tier in tiers_in(store):
            found[_USED + tier] = _share(store.get(f"{tier}.bytes_used"), store.get(f"{tier}.bytes_limit"))
    return found


def _held_bytes(pool: Mapping[str, Any]) -> float:
    """Bytes of a pool that are in use or cache a prefix."""
    return float(pool["bytes"] * (pool["used"] + pool["cached"]) / pool["blocks"])


def _share(part: float | None, whole: float | None) -> float | None:
    return round(part / whole, 4) if part is not None and whole else None
