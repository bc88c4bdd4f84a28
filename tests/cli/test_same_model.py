"""What ``stowage verify`` says of a model beside Transformers: wrong ones are found in bfloat16, right ones pass."""

import hashlib
import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from stowage.config.memory import Memory
from stowage.engine.engine import Engine
from stowage.engine.sampling_params import SamplingParams
from stowage.evaluation import same_model
from stowage.evaluation.parity import verify
from stowage.evaluation.same_model import Answers
from stowage.evaluation.widened import float32_bytes, widened
from stowage.models import loading
from stowage.models.state_access import forward, keeper_of
from stowage.testing import tiny_models
from tests.cli.conftest import Stowage
from tests.depth import mostly_rare
from tests.families import MOST_UNLIKE

SMALL = Memory(kv_cache_memory="8MiB", host_memory="8MiB", block_size=4, chunk_blocks=2, snapshot_tokens=64)
PARAMS = SamplingParams(max_new_tokens=12, logprobs=5, prompt_logprobs=5, ignore_eos=True)


def answers(model: Any, lengths: Iterable[int] = (20, 90, 300)) -> Answers:
    draw = random.Random(0)
    with Engine(model, SMALL) as engine:
        prompts = [[draw.randrange(5, 250) for _ in range(count)] for count in lengths]
        return [(prompt, engine.generate([prompt], PARAMS)[0]) for prompt in prompts]


def rotary_base(model: Any) -> None:
    """Other frequencies: of a base of 15,000 instead of 10,000."""
    rotary = model.model.rotary_emb
    ends = torch.arange(len(rotary.inv_freq)) / len(rotary.inv_freq)
    rotary.inv_freq = rotary.inv_freq * (10000 / 15000) ** ends


def no_scale(model: Any) -> None:
    model.model.layers[1].self_attn.scaling = 1.0


def swapped_experts(model: Any) -> None:
    """The first two of one layer."""
    for weight in model.model.layers[1].mlp.experts.parameters():
        weight.data[[0, 1]] = weight.data[[1, 0]]


def epsilon(model: Any) -> None:
    model.model.layers[0].input_layernorm.variance_epsilon = 1e-2


def softcap(model: Any) -> None:
    """6 instead of 5, of attention's scores."""
    for layer in model.model.layers:
        layer.self_attn.attn_logit_softcapping = 6.0
    model.config.attn_logit_softcapping = 6.0


def window(model: Any) -> None:
    """One token more."""
    model.config.sliding_window += 1
    for layer in model.model.layers:
        if getattr(layer.self_attn, "sliding_window", None):
            layer.self_attn.sliding_window += 1


WRONG: dict[str, tuple[str, Callable[[Any], None]]] = {
    "rotary base": ("llama", rotary_base),
    "no scale in one layer": ("llama", no_scale),
    "swapped experts": ("mixtral", swapped_experts),
    "a norm's epsilon": ("llama", epsilon),
    "soft cap": ("gemma2", softcap),
    "window": ("mistral", window),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_models_are_found_in_bfloat16(what: str, tmp_path: Path) -> None:
    family, change = WRONG[what]
    path = tiny_models.write(family, tmp_path / "model", dtype="bfloat16")
    wrong = loading.load(path).model
    change(wrong)
    found = same_model.compare(lambda dtype: loading.load(path, dtype).model, answers(wrong))
    assert not found.same and found.finite and found.reference == "float32", found


@pytest.mark.parametrize("family", mostly_rare(MOST_UNLIKE, ["llama", "gemma2", "qwen3_moe", "qwen3_next"]))
def test_right_ones_pass_in_bfloat16(family: str, tmp_path: Path) -> None:
    path = tiny_models.write(family, tmp_path / "model", dtype="bfloat16")
    found = same_model.compare(lambda dtype: loading.load(path, dtype).model, answers(path))
    assert found.same and found.reference == "float32", found


@pytest.mark.slow
def test_states_that_are_rounded_more_often_are_no_other_model(tmp_path: Path) -> None:
    """MiniMax continues a state token by token and rounds it each time, as Transformers does in the same pieces; of a
    whole prompt it rounds once, and errors are half as large.
    """
    path = tiny_models.write("minimax", tmp_path / "model", tiny_models.TinySize(layers=4), seed=606, dtype="bfloat16")
    found = same_model.compare(lambda dtype: loading.load(path, dtype).model, answers(path), piece_tokens=64)
    assert found.same, found
    report = verify(path, SMALL, seed=606)
    assert report.parity and report.model is not None and report.model.same, report.model


@pytest.mark.parametrize("family", mostly_rare(MOST_UNLIKE, ["llama", "gemma4", "rwkv"]))
def test_what_is_widened_has_the_bits_of_float32(family: str, tmp_path: Path) -> None:
    path = tiny_models.write(family, tmp_path / "model", dtype="bfloat16")
    tokens = [random.Random(0).randrange(5, 250) for _ in range(90)]

    def logits(model: Any) -> torch.Tensor:
        return forward(model, tokens, 0, keeper_of(model).fresh(model.config), every_logit=True)

    with torch.inference_mode():
        narrow = loading.load(path).model
        before = logits(narrow)
        with widened(narrow):
            wide = logits(narrow)
        assert torch.equal(wide, logits(loading.load(path, "float32").model))
        assert torch.equal(before, logits(narrow)) and not torch.equal(before, wide)


def test_widening_holds_one_layer_at_a_time(tmp_path: Path) -> None:
    path = tiny_models.write("llama", tmp_path / "model", tiny_models.TinySize(layers=8), dtype="bfloat16")
    model = loading.load(path).model
    layers = model.model.layers
    held: list[int] = []

    def count(*_: Any) -> None:
        held.append(sum(4 * p.numel() for p in model.parameters() if p.dtype is torch.float32))

    for layer in layers:
        layer.mlp.register_forward_pre_hook(count)
    with torch.inference_mode(), widened(model):
        forward(model, [5, 6, 7], 0, keeper_of(model).fresh(model.config))
    assert len(held) == 8 and max(held) <= float32_bytes(model) < float32_bytes(model, at_once=True) / 2


@pytest.mark.slow
def test_without_room_for_float32_it_says_so_and_is_judged_coarsely(
    call: Stowage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_models.write("llama", tmp_path / "model", dtype="bfloat16")
    monkeypatch.setattr(same_model, "ram_total_bytes", lambda: 2 * tiny_bytes(path))
    flags = ("--kv-cache-memory", "8MiB", "--block-size", "4", "--chunk-blocks", "2", "--seed", "1")
    said = call("verify", path, *flags)
    assert said.exit_code == 0, said.output
    assert "float32, which shows smaller errors, does not fit" in said.stdout
    assert "It is the same model as Transformers'." in said.stdout
    report = json.loads(call("verify", path, *flags, "--json").stdout)["model"]
    assert (report["reference"], report["float32_fits"], report["same"]) == ("bfloat16", False, True)


def tiny_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


def nowhere_a_number(path: Path, where: str, at: tuple[int, int]) -> None:
    file = path / "model.safetensors"
    tensors = load_file(file)
    tensors[where][at] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})


def test_weights_that_are_no_numbers_are_told(call: Stowage, tmp_path: Path) -> None:
    """Whether every token meets them, or the engine answered from others."""
    path = tiny_models.write("llama", tmp_path / "model", dtype="bfloat16")
    asked = answers(path)
    nowhere_a_number(path, "model.embed_tokens.weight", (asked[0][0][3], 0))
    found = same_model.compare(lambda dtype: loading.load(path, dtype).model, asked)
    assert not found.same and not found.finite
    said = call("verify", path, "--kv-cache-memory", "8MiB", "--block-size", "4", "--chunk-blocks", "2", "--seed", "1")
    assert said.exit_code == 2 and "computed logits that are not numbers" in said.stderr
    nowhere_a_number(path, "model.layers.1.mlp.up_proj.weight", (0, 0))
    said = call("verify", path, "--kv-cache-memory", "8MiB")
    assert said.exit_code == 2 and "the model computes NaN, and no number, in bfloat16" in said.stderr


def hub_cache(path: Path, cache: Path) -> Path:
    """The files of ``path`` as the hub's client keeps them: large ones are called by another digest."""
    snapshot, blobs = cache / "models--a--b" / "snapshots" / "0a1b", cache / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in path.iterdir():
        content = file.read_bytes()
        large = file.suffix == ".safetensors"
        digest = hashlib.sha256(content) if large else hashlib.sha1(b"blob %d\0" % len(content) + content)
        (blobs / digest.hexdigest()).write_bytes(content)
        (snapshot / file.name).symlink_to(f"../../blobs/{digest.hexdigest()}")
    return snapshot


@pytest.mark.slow
@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_damaged_file_of_a_hub_cache_is_told(name: str, call: Stowage, tmp_path: Path) -> None:
    """One bit of a weight, and a number of the config: both sides would read the same."""
    snapshot = hub_cache(tiny_models.write("llama", tmp_path / "model", dtype="bfloat16"), tmp_path / "hub")
    flags = ("--kv-cache-memory", "8MiB", "--block-size", "4", "--chunk-blocks", "2", "--seed", "1")
    files = sum(file.suffix in (".json", ".safetensors") for file in snapshot.iterdir())
    said = call("verify", snapshot, *flags)
    assert said.exit_code == 0 and f"{files} files of the checkpoint have the digests" in said.stdout, said.output
    blob = (snapshot / name).resolve()
    content = bytearray(blob.read_bytes())
    content[-3] ^= 1
    blob.write_bytes(content)
    said = call("verify", snapshot, *flags)
    assert said.exit_code == 2 and f"{name} is damaged: its digest is not the one" in said.stderr, said.output
