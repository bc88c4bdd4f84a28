"""Where weights lie never changes an answer: not by one bit (cases A and B of the budgets)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import stowage
from stowage.testing import tiny_models
from stowage.weights.weight_unit import Delivery
from tests.depth import mostly_rare
from tests.nursery import QUICKLY
from tests.weights.conftest import bytes_of, logits, prompt

FAMILIES = (
    "llama",
    "gemma3",
    "gemma4",
    "mixtral",
    "qwen3_moe",
    "gpt_oss",
    "deepseek_v3",
    "nemotron_h",
    "qwen3_next",
    "bamba",
    "gpt2",
    "opt",
)
RULES = ("*=stream", "*=mapped", "*=prefetch", "last 1 of 2=prefetch,*.layers.0=stream,*=mapped")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_delivery_answers_as_plain_transformers_does(
    family: str, checkpoints: Callable[..., Path], plain: Callable[..., Any]
) -> None:
    ids = prompt()
    expected = logits(plain(family), ids)
    for rules in RULES if family in ("llama", "mixtral", "nemotron_h") else RULES[::3]:
        rules = rules.replace("*.layers.0", "*[a-z].0")
        model = stowage.offload(checkpoints(family), weights=rules, host_memory="1GiB")
        for _ in range(2):
            assert torch.equal(logits(model, ids), expected), rules
            model.stowage.check()
        model.stowage.close()


@pytest.mark.parametrize("family", ["hunyuan_moe", "ernie4_5_moe", "hy_v4"])
def test_what_a_class_makes_float32_of_other_bytes_stays_and_the_rest_is_streamed(family: str, tmp_path: Path) -> None:
    """Routers, and a head: published in bfloat16, and computed in float32, which lies in no file."""
    path = tiny_models.write(family, tmp_path / family, dtype="bfloat16")
    state = load_file(path / "model.safetensors")
    rounded = {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in state.items()}
    save_file(rounded, path / "model.safetensors", metadata={"format": "pt"})
    whole = AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval()
    made = {name for name, p in whole.named_parameters() if p.dtype is torch.float32}
    assert made
    model = stowage.offload(path, weights="*=stream")
    stats = model.stowage.stats()
    assert stats["image_bytes"] == 0 < stats["stream_bytes"]
    assert {name for name, p in model.named_parameters() if p.dtype is torch.float32} == made
    assert torch.equal(logits(model, prompt()), logits(whole, prompt()))
    model.stowage.close()


@pytest.mark.parametrize(
    "family",
    mostly_rare(
        ["deepseek_v3", "glm4_moe", "gemma4", "lfm2_moe", "minimax_m2", "kimi_linear", "apertus"],
        ["deepseek_v3", "gemma4", "kimi_linear"],
    ),
)
def test_loaded_buffers_keep_their_values(family: str, checkpoints: Callable[..., Path], tmp_path: Path) -> None:
    """Corrections of a router's scores, scalars of layers: published with values, and new models have none."""
    whole = AutoModelForCausalLM.from_pretrained(checkpoints(family)).eval()
    before, parameters = logits(whole, prompt()), {name for name, _ in whole.named_parameters()}
    loaded = [name for name in whole.state_dict() if name not in parameters and name not in whole.all_tied_weights_keys]
    generator = torch.Generator().manual_seed(1)
    for name in loaded:
        buffer = whole.get_buffer(name)
        if buffer.is_floating_point():
            buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator))
    whole.save_pretrained(tmp_path / "model")
    expected = logits(whole, prompt())
    assert loaded and not torch.equal(expected, before)
    for rules in ("*=stream", "*=mapped"):
        model = stowage.offload(tmp_path / "model", weights=rules, host_memory="1GiB")
        assert all(torch.equal(model.get_buffer(name), whole.get_buffer(name)) for name in loaded)
        assert torch.equal(logits(model, prompt()), expected)
        model.stowage.close()


@pytest.mark.parametrize("family", mostly_rare(["llama", "gemma3", "qwen3_next"], ["llama", "gemma3"]))
def test_generate_under_a_budget_answers_as_without_one(
    family: str, checkpoints: Callable[..., Path], plain: Callable[..., Any]
) -> None:
    ids, whole = prompt(), plain(family)
    asked = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(ids), "pad_token_id": 0}
    expected = whole.generate(ids, **asked)
    seen = set()
    for share in (1.5, 0.9, 0.65):
        model = stowage.offload(checkpoints(family), device_memory=int(bytes_of(whole) * share))
        assert torch.equal(model.generate(ids, **asked), expected)
        assert model.stowage.placement.device_bytes <= bytes_of(whole) * share
        seen |= set(model.stowage.placement.deliveries)
        model.stowage.close()
    assert seen >= {Delivery.RESIDENT, Delivery.ROWS, Delivery.STREAM}


def test_another_dtype_lies_in_an_image_that_vanishes(
    checkpoints: Callable[..., Path], plain: Callable[..., Any], tmp_path: Path
) -> None:
    with pytest.raises(stowage.UnsupportedModelError, match="disk=DIR:SIZE"):
        stowage.offload(checkpoints("llama"), weights="*=stream", dtype="bfloat16")
    directory = tmp_path / "weights"
    model = stowage.offload(checkpoints("llama"), weights="*=stream", dtype="bfloat16", disk=f"{directory}:16MiB")
    assert torch.equal(logits(model, prompt()), logits(plain("llama", "bfloat16"), prompt()))
    assert model.stowage.scratch_bytes >= bytes_of(plain("llama", "bfloat16")) * 0.9
    assert list(directory.iterdir()) == []
    with pytest.raises(stowage.BudgetError, match="larger size"):
        stowage.offload(checkpoints("llama"), weights="*=stream", dtype="bfloat16", disk=f"{directory}:64KiB")


@pytest.mark.parametrize("rules", ["*=stream", "last 1 of 2=prefetch", "*=resident"])
def test_a_model_may_be_loaded_in_inference_mode(
    rules: str, checkpoints: Callable[..., Path], plain: Callable[..., Any]
) -> None:
    with torch.inference_mode():
        model = stowage.offload(checkpoints("llama"), weights=rules, host_memory="1GiB")
        expected = logits(plain("llama"), prompt())
        assert torch.equal(logits(model, prompt()), expected)
    assert torch.equal(logits(model, prompt()), expected)
    assert torch.equal(model(input_ids=prompt(), use_cache=False).logits, expected)


@pytest.mark.parametrize("rules", ["*=stream", "last 1 of 2=prefetch"])
def test_what_became_of_weights_in_memory_is_what_is_moved(rules: str, tmp_path: Path) -> None:
    """Case A: never a stale copy. A parameter is replaced, others are fused and changed after loading."""
    model = tiny_models.build("llama")
    layer = model.model.layers[1]
    layer.mlp.up_proj.weight = torch.nn.Parameter(layer.mlp.up_proj.weight.detach() * 1.5, requires_grad=False)
    layer.self_attn.q_proj.weight.data = torch.randn_like(layer.self_attn.q_proj.weight)
    with torch.no_grad():
        layer.mlp.down_proj.weight.mul_(0.5)
    expected = logits(model, prompt())
    moved = stowage.offload(model, weights=rules, host_memory="1GiB", disk=f"{tmp_path}:16MiB")
    assert moved is model
    assert torch.equal(logits(model, prompt()), expected)


def test_tied_embeddings_are_read_by_rows_and_as_a_whole(tmp_path: Path) -> None:
    model = tiny_models.build("llama")
    model.config.tie_word_embeddings = True
    model.lm_head.weight = model.model.embed_tokens.weight
    model.save_pretrained(tmp_path / "tied")
    expected = logits(model, prompt())
    offloaded = stowage.offload(tmp_path / "tied", weights="*=stream")
    assert offloaded.lm_head.weight is offloaded.model.embed_tokens.weight
    for _ in range(2):
        assert torch.equal(logits(offloaded, prompt()), expected)


def test_shards_are_found_in_their_files(plain: Callable[..., Any], tmp_path: Path) -> None:
    plain("mixtral").save_pretrained(tmp_path, max_shard_size="300KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    model = stowage.offload(tmp_path, weights="*=stream")
    assert torch.equal(logits(model, prompt()), logits(plain("mixtral"), prompt()))


def test_an_engine_that_keeps_no_kv_below_takes_a_model_whose_weights_lie_there(
    checkpoints: Callable[..., Path], plain: Callable[..., Any]
) -> None:
    model = stowage.offload(checkpoints("llama"), weights="*=mapped", host_memory="1GiB")
    params = stowage.SamplingParams(max_new_tokens=4, ignore_eos=True)
    given = [prompt(30)[0].tolist()]
    with stowage.Engine(model, stowage.Memory(kv_cache_memory="8MiB")) as engine:
        (answer,) = engine.generate(given, params)
    with stowage.Engine(plain("llama"), stowage.Memory(kv_cache_memory="8MiB")) as engine:
        assert engine.generate(given, params)[0].token_ids == answer.token_ids


def test_a_prefix_cache_and_an_engine_take_an_offloaded_model(checkpoints: Callable[..., Path]) -> None:
    """Both name what they keep after the weights: of weights that are offloaded they must not read a name."""
    ids = prompt(200)
    names = []
    for family in ("llama", "qwen3"):
        model = stowage.offload(checkpoints(family), weights="*=stream")
        names.append(model.stowage.identity)
        asked = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        expected = model.generate(ids, **asked)
        with stowage.PrefixCache(model, host_memory="16MiB") as prefixes:
            first = model.generate(ids, past_key_values=prefixes.restore(ids), **asked)
            again = model.generate(ids, past_key_values=prefixes.restore(ids), **asked)
        assert torch.equal(first, expected)
        assert torch.equal(again, expected)
        with stowage.Engine(model, stowage.Memory(kv_cache_memory="8MiB")) as engine:
            (answer,) = engine.generate([ids[0].tolist()], stowage.SamplingParams(max_new_tokens=4, ignore_eos=True))
        assert answer.token_ids == expected[0, 200:].tolist()
        assert torch.equal(model.generate(ids, **asked), expected)  # the engine did not close what is not its own
    assert names[0] != names[1]
    assert all(names)


PEAK = """
import re, sys, gc
def status(name):
    return int(re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10
import torch, stowage
from stowage.weights import loading, source
from transformers import AutoModelForCausalLM
from stowage.models import loading as names
torch.set_num_threads(1)
(directory, device, host) = sys.argv[1:4]
open("/proc/self/clear_refs", "w").write("5")
before = status("VmHWM")
model = stowage.offload(directory, device_memory=int(device), host_memory=int(host))
for _ in range(3):
    with torch.no_grad():
        out = model(input_ids=torch.arange(5, 13)[None], use_cache=False).logits
print(before, *map(status, ("VmHWM", "VmRSS", "RssAnon", "RssFile")))
print(status("VmHWM") - before, model.stowage.placement.device_bytes, model.stowage.placement.host_bytes)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    size = tiny_models.TinySize(layers=12, hidden=512, vocab=4096)
    return tiny_models.write("mixtral", tmp_path_factory.mktemp("large"), size)


@pytest.mark.slow
@pytest.mark.parametrize("host_share", mostly_rare([0.0, 0.4], [0.4]))
def test_budgets_are_hard(host_share: float, large: Path) -> None:
    """The process's own peak, from before loading on, stays below the budget and the largest module."""
    total = sum(path.stat().st_size for path in large.glob("*.safetensors"))
    device, host = int(total * 0.45), int(total * host_share)
    environment = os.environ | {"PYTHONPATH": "src", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", QUICKLY + PEAK, str(large), str(device), str(host)],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
        timeout=300,
    )
    grown, device_used, host_used = map(int, done.stdout.split()[-3:])
    print(done.stdout)
    print(f"{total:,} bytes of weights; peak grew by {grown:,}; placed {device_used:,} + {host_used:,}")
    largest = total // 12
    assert device_used <= device
    assert host_used <= host
    assert grown <= device + host + 2 * largest + (24 << 20)
