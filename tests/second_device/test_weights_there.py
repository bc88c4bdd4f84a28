"""Weights on a device that is not the CPU: experts that are chosen, parameters that stay in host memory, all mixed."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import Tensor

from stowage.config.memory import Memory
from stowage.cuda.mapped import mapped
from stowage.engine import engine as engine_module
from stowage.engine.engine import Engine
from stowage.errors import ConfigError
from stowage.weights.offloaded_parameter import OffloadedError
from stowage.weights.weight_unit import Delivery
from tests.engine.conftest import Reference, assert_same, greedy, random_prompt
from tests.late_carrier import LateCarrier

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(shutil.which("g++") is None, reason="the second device needs a C++ compiler"),
]
PROMPTS = [random_prompt(length, seed=length) for length in (40, 13)]
ROUTED = ["mixtral", "qwen3_moe", "gpt_oss", "qwen3_next", "deepseek_v3"]


class Shared:
    """A driver of a device that reads host memory where it lies, as the second device does."""

    def __init__(self, *, sees: bool = True, shift: int = 0) -> None:
        self._sees, self._shift = sees, shift

    def attribute(self, number: int, device: int) -> int:
        return 0

    def device_address(self, address: int) -> int:
        return (address + self._shift) * self._sees


class SharedCarrier(LateCarrier):
    """``driver``: what says where the device sees host memory."""

    def __init__(self, device: torch.device, driver: Shared) -> None:
        super().__init__(str(device))
        self._driver = driver

    def view(self, memory: Tensor) -> Tensor:
        return mapped(memory, self.device, self._driver)


def answers_as_the_cpu_does(engine: Engine, reference: Reference) -> None:
    for prompt, completion in zip(PROMPTS, engine.generate(PROMPTS, greedy(4)), strict=True):
        assert_same(completion, reference.answer(prompt, 4))
    engine.check()


@pytest.mark.parametrize("family", ROUTED)
@pytest.mark.parametrize("host", ["64MiB", "800KB"])
def test_experts_come_as_they_are_chosen(
    family: str, host: str, device: torch.device, references, monkeypatch: pytest.MonkeyPatch
) -> None:  # type: ignore[no-untyped-def]
    """From host memory and from disk, through a cache for a quarter of them, with copies that take their time."""
    carrier = LateCarrier(str(device), patience=5)
    monkeypatch.setattr(engine_module, "carrier", lambda device: carrier)
    memory = Memory(kv_cache_memory="2MiB", host_memory=host, weights="*.experts=experts")
    with Engine(references(family).path, memory, device=str(device)) as engine:
        placement, source = engine.weights.placement, engine.weights
        assert Delivery.EXPERTS in placement.deliveries and source.device == device
        assert 0 < source.cache_bytes <= placement.cache_bytes
        assert (len(placement.held) == len(placement.cached)) is (host == "64MiB")
        answers_as_the_cpu_does(engine, references(family))
        assert engine.stats()["weights"]["expert_misses"] > engine.stats()["weights"]["cache_experts"]
    assert not carrier.violations and not carrier.pinned


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_moe"])
@pytest.mark.parametrize("rules", ["*=mapped", "last 1 of 2=mapped,lm_head=stream,*=prefetch"])
def test_parameters_stay_in_host_memory(
    family: str, rules: str, device: torch.device, references, monkeypatch: pytest.MonkeyPatch
) -> None:  # type: ignore[no-untyped-def]
    carrier = SharedCarrier(device, Shared())
    monkeypatch.setattr(engine_module, "carrier", lambda device: carrier)
    with Engine(
        references(family).path, Memory(kv_cache_memory="2MiB", host_memory="64MiB", weights=rules), device=str(device)
    ) as engine:
        placement = engine.weights.placement
        assert placement.nbytes(Delivery.MAPPED) > 0 and sum(carrier.pinned) <= placement.host_bytes
        answers_as_the_cpu_does(engine, references(family))
        layer = engine.model.model.layers[-1].mlp
        shown = next(p for p in layer.parameters() if p.dim() > 1)
        assert shown.device == device and not shown.isnan().any()
    with pytest.raises(OffloadedError):  # memory that is not pinned any more is not read
        shown.isnan()
    assert not carrier.pinned
    assert not carrier.violations


@pytest.mark.parametrize(
    ("driver", "why"),
    [(Shared(sees=False), "the memory is not pinned"), (Shared(shift=4096), "reads other bytes than the host")],
)
def test_memory_that_a_device_cannot_read_is_told(
    driver: Shared, why: str, device: torch.device, references, monkeypatch: pytest.MonkeyPatch
) -> None:  # type: ignore[no-untyped-def]
    """It is tried when a model is opened; the other deliveries are named."""
    carrier = SharedCarrier(device, driver)
    monkeypatch.setattr(engine_module, "carrier", lambda device: carrier)
    memory = Memory(kv_cache_memory="2MiB", host_memory="64MiB", weights="lm_head=mapped,*=prefetch")
    with pytest.raises(ConfigError, match=f"{why}.*Say prefetch, stream or resident instead"):
        Engine(references("llama").path, memory, device=str(device))
    assert not carrier.pinned
    monkeypatch.undo()
    with pytest.raises(ConfigError, match=r"not known to read host memory.*Say prefetch, stream or resident"):
        Engine(references("llama").path, memory, device=str(device))
