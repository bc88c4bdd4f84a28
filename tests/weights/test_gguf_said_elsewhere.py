"""What GGUF files say in another way than a config, or not at all, though it changes what is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from stowage import CheckpointError, UnsupportedModelError
from stowage.models import loading
from stowage.models.gguf import checkpoint as gguf_checkpoint
from stowage.models.gguf.config import config_of
from stowage.models.gguf.llama3 import scaling_of
from stowage.weights import gguf
from stowage.weights.gguf import GgufFile, GgufTensor, Type
from tests.weights import gguf_files
from tests.weights.conftest import logits, prompt
from tests.weights.gguf_models import SIZE, made, model_of

LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0}


OF_LENGTHS = [
    *((size, *said) for size in (16, 64, 128) for said in ((8, 4.0, 8192), (32, 4.0, 4096), (16, 4.0, 65536))),
    (64, 8, 3.5, 2000),
    (128, 8, 3.5, 2000),
]


@pytest.mark.parametrize(("size", "factor", "high", "tokens"), OF_LENGTHS)
def test_llama_3s_scaling_is_found_again_of_any_length(size: int, factor: int, high: float, tokens: int) -> None:
    """Frequencies are those of the config, to the bit."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    said = {**LLAMA3, "factor": float(factor), "high_freq_factor": high, "original_max_position_embeddings": tokens}
    config = LlamaConfig(head_dim=size, rope_parameters=said)
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1.0 / (500000.0 ** (torch.arange(0, size, 2).float() / size))
    found = scaling_of((plain / expected).numpy(), 500000.0, 4.0)
    assert found is not None
    config.rope_parameters = {"rope_theta": 500000.0, **found}
    ours, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    assert torch.allclose(ours, expected, rtol=2e-5) if high != 4.0 else torch.equal(ours, expected)


def test_factors_that_are_not_llama_3s_are_none() -> None:
    assert scaling_of(np.linspace(1, 8, 32, dtype=np.float32), 500000.0, 4.0) is None


def test_a_factor_of_attention_is_transformers_own_under_the_name_that_converters_write(tmp_path: Path) -> None:
    """Of YaRN; 1 is not what would be taken without it."""
    scaled = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
    own = {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 32}
    for times in (1.0, 1.3):
        plain = model_of("qwen3", tmp_path / f"{times}", rope_parameters={**scaled, "attention_factor": times})
        said = {f"qwen3.rope.{key}": value for key, value in {**own, "scaling.yarn_attn_factor": times}.items()}
        path = gguf_files.write(plain, tmp_path / "model.gguf", tokens=said)
        assert torch.allclose(logits(loading.load(path).model, prompt()), logits(plain, prompt()), atol=1e-5)
    for others in ({"scaling.type": "none"}, {"scaling.attn_factor": 0.5}):
        refused = {**said, **{f"qwen3.rope.{key}": value for key, value in others.items()}}
        with pytest.raises(UnsupportedModelError, match="attn_factor"):
            loading.load(gguf_files.write(plain, tmp_path / "model.gguf", tokens=refused))


FIRST_MISTRAL = {
    "attention.head_count": 32,
    "attention.head_count_kv": 8,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "block_count": 32,
    "context_length": 32768,
    "embedding_length": 4096,
    "feed_forward_length": 14336,
}


def _config(arch: str, sizes: dict[str, Any]) -> Any:
    """Of a file with these fields and nothing else."""
    path = Path("model.gguf")
    names = ["token_embd.weight", *(f"blk.{layer}.attn_norm.weight" for layer in range(40))]
    tensors = {name: GgufTensor(name, Type("F16", 1, 2), (32000, 4096), path, 0, 0) for name in names}
    fields = {"general.architecture": arch, **{f"{arch}.{key}": value for key, value in sizes.items()}}
    return config_of(GgufFile((path,), fields, tensors), {})


@pytest.mark.parametrize(
    ("changed", "window"),
    [
        ({}, 4096),
        ({"rope.freq_base": 10000.0}, 4096),
        ({"rope.freq_base": 1000000.0}, None),
        ({"context_length": 8192}, None),
        ({"block_count": 40}, None),
    ],
)
def test_the_first_mistral_has_its_window_though_no_file_says_it(changed: dict[str, Any], window: int | None) -> None:
    assert getattr(_config("llama", FIRST_MISTRAL | changed), "sliding_window", None) == window


def test_starcoder_2_has_its_window_though_no_file_says_it() -> None:
    sizes = {**FIRST_MISTRAL, "attention.layer_norm_epsilon": 1e-5}
    assert _config("starcoder2", sizes).sliding_window == 4096
    assert _config("starcoder2", {**sizes, "attention.sliding_window": 0}).sliding_window is None


FUSED = ("gemma4", "llama", "llama with biases", "qwen2", "qwen3", "smollm3")


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0])
def test_queries_keys_and_values_in_one_tensor_are_what_they_were_apart(name: str, kind: Kind, tmp_path: Path) -> None:
    """As converters write them when they are told to, biases too."""
    plain = made(name, tmp_path / "model")
    arch = gguf_files.arch_of(plain.config)
    each = dict(gguf_files.tensors(plain, arch))
    parts, joined = set[str](), []
    for first in [own for own in each if ".attn_q." in own and own.replace("attn_q.", "attn_v.") in each]:
        names = [first.replace("attn_q.", f"attn_{part}.") for part in "qkv"]
        joined.append((first.replace("attn_q.", "attn_qkv."), np.concatenate([each[own] for own in names])))
        parts |= {*names}
    assert joined
    apart = gguf_files.write(plain, tmp_path / "apart.gguf", kind)
    path = gguf_files.write(plain, tmp_path / "fused.gguf", kind, more=joined, without=sorted(parts))
    expected = gguf_checkpoint.open_gguf(apart).state("float32")
    found = gguf_checkpoint.open_gguf(path).state("float32")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[own], expected[own]) for own in found)
    models = [loading.load(one, "float32").model for one in (path, apart)]
    assert torch.equal(logits(models[0], prompt()), logits(models[1], prompt()))


def test_of_a_file_that_was_cut_it_is_told_how_many_bytes_there_are(tmp_path: Path) -> None:
    path = gguf_files.write(made("llama", tmp_path / "model"), tmp_path / "model.gguf")
    raw, tensors = path.read_bytes(), gguf.read(path).tensors.values()
    end = max(tensor.offset + tensor.nbytes for tensor in tensors)
    for left, match in (
        (end - 1, rf"it has {end - 1:,} bytes of {end:,}: \S+ ends there"),
        (end // 2, rf"it has {end // 2:,} bytes of {end:,}"),
        (1500, "it ends in its header: it has 1,500 bytes"),
        (100, "100 bytes hold no"),
        (0, "it is empty"),
    ):
        path.write_bytes(raw[:left])
        with pytest.raises(CheckpointError, match=match):
            loading.load(path)


def test_links_lead_to_all_files_of_a_model(tmp_path: Path) -> None:
    """Also under another name, and of one file alone."""
    plain, home, links = model_of("llama", tmp_path / "model", SIZE), tmp_path / "files", tmp_path / "links"
    home.mkdir()
    links.mkdir()
    gguf_files.write(plain, home / "m.gguf", Kind.Q8_0, split_max_tensors=20)
    expected = logits(loading.load(home).model, prompt())
    parts = sorted(home.iterdir())
    assert len(parts) > 1
    for name, part in (("model.gguf", parts[0]), ("other.gguf", parts[-1]), (parts[0].name, parts[0])):
        (links / name).symlink_to(part)
        assert torch.equal(logits(loading.load(links / name).model, prompt()), expected), name
    parts[-1].unlink()
    with pytest.raises(CheckpointError, match=f"{parts[-1].name} is missing"):
        loading.load(links / "model.gguf")
