"""Weights that cross over to a device of its own: in which order buffers and slots are used, and that answers stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from stowage.config import Memory
from stowage.engine import engine as engine_module
from stowage.engine.budgets import activation_bytes
from stowage.engine.engine import Engine
from stowage.engine.sampler import SamplingParams
from stowage.errors import BudgetError, ConfigError
from stowage.integrations.transformers.offload import offload
from stowage.testing import tiny_models
from stowage.weights.crossing import Crossing, PlainCarrier
from stowage.weights.holds import Home
from tests.late_copies import Lane, Late

PROMPT = [5 + 7 * at % 400 for at in range(70)]


class LateCarrier(PlainCarrier):
    """Bytes are on the device at once, in order with what is computed; but the ring's slot must stay as it was until
    the copy's ticket is done. A buffer may only be written to again once what computes from it was asked for.
    """

    def __init__(self, patience: int = 3) -> None:
        super().__init__(torch.device("cpu"))
        self.lane = Lane(patience)
        self.violations: list[str] = []
        self.in_use: set[int] = set()
        self.copies, self.most_open = 0, 0
        self.order: list[int] = []
        self.pinned: list[int] = []

    def pin(self, memory: np.ndarray) -> LateCarrier:
        self.pinned.append(memory.nbytes)
        return self

    def close(self) -> None:
        self.pinned.pop()

    def copy(self, buffer: int, pairs: Sequence[tuple[Tensor, Tensor]]) -> Late:
        if buffer in self.in_use:
            self.violations.append(f"buffer {buffer} is written to while it is computed from")
        self.in_use.add(buffer)
        self.order.append(buffer)
        super().copy(buffer, pairs)
        self.copies += 1
        was = [(here, here.clone()) for _, here in pairs]

        def finish() -> None:
            if not all(torch.equal(here.view(torch.uint8), before.view(torch.uint8)) for here, before in was):
                self.violations.append("a slot was filled again before its bytes had crossed over")

        ticket = self.lane.begin(finish)
        self.most_open = max(self.most_open, len(self.lane.open))
        return ticket

    def computed(self, buffer: int) -> None:
        self.in_use.remove(buffer)


def home(count: int) -> Home:
    return Home((count,), torch.float32, host=torch.zeros(count))


def test_slots_are_given_back_when_their_bytes_are_over() -> None:
    """One may be under way while the next is asked for, so that a ring of two never stands still."""
    carrier, back = LateCarrier(patience=1 << 30), []
    crossing = Crossing(carrier, 2, 4096, back.append)
    homes, slots = [home(3), home(100)], [torch.arange(3.0), torch.arange(100.0)]
    for unit in range(4):
        crossing.make_way(unit)
        assert back == list(range(unit - 1)), "all but the newest"
        there = crossing.bring(unit, homes, slots)
        assert all(torch.equal(a, b) for a, b in zip(there, slots, strict=True))
        assert all(view.data_ptr() % 64 == there[0].data_ptr() % 64 for view in there)
        crossing.computed(unit)
        crossing.computed(unit)
    crossing.make_way(3)
    assert back == [0, 1, 2, 3], "a unit that comes twice in a row waits for its own slot"
    crossing.bring(3, homes, slots)
    crossing.computed(3)
    crossing.settle()
    crossing.check()
    assert carrier.order == [0, 1, 0, 1, 0], "one is computed from while the next is brought"
    assert back == [0, 1, 2, 3, 3] and not carrier.violations and crossing.nbytes == 8192


@pytest.mark.parametrize(
    ("family", "rules"),
    [
        *(("llama", rules) for rules in ("*=stream", "*=prefetch", "last 1 of 2=prefetch", "auto")),
        *((family, rules) for family in ("qwen3_moe", "qwen3_next") for rules in ("*=stream", "auto")),
    ],
)
def test_answers_are_those_of_resident_weights(
    family: str, rules: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, with a ring of two as well."""
    path = tiny_models.write(family, tmp_path / family, tiny_models.TinySize(layers=8 if rules == "auto" else 4))
    params = SamplingParams(max_new_tokens=5, ignore_eos=True, logprobs=1)
    with Engine(path, Memory(device_kv="4MiB", weights="*=resident")) as engine:
        expected = engine.generate([PROMPT, PROMPT[:9]], params)
        all_bytes, config = engine.weights.placement.device_bytes, engine.model.config
    carrier = LateCarrier()
    monkeypatch.setattr(engine_module, "carrier", lambda device: carrier)
    memory = Memory(device_kv="4MiB", host="64MiB", step_tokens_max=128, sequences_max=2, weights=rules)
    if rules == "auto":
        device_memory = (4 << 20) + activation_bytes(memory, config) + int(all_bytes * 0.6)
        memory = replace(memory, device_memory=device_memory, host="3MiB")
    with Engine(path, memory) as engine:
        found = engine.generate([PROMPT, PROMPT[:9]], params)
        engine.check()
        ring = engine.weights.placement
        assert len(carrier.pinned) == 1 and carrier.pinned[0] <= ring.staging_bytes
        assert engine.weights.ring_bytes <= ring.ring_slots * ring.slot_bytes
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    assert [t.logprob for c in found for t in c.logprobs] == [t.logprob for c in expected for t in c.logprobs]
    assert not carrier.violations and not carrier.pinned and not carrier.lane.open and carrier.most_open <= 2
    assert carrier.copies > 0


def test_host_memory_for_the_staging_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_models.write("llama", tmp_path / "llama")
    monkeypatch.setattr(engine_module, "carrier", lambda device: LateCarrier())
    with pytest.raises(BudgetError, match="give host a larger size"):
        Engine(path, Memory(device_kv="4MiB", weights="*=stream"))
    with pytest.raises(ConfigError, match="delivered as mapped, which is there on a CPU only"):
        Engine(path, Memory(device_kv="4MiB", host="64MiB", weights="*=mapped"))


def test_offload_takes_a_device(tmp_path: Path) -> None:
    path = tiny_models.write("llama", tmp_path / "llama")
    assert offload(path, weights="*=stream", host="64MiB", device="cpu").device.type == "cpu"
    with pytest.raises(ConfigError, match="the device 'gpu' cannot be used"):
        offload(path, weights="*=stream", host="64MiB", device="gpu")
