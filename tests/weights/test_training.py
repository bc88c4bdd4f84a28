"""What is added to a model with offloaded weights is trained as with all of them in memory: to the bit."""

from __future__ import annotations

import ctypes
import io
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import stowage
from stowage.testing import tiny_models
from tests.depth import mostly_rare
from tests.weights.architectures import TABLE
from tests.weights.conftest import logits, prompt

RULES = ("*=stream", "*=prefetch", "*=mapped", "last 1 of 2=stream")
FAMILIES = {
    "llama": "all-linear",
    "gemma3": "all-linear",
    "gpt2": ["c_attn", "c_fc"],
    "phi3": "all-linear",
    "mixtral": ["q_proj", "v_proj"],
    "deepseek_v3": ["o_proj", "kv_a_proj_with_mqa"],
    "falcon_h1": ["q_proj", "gate_proj"],
    "qwen3_next": ["q_proj", "out_proj"],
}
SPREAD = 0.1


def adapted(model: Any, targets: Any = "all-linear", checkpointing: bool = False, dropout: float = SPREAD) -> Any:
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=targets, lora_dropout=dropout)
    found = peft.get_peft_model(model, config)
    for name, parameter in found.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    if checkpointing:
        model.gradient_checkpointing_enable()
    return found.train()


def learned(model: Any, steps: int = 2, inputs: Callable[[int], dict[str, Any]] | None = None) -> list[Any]:
    """The loss of each forward, and of each step all gradients and what became of the parameters."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    found: list[Any] = []
    torch.manual_seed(1)
    for step in range(steps):
        for part in range(2):
            given = inputs(2 * step + part) if inputs else {"input_ids": (ids := batch(2 * step + part)), "labels": ids}
            loss = model(**given).loss
            loss.backward()
            found.append(loss.detach().clone())
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        found += [p.detach().clone() for p in model.parameters() if p.requires_grad]
    return found


def batch(seed: int) -> Tensor:
    return torch.cat([prompt(24, 2 * seed), prompt(24, 2 * seed + 1)])


def same(found: list[Any], expected: list[Any]) -> bool:
    return len(found) == len(expected) and all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))


def in_memory(directory: Path, dtype: str = "auto") -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    "family",
    mostly_rare(
        [family if family == "llama" else pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES],
        ["llama", "gemma3", "mixtral"],
    ),
)
def test_losses_gradients_and_steps_are_those_of_a_model_in_memory(
    family: str, checkpointing: bool, checkpoints: Callable[..., Path]
) -> None:
    targets, steps = FAMILIES[family], 2 if family == "llama" else 1
    expected = learned(adapted(in_memory(checkpoints(family)), targets, checkpointing), steps)
    assert len(expected) > 10
    for rules in RULES if family == "llama" else RULES[:1]:
        model = stowage.offload(checkpoints(family), weights=rules, host_memory="1GiB")
        assert same(learned(adapted(model, targets, checkpointing), steps), expected), rules
        model.stowage.check()
        model.stowage.close()


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_half_precision_too(checkpointing: bool, tmp_path: Path) -> None:
    tiny_models.build("llama", tiny_models.TinySize(layers=4)).to(torch.bfloat16).save_pretrained(tmp_path)
    expected = learned(adapted(in_memory(tmp_path), checkpointing=checkpointing), 1)
    model = stowage.offload(tmp_path, weights="*=stream")
    assert next(model.parameters()).dtype is torch.bfloat16
    assert same(learned(adapted(model, checkpointing=checkpointing), 1), expected)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_an_encoder_and_a_decoder(checkpointing: bool, tmp_path: Path) -> None:
    """What the encoder has computed goes into every layer of the decoder, and gradients come back from each."""
    torch.manual_seed(3)
    whole = TABLE["t5"]()
    whole.save_pretrained(tmp_path)

    def inputs(seed: int) -> dict[str, Any]:
        return {"input_ids": batch(seed), "labels": batch(seed + 50)[:, :9].contiguous()}

    expected = learned(adapted(type(whole).from_pretrained(tmp_path), ["q", "v"], checkpointing), inputs=inputs)
    model = stowage.offload(tmp_path, weights="*=stream")
    assert same(learned(adapted(model, ["q", "v"], checkpointing), inputs=inputs), expected)


def test_a_round_reads_every_unit_twice(checkpoints: Callable[..., Path]) -> None:
    """Forwards and backwards; with checkpointing a layer is computed again from what is there for its gradients."""
    for checkpointing in (False, True):
        source = (model := stowage.offload(checkpoints("llama"), weights="*=stream")).stowage
        model = adapted(model, checkpointing=checkpointing)
        learned(model, 1)
        before, rounds = source.stats()["read_bytes"], 4
        learned(model, rounds // 2)
        read = (source.stats()["read_bytes"] - before) / source.placement.pass_bytes
        assert read < 2 * rounds + 1
        source.check()


def test_answers_and_threads_between_and_beside(checkpoints: Callable[..., Path], plain: Callable[..., Any]) -> None:
    """Between a forward and its backward anything may be computed, and another thread all the time."""
    expected = learned(adapted(in_memory(checkpoints("llama")), dropout=0.0))
    base = stowage.offload(checkpoints("llama"), weights="*=stream")
    model, over, wrong, answered = adapted(base, dropout=0.0), threading.Event(), list[object](), 0
    own = torch.autograd.backward

    def beside() -> None:
        nonlocal answered
        while not over.is_set():
            try:
                with torch.no_grad():
                    base(input_ids=prompt(7), use_cache=False)
                answered += 1
            except Exception as error:  # noqa: BLE001  # none is right here
                wrong.append(error)

    def between(*args: Any, **kwargs: Any) -> Any:
        with model.disable_adapter():
            wrong.extend(
                [] if torch.equal(logits(base, prompt()), logits(plain("llama"), prompt())) else ["other bits"]
            )
        return own(*args, **kwargs)

    found = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.autograd, "backward", between)
        found.append(learned(model))
    thread = threading.Thread(target=beside)
    model = adapted(stowage.offload(checkpoints("llama"), weights="*=stream"), dropout=0.0)
    base = model.base_model.model
    thread.start()
    try:
        found.append(learned(model))
    finally:
        over.set()
        thread.join()
    assert not wrong and answered
    assert all(same(each, expected) for each in found)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interrupt that hits a finalizer
@pytest.mark.parametrize("checkpointing", [False, True])
def test_whatever_ends_a_backward_pass_the_next_one_is_right(
    checkpointing: bool, checkpoints: Callable[..., Path]
) -> None:
    ids = batch(0)

    def gradients(model: Any) -> list[Tensor]:
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected = gradients(adapted(in_memory(checkpoints("llama")), checkpointing=checkpointing, dropout=0.0))
    base = stowage.offload(checkpoints("llama"), weights="*=stream")
    model = adapted(base, checkpointing=checkpointing, dropout=0.0)
    chance, target = random.Random(5), threading.get_ident()
    ended = 0

    class Ended(BaseException):
        pass

    def interrupt(after_s: float) -> None:
        time.sleep(after_s)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(target), ctypes.py_object(Ended))

    for _ in range(25):
        thread = threading.Thread(target=interrupt, args=(chance.random() * 0.05,))
        try:
            thread.start()
            while thread.is_alive():
                assert same(gradients(model), expected)
            assert same(gradients(model), expected), "Python drops what is raised in a finalizer: nobody hears of it"
        except Ended:
            ended += 1
        except stowage.ModelError as error:
            assert "taken away" in str(error)
        finally:
            thread.join()
        assert torch.is_grad_enabled()
    assert ended
    assert same(gradients(model), expected)
    with model.disable_adapter():
        assert torch.isfinite(logits(base, ids)).all()
    base.stowage.check()


def test_a_graph_that_is_kept_is_used_twice(checkpoints: Callable[..., Path]) -> None:
    ids, found = batch(3), []
    for base in (in_memory(checkpoints("llama")), stowage.offload(checkpoints("llama"), weights="*=stream")):
        model = adapted(base, dropout=0.0)
        trained = [p for p in model.parameters() if p.requires_grad]
        loss = model(input_ids=ids, labels=ids).loss
        first = torch.autograd.grad(loss, trained, retain_graph=True)
        second = torch.autograd.grad(loss * 3, trained)
        found.append([*first, *second])
    assert same(*found)


def test_what_keeps_weights_by_itself_is_told(checkpoints: Callable[..., Path]) -> None:
    """A checkpoint of torch's inside of the model computes again when the weights are not there; hooks keep views."""
    model = adapted(stowage.offload(checkpoints("llama"), weights="*=stream"), dropout=0.0)
    layer = model.base_model.model.model.layers[1]
    own = layer.mlp.forward
    for reentrant in (False, True):
        layer.mlp.forward = lambda x, r=reentrant: torch.utils.checkpoint.checkpoint(own, x, use_reentrant=r)
        with pytest.raises(stowage.ModelError, match=r"is offloaded|keeps a weight"):
            model(input_ids=batch(0), labels=batch(0)).loss.backward()
    kept: list[Any] = []

    def keeping(x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            return own(x)  # type: ignore[no-any-return]

    layer.mlp.forward = keeping
    with pytest.raises(stowage.ModelError, match="keeps a weight"):
        model(input_ids=batch(0), labels=batch(0))
    kept.clear()
    layer.mlp.forward = own
    model(input_ids=batch(0), labels=batch(0)).loss.backward()
    model.base_model.model.stowage.check()


def test_an_adapter_is_saved_by_peft_and_answers_where_it_is_loaded(
    checkpoints: Callable[..., Path], tmp_path: Path
) -> None:
    base = stowage.offload(checkpoints("llama"), weights="*=stream")
    model = adapted(base)
    learned(model)
    model.eval().save_pretrained(tmp_path)
    expected = logits(model, prompt())
    whole = peft.PeftModel.from_pretrained(in_memory(checkpoints("llama")), tmp_path).eval()
    assert torch.equal(logits(whole, prompt()), expected)
    ours = stowage.offload(checkpoints("llama"), weights="*=stream", adapter=tmp_path)
    assert torch.equal(logits(ours, prompt()), expected)
    again = stowage.offload(checkpoints("llama"), weights="*=stream")
    further = [
        peft.PeftModel.from_pretrained(each, tmp_path, is_trainable=True).train()
        for each in (again, in_memory(checkpoints("llama")))
    ]
    torch.manual_seed(4)
    first = learned(further[0])
    torch.manual_seed(4)
    assert same(first, learned(further[1]))


@pytest.mark.parametrize("merge", ["merge_and_unload", "merge_adapter"])
def test_merging_is_refused_and_changes_nothing(
    merge: str, checkpoints: Callable[..., Path], plain: Callable[..., Any], tmp_path: Path
) -> None:
    """Also where the first layers would let it happen, because they stay in memory."""
    adapted(in_memory(checkpoints("llama"))).save_pretrained(tmp_path)
    base = stowage.offload(checkpoints("llama"), weights="last 1 of 2=stream")
    model = peft.PeftModel.from_pretrained(base, tmp_path).eval()
    expected = logits(model, prompt())
    with pytest.raises(stowage.ModelError, match=r"merge_and_unload\(\)\.save_pretrained"):
        getattr(model, merge)()
    assert torch.equal(logits(model, prompt()), expected)
    assert torch.equal(logits(model.unload(), prompt()), logits(plain("llama"), prompt()))


def test_a_dictionary_of_everything_holds_no_wrong_tensor(checkpoints: Callable[..., Path]) -> None:
    model = adapted(stowage.offload(checkpoints("llama"), weights="*=stream"))
    found = model.state_dict()
    own = [name for name in found if "lora_" in name]
    assert own and all(torch.isfinite(found[name]).all() for name in own)
    assert all(not found[name].requires_grad for name in own)
    offloaded = next(name for name in found if name.endswith("q_proj.base_layer.weight"))
    with pytest.raises(stowage.ModelError, match="is offloaded"):
        found[offloaded].sum()
    with pytest.raises(stowage.ModelError, match="is offloaded"):
        torch.save(found, io.BytesIO())
    with pytest.raises(stowage.ModelError, match="save_pretrained"):
        model.base_model.model.state_dict()


def test_what_cannot_be_trained_says_why(checkpoints: Callable[..., Path]) -> None:
    experts = stowage.offload(checkpoints("mixtral"), weights="*=experts", host_memory="1GiB")
    with pytest.raises(stowage.ModelError, match="experts"):
        adapted(experts, ["q_proj"])
    base = stowage.offload(checkpoints("llama"), weights="*=stream")
    with pytest.raises(stowage.ModelError, match="get_peft_model"):
        base.train()
    with pytest.raises(stowage.ModelError, match="get_peft_model"):
        base.add_adapter(peft.LoraConfig())
    model = adapted(base)
    base.model.layers[0].mlp.up_proj.base_layer.weight.requires_grad_(True)
    with pytest.raises(stowage.ModelError, match="not frozen"):
        model(input_ids=prompt(), labels=prompt())
