"""Offloaded weights are multiplied as those that stay, and none of them gets gradients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

import stowage
from stowage.testing import tiny_models
from tests.weights.conftest import logits, prompt

RULES = ("*=stream", "*=mapped", "*=prefetch", "last 1 of 2=stream", "*=resident")


class Products(TorchDispatchMode):
    """What is multiplied by matrices, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, list[tuple[int, ...]]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("mm", "bmm", "addmm", "baddbmm", "linear"):
            self.seen.append((name, [tuple(a.shape) for a in args if isinstance(a, torch.Tensor)]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rules", RULES)
def test_the_last_tokens_of_a_batch_are_multiplied_as_without_offloading(rules: str, tmp_path: Path) -> None:
    """A slice times a weight that requires no gradients is a batch of products to torch, each with a copy of the
    weight: prefill took half as long again, and eight prompts copied the output layer eight times.
    """
    ids = torch.cat([prompt(seed=seed) for seed in range(3)])
    tiny_models.build("llama", tiny_models.TinySize(layers=4)).save_pretrained(tmp_path)
    expected, result = multiplied(AutoModelForCausalLM.from_pretrained(tmp_path).eval(), ids)
    assert len(expected) > 16
    model = stowage.offload(tmp_path, weights=rules, host_memory="1GiB")
    linear = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    modes: list[bool] = []
    for module in linear:
        module.register_forward_hook(lambda module, _args, _out: modes.append(module.weight.is_inference()))
    for _ in range(4):  # weights come to other places each time
        found, out = multiplied(model, ids)
        assert found == expected
        assert torch.equal(out, result)
    assert modes == [False] * 4 * len(linear), "torch takes a weight of that mode for one that requires no gradients"


def multiplied(model: Any, ids: torch.Tensor) -> tuple[list[tuple[str, list[tuple[int, ...]]]], torch.Tensor]:
    with torch.inference_mode(), Products() as products:
        out = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits
    return products.seen, out


@pytest.mark.parametrize("rules", RULES[:4])
def test_a_forward_that_asks_for_gradients_gets_logits_without(
    rules: str, checkpoints: Callable[..., Path], plain: Callable[..., Any]
) -> None:
    model = stowage.offload(checkpoints("llama"), weights=rules, host_memory="1GiB")
    assert torch.is_grad_enabled()
    out = model(input_ids=prompt(), use_cache=False).logits
    assert torch.equal(out, logits(plain("llama"), prompt()))
    with pytest.raises(stowage.ModelError, match="nothing to go back to"):
        out.sum().backward()
    with pytest.raises(stowage.ModelError, match="nothing to go back to"):
        model(input_ids=prompt(), labels=prompt()).loss.backward()
    out[:, -1] = 0  # it may be changed, as any other
    hidden = model(input_ids=prompt(), output_hidden_states=True, return_dict=False)[-1]
    assert not hidden[0].requires_grad or rules == "*=mapped"
    assert torch.is_grad_enabled()
    with pytest.raises(IndexError):
        model(input_ids=prompt() + 1_000_000, use_cache=False)
    assert torch.is_grad_enabled()
    model.stowage.close()
    with pytest.raises(stowage.ModelError, match="closed"):
        model(input_ids=prompt())
    assert torch.is_grad_enabled()


def test_a_part_that_asks_for_gradients_is_refused(checkpoints: Callable[..., Path], plain: Callable[..., Any]) -> None:
    for rules in ("*=stream", "*.layers.*=resident,lm_head=resident,*=stream"):
        model = stowage.offload(checkpoints("llama"), weights=rules)
        with pytest.raises(stowage.ModelError, match="no_grad"):
            model.model(input_ids=prompt(), use_cache=False)
        with torch.no_grad():
            hidden = model.model(input_ids=prompt(), use_cache=False).last_hidden_state
            assert torch.equal(hidden, plain("llama").model(input_ids=prompt(), use_cache=False).last_hidden_state)
        model.stowage.check()


def test_a_model_that_stays_in_memory_can_be_trained(checkpoints: Callable[..., Path]) -> None:
    model = stowage.offload(checkpoints("llama"), weights="*=resident")
    model(input_ids=prompt(), labels=prompt(), use_cache=False).loss.backward()
    assert all(p.grad is not None for p in model.parameters())


class Adapted(torch.nn.Module):
    """As adapters are put on a linear layer."""

    def __init__(self, base: torch.nn.Module) -> None:
        super().__init__()
        self.base = base
        self.down = torch.nn.Linear(base.in_features, 2, bias=False)
        self.up = torch.nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def test_an_adapter_answers_and_is_not_trained_in_silence(
    checkpoints: Callable[..., Path], plain: Callable[..., Any]
) -> None:
    whole = AutoModelForCausalLM.from_pretrained(checkpoints("llama")).eval()
    model = stowage.offload(checkpoints("llama"), weights="*=stream")
    for each in (whole, model):
        torch.manual_seed(1)
        each.model.layers[1].mlp.up_proj = Adapted(each.model.layers[1].mlp.up_proj)
    assert torch.equal(logits(model, prompt()), logits(whole, prompt()))
    assert not torch.equal(logits(model, prompt()), logits(plain("llama"), prompt()))
    with pytest.raises(stowage.ModelError, match="would get no gradient"):
        model(input_ids=prompt(), labels=prompt(), use_cache=False)
    with pytest.raises(stowage.ModelError, match="would get no gradient"):
        torch.nn.ModuleList([model]).train()
    model.requires_grad_(False)
    assert torch.equal(model(input_ids=prompt(), use_cache=False).logits, logits(whole, prompt()))
