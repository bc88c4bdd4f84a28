"""Experts that are copied to a device as they are chosen: the same answers, and no frame is written to too early."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import stowage
from stowage import Memory, SamplingParams
from stowage.config.memory import parse_size
from stowage.engine import engine as engine_module
from stowage.errors import ModelError, StorageError
from stowage.weights import reader
from stowage.weights.checkpoint import Segment
from stowage.weights.experts.device_cache import DeviceExperts, LayerExperts, renumbered
from stowage.weights.file import File
from stowage.weights.parameter_location import ParameterLocation
from stowage.weights.reader import Readers
from stowage.weights.weight_unit import Delivery
from tests.answers import bits
from tests.depth import mostly_rare
from tests.late_carrier import LateCarrier
from tests.weights.conftest import bytes_of, logits, prompt

FAMILIES = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next", "qwen3_5_moe")
LAYERS, EXPERTS, SHAPES = 3, 5, ((6, 8), (8, 3))
GREEDY = SamplingParams(max_new_tokens=8, ignore_eos=True, logprobs=1)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> LateCarrier:
    """What brings weights to the device from here on."""
    carrier = LateCarrier()
    monkeypatch.setattr("stowage.executor.device.carrier", lambda device: carrier)
    monkeypatch.setattr(engine_module, "carrier", lambda device: carrier)
    return carrier


@pytest.mark.parametrize("family", mostly_rare(FAMILIES, ["qwen3_moe", "gpt_oss"]))
def test_every_family_answers_as_plain_transformers_does(
    family: str, checkpoints: Callable[..., Path], plain: Callable[..., Any], late: LateCarrier
) -> None:
    """A prompt that chooses all experts, single tokens, a batch; from host memory, from disk, and beside layers that
    are prefetched and streamed. A byte less than all experts take holds the staging and a few of them.
    """
    asked = [prompt(), prompt(1, 1), prompt(2, 2), prompt(36, 3).view(3, 12), prompt(1, 4)]
    expected = [logits(plain(family), ids) for ids in asked]
    roomy, less = 1 << 30, 0
    ways = [("*.experts=experts", roomy), ("*.experts=experts", less)]
    if family in ("mixtral", "gpt_oss"):
        ways += [("*.experts=experts,last 1 of 2=stream,*=prefetch", roomy)]
    for rules, given in ways:
        host = given or less
        model = stowage.offload(checkpoints(family), weights=rules, host_memory=host)
        placement, stats = model.stowage.placement, model.stowage.stats()
        assert (len(placement.held) == len(placement.cached)) is (host == roomy)
        less = less or placement.host_bytes - 1
        for ids, wanted in zip(asked, expected, strict=True):
            found = logits(model, ids)
            # buffers lie at other addresses than a model's own memory, for which a CPU's kernels round otherwise
            assert torch.equal(found, wanted) or ("prefetch" in rules and torch.allclose(found, wanted, atol=1e-3))
            model.stowage.check()
        after = model.stowage.stats()
        assert after["expert_misses"] - stats["expert_misses"] > stats["cache_experts"], "some were evicted"
        assert after["expert_hits"] > stats["expert_hits"]
        assert model.stowage.cache_bytes <= placement.cache_bytes
        assert sum(late.pinned) <= placement.host_bytes <= host
        model.stowage.close()
        assert not late.violations and not late.pinned and not late.in_use


@pytest.mark.parametrize("family", ["mixtral", "qwen3_next"])
def test_the_engine_answers_as_with_all_weights_in_memory(
    family: str, checkpoints: Callable[..., Path], late: LateCarrier
) -> None:
    """Mixed batches, sampled in steps of several requests."""
    prompts, said = [prompt(length, length)[0].tolist() for length in (40, 3, 17)], []
    for rules in ("*=resident", "*=experts", "*.experts=experts,*=stream"):
        with stowage.Engine(
            checkpoints(family), Memory(kv_cache_memory="8MiB", host_memory="8MiB", weights=rules)
        ) as engine:
            said.append(bits(engine.generate(prompts, GREEDY)))
            engine.check()
    assert said[1:] == said[:1] * 2 and not late.violations and late.copies


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_a_budget_chooses_experts_and_is_hard(
    family: str, checkpoints: Callable[..., Path], plain: Callable[..., Any], late: LateCarrier
) -> None:
    """The rest of the layers stays on the device; experts cross over from host memory as far as it goes."""
    whole = plain(family)
    expected = logits(whole, prompt())
    with pytest.raises(stowage.BudgetError, match="at least") as raised:
        stowage.offload(checkpoints(family), device_memory=100_000, host_memory="1GiB")
    least = int(str(raised.value).split("at least ")[1].split()[0])
    assert least < bytes_of(whole) * 0.6
    misses = []
    for budget, host in ((least, "1GiB"), (least, "800KB"), ((least + bytes_of(whole)) // 2, "1GiB")):
        model = stowage.offload(checkpoints(family), device_memory=budget, host_memory=host)
        placement = model.stowage.placement
        assert Delivery.EXPERTS in placement.deliveries and Delivery.MAPPED not in placement.deliveries
        assert model.stowage.cache_bytes <= placement.cache_bytes and placement.device_bytes <= budget
        assert sum(late.pinned) <= placement.host_bytes <= parse_size(host, 1)
        for _ in range(3):
            assert torch.equal(logits(model, prompt()), expected)
        misses.append(model.stowage.stats()["expert_misses"])
        model.stowage.close()
    assert misses[2] < misses[0] and not late.violations
    with pytest.raises(stowage.BudgetError):
        stowage.offload(checkpoints(family), device_memory=least - 1, host_memory="1GiB")


def test_modules_that_add_up_by_number_are_left_whole(checkpoints: Callable[..., Path], late: LateCarrier) -> None:
    """Other numbers for their experts would be another order, and other rounding."""
    with pytest.raises(stowage.ConfigError, match="matches no module"):
        stowage.offload(checkpoints("mixtral"), weights="*=experts", host_memory="1GiB", experts_implementation="eager")


def cache_of(
    carrier: LateCarrier, frames: int, path: Path | None = None, timeout_s: float = 60.0, threads: int = 4
) -> tuple[DeviceExperts, list[list[Tensor]], Readers]:
    """In host memory, or in a file at ``path``; with what the experts are."""
    layers, truth, begin = [], [], 0
    raw = np.random.default_rng(0).random(LAYERS * EXPERTS * 72, np.float32)
    if path is not None:
        path.write_bytes(raw.tobytes())
    file = File.open(path) if path is not None else None
    for layer in range(LAYERS):
        values, locations = [], []
        for shape in SHAPES:
            count = EXPERTS * shape[0] * shape[1]
            values.append(torch.from_numpy(raw[begin : begin + count]).view(EXPERTS, *shape))
            segments = (Segment(file, begin * 4, count * 4),) if file is not None else ()
            locations.append(
                ParameterLocation(
                    (EXPERTS, *shape), torch.float32, segments, values[-1].clone() if not segments else None
                )
            )
            begin += count
        module = nn.Module()
        module.num_experts = EXPERTS
        module.bias = nn.Parameter(torch.arange(EXPERTS) + 10.0 * layer, requires_grad=False)
        own = [nn.Parameter(value.clone(), requires_grad=False) for value in values]
        module.up, module.down = own
        truth.append(values)
        layers.append(LayerExperts(module, own, locations, carrier.device))
    readers = Readers(threads)
    cache = DeviceExperts(layers, frames * 4 * 72, readers, timeout_s, carrier, 7)
    assert cache.frames == frames
    return cache, truth, readers


def compute(cache: DeviceExperts, truth: Sequence[Sequence[Tensor]], layer: int, experts: Sequence[int]) -> None:
    """As a module would: by the numbers that it is given."""
    module = cache.layers[layer].module
    numbers = cache.bring(layer, torch.tensor([list(experts)]))[0].tolist()
    for expert, number in zip(experts, numbers, strict=True):
        if not 0 <= expert < EXPERTS:
            assert number == module.num_experts, "no choice stays none"
            continue
        assert torch.equal(module.up[number], truth[layer][0][expert])
        assert torch.equal(module.down[number], truth[layer][1][expert])
        assert module.bias[number] == expert + 10 * layer
    cache.give_back(layer)
    cache.give_back(layer)
    with pytest.raises(ModelError, match="offloaded"):
        module.up.sum()
    assert module.up.shape == (EXPERTS, 6, 8) and len(module.bias) == EXPERTS
    cache.check()


@pytest.mark.parametrize("where", ["host", "disk"])
@pytest.mark.parametrize("frames", [5, 8, 15])
def test_what_is_chosen_is_there(where: str, frames: int, tmp_path: Path) -> None:
    """Through few frames and many; nothing is written while it is read, and staging is reused only once it was read."""
    carrier, random = LateCarrier(patience=1 << 30), np.random.default_rng(frames)
    cache, truth, readers = cache_of(carrier, frames, tmp_path / "table" if where == "disk" else None)
    for turn in range(60):
        chosen = random.choice(EXPERTS + 1, random.integers(1, EXPERTS + 1), replace=False).tolist()
        compute(cache, truth, turn % LAYERS, chosen)
    assert cache.hits and cache.misses and not carrier.violations and min(carrier.order) == 7
    assert set(carrier.order) <= set(range(7, 7 + frames))
    assert bool(carrier.pinned) is (where == "disk")
    cache.settle()
    assert readers.close()
    cache.close(ended=True)
    assert not carrier.pinned


def test_likely_experts_come_before_they_are_chosen() -> None:
    """What nearly every token chooses is brought while the layer before it computes, unless that costs a likelier
    one. It is no choice's copy, and found there.
    """
    carrier = LateCarrier(patience=1 << 30)
    cache, truth, _ = cache_of(carrier, 6)
    for _ in range(120):
        for layer in range(LAYERS):
            compute(cache, truth, layer, [layer, 4])
    assert cache.hits and cache.misses
    frame = int(cache._frame[1, 1])
    cache._evict(frame)
    before, misses = carrier.copies, cache.misses
    compute(cache, truth, 0, [0, 4])
    assert carrier.copies == before + 1 and cache._frame[1, 1] >= 0, "asked for by nobody"
    compute(cache, truth, 1, [1, 4])
    assert cache.misses == misses and not carrier.violations


def test_prompts_that_choose_all_find_the_next_layer_there() -> None:
    """With room for two layers one crosses over while the other computes."""
    carrier = LateCarrier(patience=1 << 30)
    cache, truth, _ = cache_of(carrier, 2 * EXPERTS)
    cache._uses._shares[:] = 1.0
    compute(cache, truth, 0, range(EXPERTS))
    misses, copies = cache.misses, carrier.copies
    for turn in range(1, 3 * LAYERS):
        compute(cache, truth, turn % LAYERS, range(EXPERTS))
    assert cache.misses == misses and carrier.copies > copies and not carrier.violations


def test_no_expert_makes_way_for_one_that_is_expected_later() -> None:
    """Six are chosen by nearly every token, and fill the cache; a seventh by hardly more than every second."""
    carrier = LateCarrier(patience=1 << 30)
    cache, truth, _ = cache_of(carrier, 6)
    for layer in range(LAYERS):
        compute(cache, truth, layer, [0, 1])
    cache._uses._shares[:] = [1.0, 1.0, 0.0, 0.0, 0.0]
    cache._uses._shares[1, 2] = 0.55
    before = carrier.copies
    compute(cache, truth, 0, [0])
    assert carrier.copies == before and cache._frame[1, 2] < 0
    cache._uses._shares[0, 1] = 0.1
    compute(cache, truth, 0, [0])
    assert carrier.copies == before + 1 and cache._frame[1, 2] >= 0 > cache._frame[0, 1]


def test_a_disk_that_fails_leaves_nothing_half_read(tmp_path: Path) -> None:
    cache, truth, readers = cache_of(LateCarrier(), 7, tmp_path / "table")
    (file,) = {segment.file for location in cache.layers[0].locations for segment in location.segments}
    compute(cache, truth, 0, [0, 1])
    kept, null = (os.dup(file.fd), os.dup(file.direct)), os.open(tmp_path, os.O_RDONLY)
    for fd in (file.fd, file.direct):
        os.dup2(null, fd)
    with pytest.raises(StorageError, match="could not be read"):
        cache.bring(0, torch.tensor([[1, 2, 3, 4]]))
    cache.give_back(0)
    cache.check()
    for fd, good in zip((file.fd, file.direct), kept, strict=True):
        os.dup2(good, fd)
    for layer in range(LAYERS):
        compute(cache, truth, layer, [0, 1, 2, 3, 4])
    assert readers.close()


def test_a_disk_that_does_not_answer_keeps_its_staging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is still being read into is left alone by the next request: it waits for that first."""
    go_on, fill = threading.Event(), reader._fill

    def slow(read: Any, buffer: Any) -> None:
        if read.offset < EXPERTS * 72 * 4:  # of the first layer
            assert go_on.wait(60)
        fill(read, buffer)

    monkeypatch.setattr(reader, "_fill", slow)
    cache, truth, readers = cache_of(LateCarrier(), 7, tmp_path / "table", timeout_s=0.05, threads=16)
    with pytest.raises(StorageError, match=r"not read within 0\.05 s"):
        cache.bring(0, torch.tensor([[0, 1, 2, 3, 4]]))
    cache.give_back(0)
    with pytest.raises(StorageError, match=r"not read within 0\.05 s"):
        cache.bring(1, torch.tensor([[0, 1, 2, 3, 4]]))
    cache.give_back(1)
    cache.check()
    go_on.set()
    cache._stall.timeout_s = 60.0
    for layer in range(LAYERS):
        compute(cache, truth, layer, [0, 1, 2, 3, 4])
    assert readers.close()


def test_choices_are_found_among_the_arguments() -> None:
    choices, numbers, other = torch.tensor([[1]]), torch.tensor([[3]]), SimpleNamespace()
    assert renumbered((other, choices), {"a": choices, "b": other}, choices, numbers) == (
        (other, numbers),
        {"a": numbers, "b": other},
    )
