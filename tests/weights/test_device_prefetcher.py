"""Weights that cross over to a device of its own: in which order buffers and slots are used, and that answers stay."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from stowage.config.memory import Memory
from stowage.engine import engine as engine_module
from stowage.engine.engine import Engine
from stowage.engine.memory_budget import activation_bytes
from stowage.engine.sampling_params import SamplingParams
from stowage.errors import BudgetError, ConfigError, ModelError, StorageError
from stowage.plugins.transformers.offload import offload
from stowage.testing import tiny_models
from stowage.weights.device_prefetcher import DevicePrefetcher, RingSlots
from stowage.weights.parameter_location import ParameterLocation
from tests.depth import mostly_rare
from tests.late_carrier import LateCarrier

PROMPT = [5 + 7 * at % 400 for at in range(70)]


def location(count: int, value: float = 0.0) -> ParameterLocation:
    return ParameterLocation((count,), torch.float32, host=torch.full((count,), value))


def test_slots_are_given_back_when_their_bytes_are_over() -> None:
    """One may be under way while the next is asked for, so that a ring of two never stands still."""
    carrier, back, first = LateCarrier(patience=1 << 30), [], True
    units = [[location(3), location(100)] for _ in range(4)]
    slots = [torch.arange(3.0), torch.arange(100.0)]

    def slot(unit: int) -> list[Tensor]:
        if first:
            assert back == list(range(unit - 1)), "all but the newest"
        else:
            assert back == [0, 1, 2, 3], "a unit that comes twice in a row waits for its own slot"
        return slots

    ring_slots = RingSlots(frozenset(range(4)), slot, back.append)
    device_prefetcher = DevicePrefetcher(carrier, 2, 4096, units, ring_slots)
    for unit in range(4):
        there = device_prefetcher.take(unit)
        assert all(torch.equal(a, b) for a, b in zip(there, slots, strict=True))
        assert all(view.data_ptr() % 64 == there[0].data_ptr() % 64 for view in there)
        device_prefetcher.give_back(unit)
        device_prefetcher.give_back(unit)
    first = False
    device_prefetcher.take(3)
    device_prefetcher.give_back(3)
    device_prefetcher.settle()
    device_prefetcher.check()
    assert carrier.order == [0, 1, 0, 1, 0], "one is computed from while the next is brought"
    assert back == [0, 1, 2, 3, 3] and not carrier.violations and device_prefetcher.nbytes == 8192


@pytest.mark.parametrize("buffers", [2, 3])
def test_what_lies_in_host_memory_crosses_ahead_and_in_order(buffers: int) -> None:
    """As many as there are buffers, in the order of the last pass, around its end; one from disk is not overtaken."""
    units = [[location(8, float(unit))] for unit in range(5)]
    carrier, back = LateCarrier(patience=1 << 30), []
    ring_slots = RingSlots(frozenset([3]), lambda _unit: [torch.full((8,), 3.0)], back.append)
    device_prefetcher = DevicePrefetcher(carrier, buffers, 4096, units, ring_slots)
    order = [0, 2, 1, 3, 4]
    device_prefetcher.follow(order)
    for turn in range(15):
        unit = order[turn % 5]
        (there,) = device_prefetcher.take(unit)
        assert there.eq(unit).all(), "with what was copied for it"
        following = [order[(turn + ahead) % 5] for ahead in range(1, buffers)]
        ahead = following.index(3) if 3 in following else len(following)
        assert [order[begun.index] for begun in device_prefetcher._begun] == following[:ahead]
        device_prefetcher.give_back(unit)
        if unit == order[-1]:
            device_prefetcher.end_pass()
            device_prefetcher.check()
    assert carrier.copies == 15 + buffers and carrier.most_ahead <= buffers and not carrier.violations
    assert back == [3, 3, 3] and device_prefetcher.direct_bytes == 32 * (12 + buffers)


def test_another_order_costs_copies_and_nothing_else() -> None:
    carrier = LateCarrier(patience=1 << 30)
    device_prefetcher = DevicePrefetcher(
        carrier, 3, 4096, [[location(8, float(unit))] for unit in range(6)], RingSlots()
    )
    for unit in [0, 1, 4, 4, 5, 2, 0, 3, 1]:
        (there,) = device_prefetcher.take(unit)
        assert there.eq(unit).all()
        device_prefetcher.give_back(unit)
        device_prefetcher.check()
    assert not carrier.violations and carrier.copies > 9


def test_one_thread_at_a_time() -> None:
    device_prefetcher = DevicePrefetcher(LateCarrier(), 3, 4096, [[location(8)], [location(8)]], RingSlots())
    device_prefetcher.take(0)
    told: list[str] = []

    def other() -> None:
        try:
            device_prefetcher.take(1)
        except ModelError as error:
            told.append(str(error))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert len(told) == 1 and "two forwards" in told[0]


@pytest.mark.parametrize(
    ("family", "rules"),
    mostly_rare(
        [
            *(("llama", rules) for rules in ("*=stream", "*=prefetch", "last 1 of 2=prefetch", "auto")),
            *((family, rules) for family in ("qwen3_moe", "qwen3_next") for rules in ("*=stream", "auto")),
        ],
        [
            *(("llama", rules) for rules in ("*=stream", "*=prefetch", "last 1 of 2=prefetch", "auto")),
            ("qwen3_next", "*=stream"),
            ("qwen3_moe", "*=stream"),
        ],
    ),
)
def test_answers_are_those_of_resident_weights(
    family: str, rules: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, with a ring of two as well."""
    path = tiny_models.write(family, tmp_path / family, tiny_models.TinySize(layers=8 if rules == "auto" else 4))
    params = SamplingParams(max_new_tokens=5, ignore_eos=True, logprobs=1)
    with Engine(path, Memory(kv_cache_memory="4MiB", weights="*=resident")) as engine:
        expected = engine.generate([PROMPT, PROMPT[:9]], params)
        all_bytes, config = engine.weights.placement.device_bytes, engine.model.config
    carrier = LateCarrier()
    monkeypatch.setattr(engine_module, "carrier", lambda device: carrier)
    memory = Memory(
        kv_cache_memory="4MiB", host_memory="64MiB", max_num_batched_tokens=128, max_num_seqs=2, weights=rules
    )
    if rules == "auto":
        device_memory = (4 << 20) + activation_bytes(memory, config) + int(all_bytes * 0.6)
        memory = replace(memory, device_memory=device_memory, host_memory="3MiB")
    with Engine(path, memory) as engine:
        found = engine.generate([PROMPT, PROMPT[:9]], params)
        engine.check()
        ring = engine.weights.placement
        assert 0 < sum(carrier.pinned) <= ring.host_bytes <= memory.host_memory_bytes
        assert engine.weights.ring_bytes <= ring.ring_slots * ring.slot_bytes
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    assert [t.logprob for c in found for t in c.logprobs] == [t.logprob for c in expected for t in c.logprobs]
    assert not carrier.violations and not carrier.pinned and carrier.copies > 0


def test_host_memory_for_the_staging_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_models.write("llama", tmp_path / "llama")
    monkeypatch.setattr(engine_module, "carrier", lambda device: LateCarrier())
    with pytest.raises(BudgetError, match="give host_memory a larger size"):
        Engine(path, Memory(kv_cache_memory="4MiB", weights="*=stream"))


def test_what_fails_ahead_is_tried_again() -> None:
    carrier = LateCarrier(fails=lambda number: number in (1, 4, 5))
    device_prefetcher = DevicePrefetcher(
        carrier, 3, 4096, [[location(8, float(unit))] for unit in range(4)], RingSlots()
    )
    for turn in range(12):
        (there,) = device_prefetcher.take(turn % 4)
        assert there.eq(turn % 4).all()
        device_prefetcher.give_back(turn % 4)
        device_prefetcher.check()
    assert carrier.copies > 12 and not carrier.violations


@pytest.mark.parametrize("rules", ["*=prefetch", "*=stream", "*=experts"])
def test_a_copy_that_fails_fails_the_request(rules: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the next one is answered."""
    path = tiny_models.write("qwen3_moe", tmp_path / "model")
    bad: list[int] = []
    carrier = LateCarrier(fails=lambda number: bool(bad) and number >= bad[0])
    monkeypatch.setattr(engine_module, "carrier", lambda device: carrier)
    params = SamplingParams(max_new_tokens=4, ignore_eos=True)
    with Engine(path, Memory(kv_cache_memory="4MiB", host_memory="64MiB", weights=rules)) as engine:
        (expected,) = engine.generate([PROMPT], params)
        for after in range(3):
            engine.drop_device_cache()
            engine.drop_host()
            bad.append(carrier.copies + after)
            with pytest.raises(StorageError, match="could not be copied to the device: copy"):
                engine.generate([PROMPT], params)
            assert engine.alive
            bad.clear()
            engine.drop_device_cache()
            engine.drop_host()
            assert engine.generate([PROMPT], params)[0].token_ids == expected.token_ids
            engine.check()
    assert not carrier.violations


def test_offload_takes_a_device(tmp_path: Path) -> None:
    path = tiny_models.write("llama", tmp_path / "llama")
    assert offload(path, weights="*=stream", host_memory="64MiB", device="cpu").device.type == "cpu"
    with pytest.raises(ConfigError, match="the device 'gpu' cannot be used"):
        offload(path, weights="*=stream", host_memory="64MiB", device="gpu")
