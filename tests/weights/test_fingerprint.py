"""A model that somebody has changed since it was loaded has another name, and one that was used has the same."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn

import stowage
from stowage import Engine, Memory, PrefixCache, SamplingParams
from stowage.models.identity import of_parameters
from tests.weights.conftest import bytes_of, logits, prompt

PROMPT = prompt(300)
WAIT_S = 30.0


def _merge(model: Any) -> None:
    lora = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    peft.get_peft_model(model, lora).merge_and_unload()


def _swap(model: Any) -> None:
    model.model.layers = model.model.layers[::-1]


def _replace(model: Any) -> None:
    weight = model.stowage.read("model.layers.0.mlp.up_proj.weight")
    model.model.layers[0].mlp.up_proj.weight = nn.Parameter(weight * 2)


@torch.no_grad()
def _write(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.weight[3, 5] += 1


@torch.no_grad()
def _write_small(model: Any) -> None:
    model.model.layers[1].input_layernorm.weight.data[7] = 2


def _turn(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.5)


def _embed(model: Any) -> None:
    torch.manual_seed(0)
    model.set_input_embeddings(nn.Embedding(512, 64))


def _shorten(model: Any) -> None:
    del model.model.layers[-1]


def _configure(model: Any) -> None:
    model.config.attention_dropout = 0.5


ANYWHERE = (_swap, _replace, _write_small, _turn, _embed, _shorten, _configure)
CHANGES: dict[str, tuple[Callable[[Any], None], ...]] = {
    "*=resident": (*ANYWHERE, _merge, _write),
    "*=stream": ANYWHERE,
}


@pytest.mark.parametrize("rules", CHANGES)
def test_a_changed_model_has_another_name(rules: str, checkpoints: Callable[..., Path]) -> None:
    names = set()
    for change in CHANGES[rules]:
        models = [stowage.offload(checkpoints("llama"), weights=rules) for _ in range(2)]
        for model in models:
            change(model)
        (name,) = {of_parameters(model) for model in models}
        assert name != models[0].stowage.identity, change.__name__
        names.add(name)
        for model in models:
            model.stowage.close()
    assert len(names) == len(CHANGES[rules])


def test_a_merged_adapter_finds_nothing_of_its_base(checkpoints: Callable[..., Path], tmp_path: Path) -> None:
    """PEFT writes through ``.data``. Before, prefixes of the base were loaded for it, and answers were wrong."""
    model = stowage.offload(checkpoints("llama"), weights="*=resident")
    with PrefixCache(model, "16MiB", f"{tmp_path}:64MiB") as prefixes:
        prefixes.prefill(PROMPT)
        assert prefixes.flush()
    with PrefixCache(model, "16MiB", f"{tmp_path}:64MiB") as prefixes:
        assert prefixes.restore(PROMPT, timeout_s=30).get_seq_length() == 256
    _merge(model)
    with PrefixCache(model, "16MiB", f"{tmp_path}:64MiB") as prefixes:
        assert prefixes.restore(PROMPT, timeout_s=30).get_seq_length() == 0


def test_a_used_model_has_its_name(placed: tuple[str, Any]) -> None:
    _, model = placed
    model.generate(PROMPT, max_new_tokens=3, do_sample=False)
    assert of_parameters(model) == model.stowage.identity
    with Engine(model, Memory(kv_cache_memory="16MiB")) as engine:
        engine.generate([PROMPT[0].tolist()], SamplingParams(max_new_tokens=3))
    assert of_parameters(model) == model.stowage.identity


def test_a_model_has_its_name_while_another_thread_computes(
    checkpoints: Callable[..., Path], plain: Callable[..., Any]
) -> None:
    """The module of an embedding that is read by rows is set up otherwise then."""
    model = stowage.offload(checkpoints("llama"), device_memory=int(bytes_of(plain("llama")) * 0.65))
    found: list[str] = []
    other = threading.Thread(target=lambda: found.append(model.stowage.identity_of_now()))

    def ask(*_: Any) -> None:
        other.start()
        other.join(0.2)

    model.model.embed_tokens.register_forward_pre_hook(ask)
    logits(model, PROMPT)
    other.join(WAIT_S)
    assert found == [model.stowage.identity]


def test_a_prefix_cache_is_asked_while_another_thread_computes(checkpoints: Callable[..., Path]) -> None:
    """Parameters are other objects then, and the model is the same."""
    model = stowage.offload(checkpoints("llama"), weights="*=stream")
    caches, found = list[PrefixCache](), list[Any]()

    def ask(*_: Any) -> None:
        if caches:
            other = threading.Thread(target=lambda: found.append(caches[0].restore(PROMPT)))
            other.start()
            other.join(WAIT_S)

    model.model.layers[1].mlp.register_forward_hook(ask)
    with PrefixCache(model, host_memory="16MiB") as prefixes:
        caches.append(prefixes)
        logits(model, PROMPT)
    assert len(found) == 1, "it raised nothing"
