"""Placements for given budgets: never over them, never slower with more, as good as trying everything."""

import itertools
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stowage.errors import BudgetError
from stowage.planner.machine import Machine
from stowage.planner.predict import Offloaded, decode_step
from stowage.planner.shapes import Model
from stowage.planner.solve import DEVICE, DISK, HOST, TIERS, Budgets, Placements, Solution, solve, spread_order
from tests.planner.made import MIB, WORK, machine, model

machines = st.builds(
    machine, st.sampled_from(["cpu", "cuda"]), st.sampled_from([1e8, 1e9, 1e11]), st.sampled_from([1e9, 3e10])
)
models = st.builds(
    model,
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    head=st.integers(0, 20),
    embedding=st.integers(0, 20),
    experts=st.sampled_from([0, 0, 3, 8]),
    expert=st.integers(1, 3),
)
sizes = st.integers(0, 120).map(lambda n: n * MIB)
budgets = st.builds(Budgets, sizes, sizes, sizes)


@given(models, machines, budgets)
def test_never_over_a_budget_and_nothing_is_lost(made: Model, on: Machine, given_bytes: Budgets) -> None:
    try:
        solution = solve(made, on, given_bytes, WORK)
    except BudgetError:
        return
    solution.check()
    assert solution.used_bytes(DEVICE) <= given_bytes.device_bytes
    assert solution.used_bytes(HOST) <= given_bytes.host_bytes
    assert solution.used_bytes(DISK) <= given_bytes.disk_bytes
    kept = made.rest_bytes + solution.kv_bytes + solution.working_bytes + solution.ring_slots * solution.slot_bytes
    kept += solution.cache_bytes
    assert solution.used_bytes(DEVICE) == kept + solution.weights_bytes(DEVICE)
    assert sum(solution.weights_bytes(tier) for tier in TIERS) + made.rest_bytes == made.total_bytes
    ringed = [part for part in solution.placed if part.delivery in ("stream", "prefetch")]
    assert all(part.nbytes < solution.slot_bytes for part in ringed)
    assert bool(ringed) == bool(solution.ring_slots)
    layers = {layer.index: 0 for layer in made.layers}
    for part in solution.placed:
        if part.layer >= 0:
            layers[part.layer] += part.nbytes
    assert layers == {layer.index: layer.total_bytes for layer in made.layers}
    on_disk = sum(part.nbytes for part in solution.placed if part.delivery == "stream")
    assert solution.offloaded.disk_bytes == solution.prediction.decode.disk_bytes == on_disk
    on_host = sum(part.nbytes for part in solution.placed if part.tier == HOST)
    over_link = on_disk + on_host if on.has_device else 0
    assert solution.offloaded.link_bytes == solution.prediction.decode.link_bytes == over_link


@given(models, machines, budgets, sizes, sizes, sizes)
def test_more_memory_is_never_predicted_slower(
    made: Model, on: Machine, given_bytes: Budgets, device: int, host: int, disk: int
) -> None:
    more = Budgets(given_bytes.device_bytes + device, given_bytes.host_bytes + host, given_bytes.disk_bytes + disk)
    try:
        before = solve(made, on, given_bytes, WORK).prediction
    except BudgetError:
        return
    solution = solve(made, on, more, WORK)
    after = solution.prediction
    assert after.tokens_per_s >= before.tokens_per_s
    assert after.ttft_s <= before.ttft_s or solution.cache_bytes, "only a cache of experts trades the one for the other"


@given(models, machines, budgets)
def test_the_least_that_is_said_works_and_less_does_not(made: Model, on: Machine, given_bytes: Budgets) -> None:
    room = Placements(made, on, WORK)
    least = room.least_device_bytes(given_bytes.host_bytes, given_bytes.disk_bytes)
    solve(made, on, replace(given_bytes, device_bytes=least), WORK)
    with pytest.raises(BudgetError):
        solve(made, on, replace(given_bytes, device_bytes=least - 1), WORK)
    for name, found in {
        "host_bytes": room.least_host_bytes(given_bytes.device_bytes, given_bytes.disk_bytes),
        "disk_bytes": room.least_disk_bytes(given_bytes.device_bytes, given_bytes.host_bytes),
    }.items():
        plenty = replace(given_bytes, **{name: made.total_bytes})
        if found is None:
            with pytest.raises(BudgetError):
                solve(made, on, plenty, WORK)
            continue
        solve(made, on, replace(given_bytes, **{name: found}), WORK)
        if found:
            with pytest.raises(BudgetError):
                solve(made, on, replace(given_bytes, **{name: found - 1}), WORK)


@given(models, machines, budgets)
def test_what_a_refusal_says_is_enough(made: Model, on: Machine, given_bytes: Budgets) -> None:
    try:
        solve(made, on, given_bytes, WORK)
    except BudgetError as error:
        text = str(error)
    else:
        return
    said = text.split("Each of these alone")[1]
    ways = re.findall(r"a (device memory|host memory|disk|batch) of (\d+)(MiB)?", said)
    for step in re.findall(r"forwards of (\d+) tokens", said):
        solve(made, on, given_bytes, replace(WORK, step_tokens=int(step)))
    assert ("device memory", "MiB") in [(name, unit) for name, _, unit in ways]
    for name, number, unit in ways:
        if name == "batch":
            solve(made, on, given_bytes, replace(WORK, batch=int(number)))
            continue
        assert unit
        field = {"device memory": "device_bytes", "host memory": "host_bytes", "disk": "disk_bytes"}[name]
        solve(made, on, replace(given_bytes, **{field: int(number) * MIB}), WORK)


def everything(made: Model, on: Machine, given_bytes: Budgets) -> float:
    """Seconds of a decoding step in the best of all placements of whole layers, one by one."""
    compute_s = decode_step(made, on, WORK, Offloaded()).compute_s
    room = Placements(made, on, WORK)
    parts = [*(layer.total_bytes for layer in made.layers), made.head_bytes]
    best_s = float("inf")
    for embedding, *where in itertools.product((DEVICE, DISK), *(TIERS for _ in parts)):
        rings = [n for n, tier in zip(parts, where, strict=True) if tier == DISK or (on.has_device and tier == HOST)]
        ring = 2 * (max(made.layers[0].total_bytes, *rings) + (128 << 10)) if rings else 0
        held = {tier: sum(n for n, at in zip(parts, where, strict=True) if at == tier) for tier in TIERS}
        held[embedding] += made.embedding_bytes
        fixed = ring + room.kv_bytes + room.working_bytes + made.rest_bytes
        read = sum(n for n, at in zip(parts, where, strict=True) if at == DISK)
        if (
            held[DEVICE] + fixed <= given_bytes.device_bytes
            and held[HOST] <= given_bytes.host_bytes
            and held[DISK] <= given_bytes.disk_bytes
        ):
            link_s = (read + held[HOST]) / on.link_in if on.has_device else 0.0
            best_s = min(best_s, max(compute_s, link_s, read / on.disk_bytes_per_s))
    return best_s


@settings(max_examples=40)
@given(
    st.integers(1, 5), st.integers(1, 9), st.integers(0, 12), st.integers(0, 12), st.integers(0, 4), machines, budgets
)
def test_equal_layers_are_placed_as_well_as_by_trying_everything(
    layers: int, size: int, head: int, embedding: int, experts: int, on: Machine, given_bytes: Budgets
) -> None:
    made = model([size] * layers, head=head, embedding=embedding, experts=experts)
    best_s = everything(made, on, given_bytes)
    try:
        solution = solve(made, on, given_bytes, WORK)
    except BudgetError:
        assert best_s == float("inf")
        return
    found_s = solution.prediction.decode.total_s
    assert found_s == pytest.approx(best_s) or (solution.cache_bytes and found_s < best_s)


def test_what_is_read_lies_evenly_between_what_stays() -> None:
    made = model([8] * 16, head=0, embedding=0)
    room = Placements(made, machine("cpu"), WORK)
    least = room.least_device_bytes(0, 1000 * MIB)
    solution = solve(made, machine("cpu"), Budgets(least + 64 * MIB, 0, 1000 * MIB), WORK)
    read = [part.layer for part in solution.placed if part.tier == DISK]
    assert len(read) == 8
    assert {b - a for a, b in itertools.pairwise(read)} == {2}


@given(st.integers(0, 200))
def test_the_order_names_every_layer_once(count: int) -> None:
    assert sorted(spread_order(count)) == list(range(count))


def solved(made: Model, on: Machine, device_extra: int, host: int = 0, disk: int = 1000 * MIB) -> Solution:
    """With so much more device memory than the least."""
    least = Placements(made, on, WORK).least_device_bytes(host, disk)
    return solve(made, on, Budgets(least + device_extra, host, disk), WORK)


def test_the_embedding_is_the_last_to_get_memory() -> None:
    made = model([4] * 4, head=4, embedding=30)
    none = solved(made, machine("cpu"), 0)
    assert {part.tier for part in none.placed} == {DISK}
    held = solved(made, machine("cpu"), 20 * MIB)
    assert {part.name: part.delivery for part in held.placed if part.tier == DISK} == {"embedding": "rows"}


def test_a_layer_that_is_away_is_fetched_with_all_its_experts() -> None:
    """However few of them a batch meets, and through a ring that all of it fits into."""
    made = model([4] * 4, head=0, embedding=0, experts=8, expert=2)
    one = replace(WORK, batch=1, context_tokens=1)
    on = machine("cuda")
    least = Placements(made, on, one).least_device_bytes(0, 1000 * MIB)
    solution = solve(made, on, Budgets(least, 0, 1000 * MIB), one)
    assert {(part.name, part.nbytes) for part in solution.placed} == {(f"layers.{at}", 20 * MIB) for at in range(4)}
    step = solution.prediction.decode
    assert step.disk_bytes == 80 * MIB
    assert step.total_s == pytest.approx(80 * MIB / 1e9)
    assert solution.slot_bytes == 20 * MIB + (128 << 10)


def test_experts_get_what_is_left_as_a_cache_and_are_read_as_they_are_missed() -> None:
    """16 of 32 experts in it: of two chosen in each of four layers half are missed, and computing waits for them."""
    made, on = model([4] * 4, head=3, embedding=0, experts=8, expert=2), machine("cpu")
    one = replace(WORK, batch=1)
    room = Placements(made, on, one)
    edges = 4 * 2 * 9 * 4096
    fixed = made.rest_bytes + room.kv_bytes + room.working_bytes + 3 * MIB + 16 * MIB + edges
    solution = solve(made, on, Budgets(fixed + (16 + 1) * 2 * MIB, 0, 64 * MIB), one)
    experts = [part for part in solution.placed if part.delivery == "experts"]
    assert [(part.layer, part.tier, part.nbytes) for part in experts] == [(at, DISK, 16 * MIB) for at in range(4)]
    assert solution.cache_bytes == 17 * 2 * MIB + edges
    step = solution.prediction.decode
    assert step.missed_bytes == pytest.approx(4 * 2 * 0.5 * 2 * MIB)
    assert step.total_s == pytest.approx(step.compute_s + step.missed_bytes / 1e9)
    with_all = solve(made, on, Budgets(fixed + 33 * 2 * MIB, 0, 64 * MIB), one)
    assert with_all.prediction.decode.missed_bytes == 0
    assert with_all.cache_bytes == 0, "what fits stays, without a cache"
    pieces = solution.prediction.ttft_s
    assert pieces > on.disk_bytes_per_s**-1 * 4 * 8 * (1 - 0.75**32) * 0.5 * 2 * MIB


def test_a_cache_must_hold_the_experts_of_a_layer() -> None:
    made, on = model([4] * 4, head=0, embedding=0, experts=8, expert=2), machine("cpu")
    room = Placements(made, on, WORK)
    least = room.fixed_bytes(next(choice for choice in room.choices if choice.cached), DEVICE)
    assert solve(made, on, Budgets(least, 0, 1000 * MIB), WORK).cache_bytes == 9 * 2 * MIB + 4 * 2 * 9 * 4096
    with pytest.raises(BudgetError):  # a ring for whole layers would be larger
        solve(made, on, Budgets(least - 1, 0, 1000 * MIB), WORK)


def test_only_the_experts_that_a_batch_meets_are_computed() -> None:
    made, on = model([4] * 4, head=0, embedding=0, experts=8, expert=2), machine("cpu")
    dense = model([4] * 4, head=0, embedding=0)

    def expert_s(batch: int) -> float:
        work = replace(WORK, batch=batch)
        return decode_step(made, on, work, Offloaded()).compute_s - decode_step(dense, on, work, Offloaded()).compute_s

    assert expert_s(1) == pytest.approx(4 * on.multiply_s(made.dtype, 2 * 2 * MIB, 1))
    met = 8 * (1 - (6 / 8) ** 2)  # two sequences choose two of eight each
    assert expert_s(2) == pytest.approx(4 * on.multiply_s(made.dtype, met * 2 * MIB, 4 / met))


def test_host_memory_is_behind_a_link_only_where_there_is_a_device() -> None:
    made = model([8] * 4, head=0, embedding=0)
    for kind, delivery in (("cpu", "mapped"), ("cuda", "prefetch")):
        on = machine(kind, link=1e9)
        solution = solved(made, on, 0, host=100 * MIB, disk=0)
        assert {part.delivery for part in solution.placed} == {delivery}
        assert solution.prediction.decode.link_s == (0.0 if kind == "cpu" else 32 * MIB / 1e9)
        assert bool(solution.ring_slots) == (kind == "cuda")


def test_a_slow_disk_is_what_limits_and_memory_is_what_helps() -> None:
    made = model([8] * 4)
    slow = machine("cpu", disk=1e6)
    read = solved(made, slow, 0).prediction
    assert read.decode.limit == "disk"
    assert read.decode.total_s == pytest.approx(read.decode.disk_bytes / 1e6)
    held = solve(made, slow, Budgets(200 * MIB), WORK).prediction
    assert held.decode.limit == "compute"
    assert held.tokens_per_s == pytest.approx(2 / held.decode.compute_s)


def test_mapped_weights_take_what_was_measured_longer() -> None:
    made, on = model([8] * 4), machine("cpu")
    slow = replace(on, mapped_byte_s=0.5 / MIB)
    plain, longer = (solved(made, each, 0, host=24 * MIB) for each in (on, slow))
    assert longer.offloaded.mapped_bytes == sum(p.nbytes for p in longer.placed if p.delivery == "mapped") > 0
    more_s = longer.prediction.decode.total_s - plain.prediction.decode.total_s
    assert more_s == pytest.approx(0.5 * longer.offloaded.mapped_bytes / MIB)
    on_gpu = solved(made, machine("cuda"), 0, host=24 * MIB)
    assert on_gpu.offloaded.mapped_bytes == 0 < on_gpu.offloaded.link_bytes


def test_alternatives_say_what_more_memory_would_bring() -> None:
    made, on = model([8] * 4), machine("cpu", disk=1e7)
    budgets_given = Budgets(solved(made, on, 9 * MIB).device_bytes, 0, 1000 * MIB)
    found = {a.name: a for a in Placements(made, on, WORK).alternatives(budgets_given)}
    here = solve(made, on, budgets_given, WORK).prediction.tokens_per_s
    everything_held = found["everything in device memory"]
    assert everything_held.prediction.tokens_per_s > here
    solve(made, on, Budgets(everything_held.device_bytes), WORK)
    assert found["as little device memory as can be"].prediction.tokens_per_s <= here


def test_without_a_disk_speed_nothing_is_said_to_come_from_it_in_time() -> None:
    made = model([8] * 4)
    on = replace(machine("cpu"), disk_read={})
    assert solved(made, on, 0).prediction.tokens_per_s == 0.0
