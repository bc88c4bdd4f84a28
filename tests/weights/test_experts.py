"""Cached experts change no answer, take no more memory than their cache, and never compute while offloaded."""

from __future__ import annotations

import errno
import gc
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import stowage
from stowage import Memory, SamplingParams
from stowage.weights import reader
from stowage.weights.weight_unit import Delivery
from tests.depth import mostly_rare
from tests.weights.conftest import bytes_of, logits, prompt

FAMILIES = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next", "qwen3_5_moe")
RULES = ("*=experts", "last 1 of 2=stream,*=experts,*=prefetch", "*.experts=experts,*=stream")
GREEDY = SamplingParams(max_new_tokens=8, ignore_eos=True)


def mapped_bytes() -> int:
    """Memory of this process that shows experts."""
    gc.collect()
    text = Path("/proc/self/smaps").read_text()
    areas = re.findall(r"/memfd:stowage-experts.*?\nRss:\s+(\d+) kB", text, re.DOTALL | re.MULTILINE)
    return sum(int(kilobytes) << 10 for kilobytes in areas)


@pytest.mark.parametrize("family", mostly_rare(FAMILIES, ["qwen3_moe", "gpt_oss", "deepseek_v3"]))
def test_every_family_answers_as_plain_transformers_does(
    family: str, checkpoints: Callable[..., Path], plain: Callable[..., Any]
) -> None:
    """A prompt that chooses all experts, single tokens, a batch: through a cache that holds a layer and little more."""
    asked = [prompt(), prompt(1, 1), prompt(2, 2), prompt(36, 3).view(3, 12), prompt(1, 4)]
    expected = [logits(plain(family), ids) for ids in asked]
    for rules in RULES if family == "mixtral" else RULES[:1]:
        before = mapped_bytes()
        model = stowage.offload(checkpoints(family), weights=rules, host_memory="1GiB")
        stats = model.stowage.stats()
        for ids, wanted in zip(asked, expected, strict=True):
            assert torch.equal(logits(model, ids), wanted), rules
            model.stowage.check()
        after = model.stowage.stats()
        assert after["expert_misses"] - stats["expert_misses"] > stats["cache_experts"], "some were evicted"
        assert after["expert_hits"] > stats["expert_hits"]
        assert 0 < mapped_bytes() - before <= stats["cache_bytes"]
        model.stowage.close()
        assert mapped_bytes() == before


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_a_budget_chooses_experts_and_is_hard(
    family: str, checkpoints: Callable[..., Path], plain: Callable[..., Any]
) -> None:
    ids, whole = prompt(), plain(family)
    with pytest.raises(stowage.BudgetError, match="at least") as raised:
        stowage.offload(checkpoints(family), device_memory=100_000)
    least = int(str(raised.value).split("at least ")[1].split()[0])
    assert least < bytes_of(whole) * 0.6
    asked = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(ids), "pad_token_id": 0}
    expected = whole.generate(ids, **asked)
    misses = []
    for budget in (least, (least + bytes_of(whole)) // 2, bytes_of(whole) - 70_000):
        before = mapped_bytes()
        model = stowage.offload(checkpoints(family), device_memory=budget)
        placement = model.stowage.placement
        assert Delivery.EXPERTS in placement.deliveries
        assert model.stowage.cache_bytes <= placement.cache_bytes
        assert placement.device_bytes <= budget
        assert torch.equal(model.generate(ids, **asked), expected)
        assert 0 < mapped_bytes() - before <= placement.cache_bytes
        misses.append(model.stowage.stats()["expert_misses"])
        model.stowage.close()
    assert misses == sorted(misses, reverse=True)
    assert misses[0] > misses[-1]
    with pytest.raises(stowage.BudgetError):
        stowage.offload(checkpoints(family), device_memory=least - 1)


def test_experts_of_a_model_in_memory_move_to_an_image(tmp_path: Path, checkpoints: Callable[..., Path]) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoints("gpt_oss")).eval()
    model.model.layers[1].mlp.experts.down_proj.data *= 0.5
    expected = logits(model, prompt())
    stowage.offload(model, weights="*=experts", disk=f"{tmp_path}:16MiB")
    for _ in range(2):
        assert torch.equal(logits(model, prompt()), expected)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_next"])
def test_the_engine_answers_as_with_all_weights_in_memory(
    family: str, checkpoints: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mixed batches and every tier."""
    from stowage.cache import cost_model
    from tests.weights.test_engine import told

    monkeypatch.setattr(cost_model, "_DEADLINE_LEAST_S", 60.0)
    monkeypatch.setattr(cost_model.CostModel, "worth_loading", lambda *_: True)
    said = []
    for rules in ("auto", "*=experts"):
        folder = tmp_path / rules[:1].replace("*", "experts")
        memory = Memory(kv_cache_memory="8MiB", host_memory="64MiB", disk=f"{folder}:64MiB", weights=rules)
        with stowage.Engine(checkpoints(family), memory) as engine:
            said.append(told(engine, folder))
            if rules != "auto":
                assert engine.weights is not None
                engine.weights.check()
                assert "stowage_weights_expert_misses_total" in engine.metrics()
    assert said[0] == said[1]


def test_an_engine_outlives_a_disk_that_fails(
    checkpoints: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise OSError(errno.EIO, "the disk has gone")

    with stowage.Engine(checkpoints("mixtral"), Memory(kv_cache_memory="8MiB", weights="*=experts")) as engine:
        expected = engine.generate([[5, 6, 7]], GREEDY)[0].token_ids
        assert engine.weights is not None
        with monkeypatch.context() as broken:
            broken.setattr(reader, "_fill", fails)
            for _ in range(2):
                with pytest.raises(stowage.StorageError, match="the disk has gone"):
                    engine.generate([[15, 16, 17], [8, 9]], GREEDY)
                engine.weights.check()
        assert engine.alive
        engine.drop_device_cache()
        assert engine.generate([[5, 6, 7]], GREEDY)[0].token_ids == expected
        engine.check()


def test_a_checkpoint_that_changes_is_noticed(checkpoints: Callable[..., Path], tmp_path: Path) -> None:
    from tests.weights.test_failures import flip

    copied = Path(shutil.copytree(checkpoints("qwen3_moe"), tmp_path / "copied"))
    model = stowage.offload(copied, weights="*=experts")
    logits(model, prompt())
    flip(copied)
    for _ in range(2):
        with pytest.raises(stowage.CheckpointError, match="was changed"):
            logits(model, prompt())


def test_experts_that_were_not_chosen_are_not_computed_with(
    checkpoints: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module that reads all of its experts gets NaN, and its model is refused."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    whole = Qwen3MoeExperts.forward

    def forward(self: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
        return whole(self, hidden_states, top_k_index, top_k_weights) + 0.0 * self.down_proj.sum()

    monkeypatch.setattr(Qwen3MoeExperts, "forward", forward)
    with pytest.raises(stowage.UnsupportedModelError, match="did not choose"):
        stowage.offload(checkpoints("qwen3_moe"), weights="*=experts")

    def without(self: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
        return whole(self, hidden_states, top_k_index.long(), top_k_weights)

    monkeypatch.setattr(Qwen3MoeExperts, "forward", without)
    monkeypatch.setattr("stowage.weights.deliveries.chosen", lambda args, kwargs: args[1][:, :1])
    with pytest.raises(stowage.UnsupportedModelError, match="did not choose"):
        stowage.offload(checkpoints("qwen3_moe"), weights="*=experts")


def test_families_that_compute_with_all_experts_come_and_go_by_layer(
    checkpoints: Callable[..., Path], plain: Callable[..., Any]
) -> None:
    with pytest.raises(stowage.ConfigError, match="matches no module"):
        stowage.offload(checkpoints("llama4"), weights="*=experts")
    model = stowage.offload(checkpoints("llama4"), device_memory=int(bytes_of(plain("llama4")) * 0.8))
    assert Delivery.EXPERTS not in model.stowage.placement.deliveries
    assert torch.equal(logits(model, prompt()), logits(plain("llama4"), prompt()))


def test_two_threads_do_not_share_a_cache(checkpoints: Callable[..., Path], plain: Callable[..., Any]) -> None:
    model = stowage.offload(checkpoints("mixtral"), weights="*=experts", threads="refuse")
    inside, errors = threading.Event(), list[BaseException]()

    def meanwhile(*_: Any) -> None:
        def other() -> None:
            try:
                logits(model, prompt(3, 5))
            except stowage.ModelError as error:
                errors.append(error)

        if not inside.is_set():
            inside.set()
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()

    handle = model.model.layers[1].mlp.experts.register_forward_pre_hook(meanwhile)
    assert torch.equal(logits(model, prompt()), logits(plain("mixtral"), prompt()))
    handle.remove()
    assert "same time" in str(errors[0])
    assert torch.equal(logits(model, prompt()), logits(plain("mixtral"), prompt()))
