"""What PEFT does to a model with offloaded weights: the same bits as in memory, or refused in words, unchanged."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import stowage
from tests.weights.conftest import bytes_of, logits, prompt

RULES = ("*=stream", "last 1 of 2=stream")
"""Also where the first layers would let it happen, because they stay in memory."""


def adapted(model: Any) -> Any:
    """An adapter that changes answers, and nothing else is done to it."""
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    return peft.get_peft_model(model, config)


@pytest.fixture
def both(checkpoints: Callable[..., Path]) -> Callable[[str], tuple[Any, Any]]:
    def made(rules: str) -> tuple[Any, Any]:
        directory = checkpoints("llama")
        whole = AutoModelForCausalLM.from_pretrained(directory, dtype="auto").eval()
        return stowage.offload(directory, weights=rules), whole

    return made


@pytest.mark.parametrize("merge", ["merge_and_unload", "merge_adapter"])
@pytest.mark.parametrize("rules", RULES)
def test_merging_right_after_an_adapter_was_put_on_is_refused_and_changes_nothing(
    rules: str, merge: str, both: Callable[[str], tuple[Any, Any]]
) -> None:
    base, whole = both(rules)
    model = adapted(base)
    with pytest.raises(stowage.ModelError, match=r"merge_and_unload\(\)\.save_pretrained"):
        getattr(model, merge)()
    expected = logits(whole, prompt())
    assert torch.equal(logits(model.eval(), prompt()), logits(adapted(whole).eval(), prompt()))
    model.unmerge_adapter()
    assert torch.equal(logits(model.unload(), prompt()), expected)


def test_adapters_come_and_go_as_in_memory(both: Callable[[str], tuple[Any, Any]]) -> None:
    found = []
    for base in both("last 1 of 2=stream"):
        model = adapted(base).eval()
        torch.manual_seed(1)
        model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
        model.set_adapter("second")
        found.append([logits(model, prompt())])
        model.add_weighted_adapter(["default", "second"], [0.5, 0.5], "both", combination_type="cat")
        model.set_adapter("both")
        found[-1].append(logits(model, prompt()))
        model.delete_adapter("both")
        model.delete_adapter("second")
        model.set_adapter("default")
        found[-1].append(logits(model, prompt()))
        with model.disable_adapter():
            found[-1].append(logits(model, prompt()))
    ours, theirs = found
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert not torch.equal(ours[0], ours[2]) and not torch.equal(ours[2], ours[3])


def test_an_adapter_of_an_embedding_that_is_read_by_rows_learns_as_in_memory(checkpoints: Callable[..., Path]) -> None:
    """The embedding's padding gets no gradients there: PEFT asks the module for the token."""
    ids = torch.tensor([[0, 0, 5, 0, 6, 7, 0]])
    whole = AutoModelForCausalLM.from_pretrained(checkpoints("llama"), dtype="auto").eval()
    found = []
    for base in (stowage.offload(checkpoints("llama"), device_memory=int(bytes_of(whole) * 0.65)), whole):
        torch.manual_seed(0)
        config = peft.LoraConfig(r=2, target_modules=["embed_tokens"], init_lora_weights=False)
        model = peft.get_peft_model(base, config)
        model(input_ids=ids, labels=ids).loss.backward()
        assert base.model.embed_tokens.base_layer.padding_idx == 0
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    ours, theirs = found
    assert len(ours) == 2 and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_merging_into_what_stays_in_memory_is_right(both: Callable[[str], tuple[Any, Any]]) -> None:
    base, whole = both("*=resident")
    merged = adapted(base).merge_and_unload()
    assert torch.equal(logits(merged, prompt()), logits(adapted(whole).merge_and_unload(), prompt()))


@pytest.mark.parametrize(
    "kind", ["prompt", "sampled", "prefix", "encoder", pytest.param("ia3", marks=pytest.mark.slow)]
)
def test_what_learns_before_the_model_has_the_gradients_of_a_run_in_memory(
    kind: str, both: Callable[[str], tuple[Any, Any]]
) -> None:
    """Prompts and caches are given to the model, and it has no parameter of theirs."""
    task: dict[str, Any] = {"task_type": "CAUSAL_LM"}
    virtual = {**task, "num_virtual_tokens": 4}
    configs: dict[str, Callable[[], Any]] = {
        "prompt": lambda: peft.PromptTuningConfig(**virtual),
        "sampled": lambda: peft.PromptTuningConfig(**virtual, prompt_tuning_init="SAMPLE_VOCAB"),
        "prefix": lambda: peft.PrefixTuningConfig(**virtual),
        "encoder": lambda: peft.PromptEncoderConfig(**virtual, encoder_hidden_size=16),
        "ia3": lambda: peft.IA3Config(**task, target_modules=["q_proj"], feedforward_modules=[]),
    }
    found: list[list[Tensor]] = []
    for base in both("*=stream"):
        torch.manual_seed(0)
        model = peft.get_peft_model(base, configs[kind]()).train()
        out = model(input_ids=prompt(), labels=prompt())
        out.loss.backward()
        learned = [p.grad for p in model.parameters() if p.requires_grad]
        assert learned and all(grad is not None for grad in learned)
        found.append([out.loss.detach(), *(grad for grad in learned if grad is not None)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_gradients_of_inputs_are_those_of_a_run_in_memory(both: Callable[[str], tuple[Any, Any]]) -> None:
    """As saliency maps and attacks ask for them."""
    ours, whole = both("*=stream")
    embedded = whole.model.embed_tokens(prompt()).detach()
    asked = embedded.clone().requires_grad_()
    with pytest.raises(stowage.ModelError, match=r"requires_grad_\(False\)"):
        ours(inputs_embeds=asked).logits.sum().backward()
    found = []
    for model in (ours.requires_grad_(False), whole.requires_grad_(False)):
        asked = embedded.clone().requires_grad_()
        model(inputs_embeds=asked).logits.square().sum().backward()
        found.append(asked.grad)
    assert found[0] is not None and torch.equal(*found)
    assert torch.equal(logits(ours, prompt()), logits(whole, prompt()))
    assert not ours(input_ids=prompt()).logits.requires_grad, "as in memory, where nothing learns"


@pytest.mark.parametrize("rules", [*RULES, "*=mapped"])
def test_what_a_hook_adds_learns_as_in_memory(rules: str, checkpoints: Callable[..., Path]) -> None:
    """A steering vector, which neither the model nor its arguments know of."""
    whole = AutoModelForCausalLM.from_pretrained(checkpoints("llama"), dtype="auto").eval()
    found = []
    for model in (stowage.offload(checkpoints("llama"), weights=rules, host_memory="1GiB"), whole):
        model.requires_grad_(False)
        vector = torch.zeros(model.config.hidden_size, dtype=model.dtype, requires_grad=True)
        steer = model.model.layers[0].register_forward_hook(lambda _module, _args, out, add=vector: out + add)
        for _ in range(2):
            out = model(input_ids=prompt(), labels=prompt())
            (out.loss + vector.square().sum()).backward()
        steer.remove()
        found.append((out.loss.detach(), vector.grad, logits(model, prompt())))
    assert found[0][1].count_nonzero()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_what_a_hook_adds_to_weights_without_a_backward_pass_is_refused(checkpoints: Callable[..., Path]) -> None:
    model = stowage.offload(checkpoints("mixtral"), weights="*=experts").requires_grad_(False)
    expected = logits(model, prompt())
    assert torch.equal(model(input_ids=prompt(), use_cache=False).logits, expected)
    vector = torch.zeros(model.config.hidden_size, dtype=model.dtype, requires_grad=True)
    model.model.layers[0].register_forward_hook(lambda _module, _args, out: out + vector)
    with pytest.raises(stowage.ModelError, match="offloaded weights have no gradients"):
        model(input_ids=prompt())
    assert torch.equal(logits(model, prompt()), expected)


def test_a_forward_without_a_backward_pass_keeps_nothing(both: Callable[[str], tuple[Any, Any]]) -> None:
    """As where a loss is only looked at."""
    model = adapted(both("*=stream")[0])
    kept = list[weakref.ref[Any]]()

    class Marked(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, given: Tensor) -> Tensor:
            ctx.mark = type("Mark", (), {})()
            kept.append(weakref.ref(ctx.mark))
            return given.clone()

    model.base_model.model.model.layers[0].register_forward_hook(lambda _module, _args, out: Marked.apply(out))
    assert model(input_ids=prompt(), labels=prompt()).loss.requires_grad
    gc.collect()
    assert len(kept) == 1 and kept[0]() is None


def test_gradients_that_are_not_there_are_no_zeros(both: Callable[[str], tuple[Any, Any]]) -> None:
    """Of a model that is not frozen, asked in ways that take what is not connected for zero."""
    ours, whole = both("*=stream")
    asked = whole.model.embed_tokens(prompt()).detach().requires_grad_()
    with pytest.raises(stowage.ModelError, match=r"requires_grad_\(False\)"):
        torch.autograd.grad(ours(inputs_embeds=asked).logits.sum(), asked, allow_unused=True)
    with pytest.raises(stowage.ModelError, match=r"requires_grad_\(False\)"):
        torch.autograd.functional.vjp(lambda given: ours(inputs_embeds=given).logits.sum(), asked.detach())
    with pytest.raises(stowage.ModelError, match=r"torch.func.grad\(\)"):
        torch.func.grad(lambda given: ours(inputs_embeds=given).logits.sum())(asked.detach())
    assert torch.equal(logits(ours, prompt()), logits(whole, prompt()))
