"""What goes wrong with weights is told, and never answered over."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import stowage
from stowage import Engine, Memory, SamplingParams
from stowage.models import loading
from stowage.testing import tiny_models
from tests.weights import gguf_files, published_files
from tests.weights.conftest import bytes_of, logits, prompt
from tests.weights.test_published import CHANNELS, words

GREEDY = SamplingParams(max_new_tokens=8, ignore_eos=True)


def flip(directory: Path) -> None:
    """Change one byte of the last tensor, in place."""
    with (directory / "model.safetensors").open("r+b") as file:
        file.seek(-3, os.SEEK_END)
        byte = file.read(1)
        file.seek(-3, os.SEEK_END)
        file.write(bytes([byte[0] ^ 64]))


@pytest.mark.parametrize("rules", ["*=stream", "*=mapped"])
def test_a_checkpoint_that_changes_is_noticed(rules: str, copied: Path) -> None:
    model = stowage.offload(copied, weights=rules, host_memory="1GiB")
    logits(model, prompt())
    flip(copied)
    with pytest.raises(stowage.CheckpointError, match="was changed"):
        logits(model, prompt())
    with pytest.raises(stowage.CheckpointError, match="was changed"):
        logits(model, prompt())


def test_a_checkpoint_that_is_replaced_goes_on_as_it_was(copied: Path, plain: Callable[..., Any]) -> None:
    """A download puts a new file in the old one's place: the old one is still open."""
    model = stowage.offload(copied, weights="*=stream")
    other = copied / "new"
    other.write_bytes(b"something else")
    other.replace(copied / "model.safetensors")
    assert torch.equal(logits(model, prompt()), logits(plain("llama"), prompt()))


def test_an_engine_outlives_a_disk_that_fails(copied: Path) -> None:
    with stowage.Engine(copied, Memory(kv_cache_memory="8MiB", weights="*=stream")) as engine:
        expected = engine.generate([[5, 6, 7]], GREEDY)[0].token_ids
        assert engine.weights is not None
        (file,) = engine.weights._checkpoint.files
        kept = os.dup(file.fd), os.dup(file.direct)
        null = os.open(copied, os.O_RDONLY)
        for fd in (file.fd, file.direct):
            os.dup2(null, fd)
        with pytest.raises(stowage.StowageError):
            engine.generate([[5, 6, 7], [8, 9]], GREEDY)
        assert engine.alive
        for fd, good in zip((file.fd, file.direct), kept, strict=True):
            os.dup2(good, fd)
        for attempt in range(4):  # what failed while it was read ahead fails once more
            try:
                found = engine.generate([[5, 6, 7]], GREEDY)[0].token_ids
            except stowage.StorageError:
                assert attempt < 3
                continue
            assert found == expected
            break
        engine.drop_device_cache()
        assert engine.generate([[5, 6, 7]], GREEDY)[0].token_ids == expected
        engine.check()


def test_an_engine_whose_checkpoint_changes_fails_requests_and_lives(copied: Path) -> None:
    with stowage.Engine(copied, Memory(kv_cache_memory="8MiB", weights="*=stream")) as engine:
        engine.generate([[5, 6, 7]], GREEDY)
        flip(copied)
        assert not engine.failed
        with pytest.raises(stowage.CheckpointError, match="load the model again"):
            engine.generate([[5, 6, 7]], GREEDY)
        assert engine.alive
        assert engine.failed, "a server opens another one"


@pytest.mark.parametrize("family", ["llama", "gptj"])
def test_weights_in_memory_that_are_the_files_own_pages_are_not_computed_with_when_it_changes(
    family: str, checkpoints: Callable[..., Path], tmp_path: Path
) -> None:
    """Transformers maps a checkpoint of the right type. Another one that was copied over it was computed with, under
    the first one's name, and one that was cut short ended the process.
    """
    for change in (flip, lambda directory: os.truncate(directory / "model.safetensors", 4096)):
        copied = Path(shutil.copytree(checkpoints(family), tmp_path / "copied"))
        with Engine(copied, Memory(kv_cache_memory="8MiB")) as engine:
            assert engine.executor == {"llama": "paged", "gptj": "fallback"}[family]
            expected = engine.generate([[5, 6, 7]], GREEDY)[0].token_ids
            os.link(copied / "model.safetensors", tmp_path / "kept")
            shutil.copy(copied / "model.safetensors", copied / "new")
            os.replace(copied / "new", copied / "model.safetensors")  # the old one is still mapped
            assert engine.generate([[5, 6, 7]], GREEDY)[0].token_ids == expected
            os.replace(tmp_path / "kept", copied / "model.safetensors")
            change(copied)
            with pytest.raises(stowage.CheckpointError, match="was changed while a model is running"):
                engine.generate([[5, 6, 7]], GREEDY)
            assert engine.alive
        shutil.rmtree(copied)


@pytest.mark.parametrize("memory", [{}, {"weights": "*=stream"}])
@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "model.gguf"])
def test_files_that_are_replaced_while_they_are_loaded_are_refused(
    file: str, memory: dict[str, str], copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the new weights are called as the old ones, whose stored prefixes they find, and leave theirs to."""
    if file.endswith("gguf"):
        gguf_files.write(tiny_models.build("llama"), copied / file, gguf_files.Kind.Q8_0)
    shutil.copy(copied / file, copied / "new")
    of_checkpoint = loading.identity.of_checkpoint

    def replaced_meanwhile(*args: Any) -> str:
        found = of_checkpoint(*args)
        os.replace(copied / "new", copied / file)
        return found

    monkeypatch.setattr(loading.identity, "of_checkpoint", replaced_meanwhile)
    with pytest.raises(stowage.CheckpointError, match=f"{file} was changed or replaced while it was being loaded"):
        Engine(copied / file if file.endswith("gguf") else copied, Memory(kv_cache_memory="8MiB", **memory))


def test_a_mapped_file_that_changes_while_the_last_module_computes_is_noticed(copied: Path) -> None:
    """Each module looked at its file before it computed, and nobody did afterwards."""
    memory = Memory(kv_cache_memory="8MiB", host_memory="1GiB", weights="*=mapped")
    with Engine(copied, memory) as engine:
        engine.generate([[5, 6, 7]], GREEDY)
        handle = engine.model.lm_head.register_forward_hook(lambda *_: flip(copied))
        with pytest.raises(stowage.CheckpointError, match="was changed while a model is running"):
            engine.generate([[5, 6, 7]], SamplingParams(max_new_tokens=1, ignore_eos=True))
        handle.remove()


def test_a_budget_that_cannot_work_names_the_least(checkpoints: Callable[..., Path], plain: Callable[..., Any]) -> None:
    with pytest.raises(stowage.BudgetError, match="at least") as raised:
        stowage.offload(checkpoints("llama"), device_memory=100_000)
    least = int(str(raised.value).split("at least ")[1].split()[0])
    assert least < bytes_of(plain("llama"))
    model = stowage.offload(checkpoints("llama"), device_memory=least)
    assert torch.equal(logits(model, prompt()), logits(plain("llama"), prompt()))
    with pytest.raises(stowage.BudgetError):
        stowage.offload(checkpoints("llama"), device_memory=least - 1)


@pytest.mark.parametrize(
    ("asked", "error", "match"),
    [
        ({}, stowage.ConfigError, "given no budget"),
        ({"device_memory": "3 bananas"}, stowage.ConfigError, "device_memory cannot be used"),
        ({"weights": "modle.*=stream"}, stowage.ConfigError, "matches no module"),
        ({"weights": "*=disk"}, stowage.ConfigError, "not understood"),
        ({"weights": "*=mapped"}, stowage.BudgetError, "host"),
        ({"device_memory": "1GiB", "dtype": "int3"}, stowage.ConfigError, "int3"),
    ],
)
def test_bad_arguments_are_told(
    asked: dict[str, Any], error: type[Exception], match: str, checkpoints: Callable[..., Path]
) -> None:
    with pytest.raises(error, match=match):
        stowage.offload(checkpoints("llama"), **asked)


def test_a_model_in_memory_that_came_of_gguf_is_told_its_file(tmp_path: Path) -> None:
    made = tiny_models.build("llama")
    for name in ("one", "other"):
        gguf_files.write(made, tmp_path / f"{name}.gguf", gguf_files.Kind.Q8_0)
        model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="one.gguf").eval()
        file = tmp_path / ("FILE.gguf" if name == "other" else "one.gguf")
        with pytest.raises(stowage.UnsupportedModelError, match=rf"{file}'?, instead of the model, or disk=DIR:SIZE"):
            stowage.offload(model, weights="*=stream")
    with pytest.raises(stowage.UnsupportedModelError, match="Give its checkpoint's directory instead of the model"):
        stowage.offload(made, weights="*=stream")


@pytest.mark.parametrize("method", [CHANNELS, {"quant_method": "fbgemm_fp8"}, {"quant_method": "fp8"}])
def test_experts_stacked_in_fp8_are_refused(method: Mapping[str, Any], tmp_path: Path) -> None:
    """As Meta publishes Llama 4. Transformers takes the codes for numbers where the method is fp8."""
    path = tiny_models.write("llama4", tmp_path / "model", published_files.SIZE, dtype="bfloat16")
    state = load_file(path / "model.safetensors")
    for name in [name for name, values in state.items() if values.dim() == 3]:
        state[f"{name}_scale"] = state[name].float().abs().amax(1, keepdim=True) / 448
        state[name] = (state[name].float() / state[f"{name}_scale"]).to(torch.float8_e4m3fn)
    published_files.rewrite(path, state, quantization_config=dict(method))
    with pytest.raises(stowage.UnsupportedModelError, match=r"experts.\w+ is experts stacked in FP8, .* GGUF file"):
        loading.load(path)


@pytest.mark.parametrize("left", [("mlp",), ("mlp", "c_attn")])
def test_quantised_matrices_whose_inputs_come_first_are_refused(left: tuple[str, ...], tmp_path: Path) -> None:
    """GPT-2's, which were taken for matrices of outputs: a square one was multiplied the other way round."""
    left = ("wte", "wpe", "ln", "lm_head", *left)
    method, quantiser = words("gptq", 32)
    published, _ = published_files.write("gpt2", tmp_path, method, quantiser, without=left)
    with pytest.raises(stowage.UnsupportedModelError, match=r"c_\w+.weight has inputs before outputs"):
        loading.load(published)


def test_models_that_cannot_be_moved_are_refused(tmp_path: Path) -> None:
    with pytest.raises(stowage.ConfigError, match="or a model of Transformers"):
        stowage.offload(torch.nn.Linear(2, 2), device_memory="1GiB")
    model = tiny_models.build("llama")
    with pytest.raises(stowage.ConfigError, match="in memory already"):
        stowage.offload(model, device_memory="1GiB", attn_implementation="eager")
    with pytest.raises(stowage.UnsupportedModelError, match="disk=DIR:SIZE"):
        stowage.offload(model, weights="*=stream")
    expected = logits(tiny_models.build("llama"), prompt())
    assert torch.equal(logits(model, prompt()), expected)  # nothing was lost
    with pytest.raises(stowage.BudgetError):
        stowage.offload(model, weights="*=stream", disk=f"{tmp_path}:200KiB")
    assert torch.equal(logits(model, prompt()), expected)
    model.train()
    with pytest.raises(stowage.ModelError, match="training"):
        stowage.offload(model, weights="*=stream", disk=f"{tmp_path}:1GiB")
    model.eval()
    stowage.offload(model, weights="*=stream", disk=f"{tmp_path}:1GiB")
    with pytest.raises(stowage.ModelError, match="placed already"):
        stowage.offload(model, weights="*=stream", disk=f"{tmp_path}:1GiB")
    with pytest.raises(stowage.ConfigError, match="placed already"):
        stowage.Engine(model, Memory(kv_cache_memory="8MiB", device_memory="1GiB"))
    model.stowage.close()
    with pytest.raises(stowage.ModelError, match="were closed"):
        logits(model, prompt())


def test_pickles_are_refused_with_the_way_out(tmp_path: Path) -> None:
    model = tiny_models.build("llama")
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(stowage.CheckpointError, match="save_pretrained"):
        stowage.offload(tmp_path, device_memory="1GiB")


def test_a_weight_that_is_used_from_elsewhere_is_noticed(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its module is not called, so it is not delivered: what computes with it gets NaN, and the model is refused."""
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    whole = LlamaForCausalLM.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = whole(self, *args, **kwargs)
        out.logits = out.logits + self.model.layers[0].mlp.up_proj.weight.sum()
        return out

    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
    with pytest.raises(stowage.UnsupportedModelError, match="outside of the modules"):
        stowage.offload(copied, weights="*=stream")
