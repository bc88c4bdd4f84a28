"""What a model computes besides its weights and its config is part of its name: a hook, another activation, a layer's
scale. What is stored by a model so changed is never read by one that is not, and the reverse.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.llama import modeling_llama

from stowage import Engine, Memory, ModelError, SamplingParams, offload
from stowage.core.key import SequenceKeys
from stowage.engine.request import Completion, Delta
from stowage.engine.sequence import Sequence
from stowage.executor.hooks import Hooks
from stowage.models import identity, loading
from stowage.models.state_access import keeper_of
from stowage.testing import tiny_models
from stowage.weights.module_code import hooks_of_others

PROMPT = list(range(3, 200))


class Doubled(modeling_llama.LlamaMLP):  # type: ignore[misc]
    def forward(self, x: Any) -> Any:
        return super().forward(x) * 2


def louder(_module: Any, _args: Any, output: Any) -> Any:
    return (output[0] + 0.5, *output[1:]) if isinstance(output, tuple) else output + 0.5


def hook(model: Any) -> None:
    model.model.layers[0].register_forward_hook(louder)


def activation(model: Any) -> None:
    model.model.layers[0].mlp.act_fn = torch.nn.ReLU()


def scale(model: Any) -> None:
    model.model.layers[1].self_attn.scaling *= 2


def epsilon(model: Any) -> None:
    model.model.norm.variance_epsilon = 0.5


def another_class(model: Any) -> None:
    model.model.layers[0].mlp.__class__ = Doubled


def another_forward(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    plain = mlp.forward
    mlp.forward = functools.wraps(plain)(lambda x: plain(x) * 2)


CHANGES = [hook, activation, scale, epsilon, another_class, another_forward]


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_has_another_name(change: Callable[[Any], None]) -> None:
    plain, changed = tiny_models.build("llama"), tiny_models.build("llama")
    change(changed)
    assert identity.of_parameters(plain) != identity.of_parameters(changed)


@pytest.mark.parametrize("change", CHANGES)
def test_so_has_one_whose_weights_are_placed(change: Callable[[Any], None], tmp_path: Path) -> None:
    model = offload(str(tiny_models.write("llama", tmp_path / "model")), device_memory="64MiB")
    before = identity.of_parameters(model)
    assert before == identity.of_parameters(model)
    change(model)
    assert identity.of_parameters(model) != before
    model.stowage.close()


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_moe", "nemotron_h"])
def test_one_that_an_engine_has_run_has_the_same(family: str) -> None:
    model = tiny_models.build(family)
    before = identity.of_parameters(model)
    assert before == identity.of_parameters(tiny_models.build(family))
    with Engine(model, memory()) as engine:
        ask(engine)
    assert identity.of_parameters(model) == before


def test_code_in_the_place_of_transformers_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_models.write("llama", tmp_path / "model")
    before = loading.load(path).identity
    own = modeling_llama.rotate_half
    with monkeypatch.context() as patched:
        patched.setattr(modeling_llama, "rotate_half", lambda x: own(x) * 2)
        assert loading.load(path).identity != before
    with monkeypatch.context() as patched:
        patched.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: x)
        assert loading.load(path).identity != before
    assert loading.load(path).identity == before


def memory(disk: Path | None = None) -> Memory:
    return Memory(kv_cache_memory="8MiB", host_memory="8MiB", disk=f"{disk}:64MiB" if disk else "")


def ask(engine: Engine, prompt: list[int] = PROMPT) -> Completion:
    return engine.generate([prompt], SamplingParams(max_new_tokens=4, ignore_eos=True, logprobs=1))[0]


def reused(completion: Completion) -> int:
    return sum(completion.reused_tokens.values())


def test_hooks_that_come_and_go_while_an_engine_runs(tmp_path: Path) -> None:
    with Engine(tiny_models.build("llama"), memory()) as engine:
        plain = ask(engine)
    with Engine(tiny_models.build("llama"), memory(tmp_path / "kv")) as engine:
        handle = engine.model.model.layers[0].register_forward_hook(louder)
        changed = ask(engine)
        again = ask(engine)
        handle.remove()
        after = ask(engine)
        assert (reused(changed), reused(again), reused(after)) == (0, 192, 0)
        assert again.logprobs == changed.logprobs != plain.logprobs
        assert after.logprobs == plain.logprobs
        assert reused(ask(engine)) == 192
    with Engine(tiny_models.build("llama"), memory(tmp_path / "kv")) as engine:
        assert ask(engine).logprobs == plain.logprobs


def test_what_was_begun_without_a_hook_is_not_shared_from_where_it_came() -> None:
    handles = []

    def come(_delta: Delta) -> None:
        if not handles:
            handles.append(engine.model.model.layers[0].register_forward_hook(louder))

    with Engine(tiny_models.build("llama"), memory()) as engine:
        request = engine.submit(PROMPT[:100], SamplingParams(max_new_tokens=100, ignore_eos=True), come)
        assert request.wait(60)
        handles[0].remove()
        longer = PROMPT[:100] + request.result().token_ids
        assert reused(ask(engine, longer)) == 64


def test_a_hook_that_came_and_went_while_a_request_ran() -> None:
    handles: list[Any] = []
    seen = []

    def come_and_go(_delta: Delta) -> None:
        seen.append(1)
        if len(seen) == 1:
            handles.append(engine.model.model.layers[0].register_forward_hook(louder))
        if len(seen) == 3:
            handles[0].remove()

    with Engine(tiny_models.build("llama"), memory()) as engine:
        request = engine.submit(PROMPT[:100], SamplingParams(max_new_tokens=100, ignore_eos=True), come_and_go)
        assert request.wait(60)
        assert reused(ask(engine, PROMPT[:100] + request.result().token_ids)) == 64


def test_a_sequence_that_begins_anew_with_another_hook_shares_nothing() -> None:
    """It was preempted: what it had shared until then is computed again, and not as it was."""
    model = tiny_models.build("llama")
    hooks = Hooks(model, None)
    parts: dict[str, Any] = {
        "keys": SequenceKeys(b"name", ()),
        "sampler": None,
        "text": None,
        "params": SamplingParams(),
    }
    sequence = Sequence(id=0, tokens=PROMPT, tables=[], prompt_tokens=len(PROMPT), new_tokens_max=1, **parts)
    sequence.hooks = hooks.seen()
    sequence.computed = 100
    sequence.extend_keys()
    model.model.layers[0].register_forward_hook(louder)
    hooks.look()
    sequence.computed = 150
    sequence.extend_keys()
    assert sequence.shared_tokens == 100
    sequence.restart()
    sequence.computed = 150
    assert sequence.shared_tokens == 0 == sequence.reusable_tokens - 1


def test_what_a_family_has_on_it_while_it_computes_are_no_hooks_of_others() -> None:
    """RWKV's layers are divided by hooks; a request that is submitted meanwhile shares as any other."""
    model = tiny_models.build("rwkv")
    with keeper_of(model).at_work(model):
        assert any(module._forward_hooks for module in model.modules())
        assert not hooks_of_others(model)
    model.rwkv.register_forward_hook(louder)
    assert hooks_of_others(model)


@pytest.mark.parametrize("family", ["llama", "mpt"])
def test_a_model_in_another_type_is_told_and_computes_when_it_is_back(family: str, tmp_path: Path) -> None:
    """Requests failed in the middle of a forward, or were answered in a type that their cache's name does not say."""
    path = tiny_models.write(family, tmp_path)
    with Engine(path, Memory(kv_cache_memory="8MiB", host_memory="8MiB")) as engine:
        (expected,) = engine.generate([PROMPT[:60]])
        engine.model.to(torch.float64)
        with pytest.raises(ModelError, match=r"is in torch.float64 on cpu now.*another Engine"):
            engine.generate([PROMPT[:50]])
        engine.model.to(torch.float32)
        assert engine.generate([PROMPT[:60]])[0].token_ids == expected.token_ids


def test_a_model_that_changes_its_type_while_a_request_runs() -> None:
    with Engine(tiny_models.build("llama"), Memory(kv_cache_memory="8MiB")) as engine:
        changed = False

        def once(_delta: Delta) -> None:
            nonlocal changed
            if not changed:
                changed = bool(engine.model.bfloat16())

        request = engine.submit(PROMPT, SamplingParams(max_new_tokens=8, ignore_eos=True), once)
        assert request.wait(60)
        with pytest.raises(ModelError, match=r"is in torch.bfloat16"):
            request.result()
