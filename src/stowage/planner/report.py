"""A placement for people and for programs: rows of a table, hints, JSON.

Owns wording and grouping; every number comes from the solution.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from stowage.config.memory import format_size
from stowage.planner.machine import Machine
from stowage.planner.predict import Step
from stowage.planner.shapes import Model
from stowage.planner.solve import DEVICE, TIERS, Alternative, Placed, Solution
from stowage.weights.weight_unit import Delivery


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. ``step_bytes``: bytes of it that one decoding step fetches."""

    tier: str
    what: str
    delivery: str
    nbytes: int
    step_bytes: int = 0


def rows(solution: Solution) -> list[Row]:
    """The contents of each tier, device first; equal parts are one line."""
    found = [row for tier in TIERS for row in _weights(solution, tier)]
    model, work = solution.model, solution.workload
    if solution.small_bytes:
        found.append(Row(DEVICE, "norm and other small weights", "resident", solution.small_bytes))
    if solution.cache_bytes:
        held = f"{1 - solution.offloaded.missed_share:.0%} of the experts"
        found.append(Row(DEVICE, f"cache of {held}", "", solution.cache_bytes))
    kv = f"KV of {work.batch} x {work.context_tokens:,} tokens{_kinds(model)}"
    found.append(Row(DEVICE, kv, "", solution.kv_bytes))
    if solution.ring_bytes:
        slots = f"ring of {solution.ring_slots} x {format_size(solution.slot_bytes)}"
        found.append(Row(DEVICE, slots, "", solution.ring_bytes))
    found.append(Row(DEVICE, f"a forward of {work.piece:,} tokens works with", "", solution.working_bytes))
    for tier in TIERS:
        if solution.left_bytes(tier) and (tokens := solution.prefix_tokens(tier)):
            found.append(Row(tier, f"left: prefixes of {tokens:,} tokens", "", solution.left_bytes(tier)))
    return sorted(found, key=lambda row: TIERS.index(row.tier))


def _weights(solution: Solution, tier: str) -> Iterable[Row]:
    parts = [part for part in solution.placed if part.tier == tier]
    for delivery in dict.fromkeys(part.delivery for part in parts):
        alike = [part for part in parts if part.delivery == delivery and part.layer >= 0]
        if alike:
            word = "layer" if len(alike) == 1 else "layers"
            what = f"{word} {numbers(part.layer for part in alike)}"
            step_bytes = _fetched(alike)
            if delivery == Delivery.EXPERTS:
                what, step_bytes = f"experts of {what}", solution.prediction.decode.missed_bytes
            elif solution.cache_bytes:
                what = f"{what} without experts"
            yield Row(tier, what, delivery, sum(part.nbytes for part in alike), step_bytes)
    for part in parts:
        if part.layer < 0:
            yield Row(tier, part.name, part.delivery, part.nbytes, _fetched([part]))


def numbers(found: Iterable[int]) -> str:
    """Numbers as ranges: ``0-3, 8``; of many ranges only how many numbers there are."""
    runs: list[list[int]] = []
    for number in sorted(found):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    if len(runs) > 6:
        return f"{runs[0][0]} to {runs[-1][1]} ({sum(last - first + 1 for first, last in runs)} of them, evenly)"
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _fetched(parts: list[Placed]) -> int:
    """Bytes of ``parts`` that are fetched for one decoding step."""
    return sum(part.nbytes for part in parts if Delivery(part.delivery).rings)


def _kinds(model: Model) -> str:
    """The numbers of layers by cache kind, where not all are full attention."""
    kinds = Counter("recurrent" if one.recurrent else "windowed" if one.window else "full" for one in model.kept)
    if set(kinds) == {"full"} and kinds["full"] >= len(model.layers):
        return ""
    named = [f"{kinds[name]} {name}" for name in ("full", "windowed", "recurrent") if kinds[name]]
    return " (" + ", ".join(named) + " layers)" if named else ""


def hints(solution: Solution, alternatives: list[Alternative]) -> list[str]:
    """What limits this placement, what would help, and how far its numbers can be trusted."""
    found = [_limit(solution)]
    here = solution.prediction.tokens_per_s
    different = {other.device_bytes: other for other in reversed(alternatives)}  # without host memory two are one
    for other in reversed(different.values()):
        if other.device_bytes > solution.budgets.device_bytes and other.prediction.tokens_per_s > 1.02 * here:
            found.append(
                f"With a device memory of {format_size(other.device_bytes)}, {other.name}: "
                f"{other.prediction.tokens_per_s:.3g} tokens/s."
            )
    if any(one.recurrent for one in solution.model.kept):
        found.append("Recurrent layers are predicted by their products; Transformers' own code for them may be slower.")
    if solution.workload.context_tokens > solution.model.context_tokens:
        found.append(f"The model's own context ends after {solution.model.context_tokens:,} tokens.")
    if solution.cache_bytes:
        found.append("Experts are taken to be chosen evenly; real text prefers some, and a cache has more of them.")
    found += solution.model.notes
    if solution.machine.busy:
        found.append(busy_hint(solution.machine))
    if not solution.machine.measured:
        found.append(f"Speeds are {solution.machine.name}: for real ones run `stowage probe` on the machine.")
    return found


def busy_hint(machine: Machine) -> str:
    """The hint for a machine that was measured while it was busy."""
    return (
        f"It was measured while others took the cores ({machine.waited_share:.0%} of the time was waiting for them), "
        "so it is faster than this says. When it is quiet: stowage probe"
    )


def _limit(solution: Solution) -> str:
    step: Step = solution.prediction.decode
    waits = f"{step.total_s:,.2f} s per step" if step.total_s >= 1 else f"{step.total_s * 1000:,.1f} ms per step"
    if step.limit == "compute":
        return f"Computing is what limits decoding ({waits}); more memory does not help."
    if step.limit == "link":
        rate = format_size(int(solution.machine.link_in))
        fetched = format_size(step.link_bytes)
        return f"The link to the device limits decoding: {fetched} per step at {rate}/s ({waits})."
    rate = format_size(int(solution.machine.disk_bytes_per_s))
    return (
        f"The disk limits decoding: {format_size(step.disk_bytes + step.missed_bytes)} per step at {rate}/s ({waits})."
    )


def to_json(solution: Solution, alternatives: list[Alternative]) -> dict[str, Any]:
    """Everything that the table, the picture and the hints say; docs/planning.md lists the keys."""
    model, machine, prediction = solution.model, solution.machine, solution.prediction
    decode = prediction.decode
    return {
        "model": {
            "family": model.family,
            "dtype": model.dtype,
            "layers": len(model.layers),
            "parameters": model.total_parameters,
            "active_parameters": model.active_parameters,
            "parameters_by_kind": model.parameters_by_kind(),
            "bytes": model.total_bytes,
            "kv_bytes_per_token": model.token_bytes(),
            "source": model.source,
        },
        "machine": {"name": machine.name, "kind": machine.kind, "measured": machine.measured},
        "budgets": asdict(solution.budgets),
        "workload": asdict(solution.workload),
        "tiers": {
            tier: {
                "used_bytes": solution.used_bytes(tier),
                "weights_bytes": solution.weights_bytes(tier),
                "left_bytes": solution.left_bytes(tier),
                "prefix_tokens": solution.prefix_tokens(tier),
            }
            for tier in TIERS
        },
        "device": {
            "kv_bytes": solution.kv_bytes,
            "ring_slots": solution.ring_slots,
            "ring_bytes": solution.ring_bytes,
            "cache_bytes": solution.cache_bytes,
            "working_bytes": solution.working_bytes,
            "small_bytes": solution.small_bytes,
        },
        "weights": [asdict(part) for part in solution.placed],
        "prediction": {
            "decode_tokens_per_s": prediction.tokens_per_s,
            "ttft_s": prediction.ttft_s,
            "ttft_batch_s": prediction.ttft_batch_s,
            "prefill_tokens_per_s": prediction.prefill_tokens_per_s,
            "limit": decode.limit,
            "step": asdict(decode) | {"total_s": decode.total_s},
        },
        "alternatives": [
            {
                "name": other.name,
                "device_bytes": other.device_bytes,
                "decode_tokens_per_s": other.prediction.tokens_per_s,
                "ttft_s": other.prediction.ttft_s,
            }
            for other in alternatives
        ],
        "hints": hints(solution, alternatives),
    }


def segments(solution: Solution, tier: str) -> list[tuple[str, int]]:
    """The contents of a tier as (kind, bytes), free memory last, for the bars of both pictures."""
    found = [("weights", solution.weights_bytes(tier) + (solution.small_bytes if tier == DEVICE else 0))]
    if tier == DEVICE:
        found += [
            ("KV", solution.kv_bytes),
            ("ring", solution.ring_bytes),
            ("cache", solution.cache_bytes),
            ("working", solution.working_bytes),
        ]
    found.append(("free", solution.left_bytes(tier)))
    return [(kind, nbytes) for kind, nbytes in found if nbytes]


def layer_tiers(solution: Solution) -> list[str]:
    """The tier of each layer, in the model's order; the disk for a layer whose experts are cached."""
    return list({part.layer: part.tier for part in solution.placed if part.layer >= 0}.values())
