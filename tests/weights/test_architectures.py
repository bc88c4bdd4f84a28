"""Any architecture that Transformers has, whole: where its weights lie never changes an answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import stowage
from tests.depth import mostly_rare
from tests.nursery import QUICKLY
from tests.weights.architectures import GENERATES, TABLE, build, inputs
from tests.weights.conftest import bytes_of
from tests.weights.test_parity import PEAK

CASES = [
    *[pytest.param(name, torch.float32, id=f"{name}-float32") for name in TABLE],
    *[
        pytest.param(
            name, torch.bfloat16, id=f"{name}-bfloat16", marks=[] if name == "t5" else pytest.mark.every_family
        )
        for name in TABLE
    ],
]
pytestmark = pytest.mark.usefixtures("real_units")
PLACEMENTS = {
    "stream": {"weights": "*=stream"},
    "prefetch": {"weights": "*=prefetch", "host_memory": "1GiB"},
    "budget": {"device_memory": 0.78},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, torch.dtype], Path]:
    root = tmp_path_factory.mktemp("architectures")

    def directory(name: str, dtype: torch.dtype = torch.float32) -> Path:
        path = root / f"{name}-{dtype}"
        if not path.exists():
            build(name).to(dtype).save_pretrained(path)
        return path

    return directory


def placed(directory: Path, total: int, placement: str) -> Any:
    asked: dict[str, Any] = dict(PLACEMENTS[placement])
    if "device_memory" in asked:
        asked["device_memory"] = int(asked["device_memory"] * total)
    return stowage.offload(directory, **asked)


def tensors(out: Any) -> dict[str, Tensor]:
    return {name: value for name, value in out.items() if isinstance(value, Tensor)}


@pytest.mark.parametrize(
    ("name", "dtype"),
    mostly_rare(
        CASES,
        [
            "whisper-float32",
            "llava-float32",
            "bert-float32",
            "modernbert-float32",
            "llama_classification-float32",
            "embedding-float32",
            "funnel-float32",
            "perceiver-float32",
            "vit-float32",
            "wav2vec2-float32",
            "t5-bfloat16",
        ],
    ),
)
def test_it_answers_as_plain_transformers_does(name: str, dtype: torch.dtype, saved: Callable[..., Path]) -> None:
    directory = saved(name, dtype)
    plain = type(build(name)).from_pretrained(directory, dtype="auto").eval()
    given, total = inputs(name, plain), bytes_of(plain)
    with torch.no_grad():
        expected = tensors(plain(**given))
        texts = plain.generate(**GENERATES[name](given)) if name in GENERATES else None
    assert expected and not any(torch.isnan(values).any() for values in expected.values())
    for placement in PLACEMENTS:
        model = placed(directory, total, placement)
        assert type(model) is type(plain)
        stats = model.stowage.stats()
        offloaded = stats["stream_bytes"] + stats["prefetch_bytes"] + stats["rows_bytes"]
        assert offloaded > total * (0.85 if placement != "budget" else 0.2)
        if placement == "budget":
            assert model.stowage.placement.device_bytes <= total * 0.78
        for _ in range(2):
            with torch.no_grad():
                out = tensors(model(**given))
            assert {key: torch.equal(out[key], values) for key, values in expected.items()} == dict.fromkeys(
                expected, True
            ), placement
        if texts is not None:
            assert torch.equal(model.generate(**GENERATES[name](given)), texts), placement
        model.stowage.check()
        model.stowage.close()


def test_a_decoder_alone_does_not_read_its_encoder(saved: Callable[..., Path]) -> None:
    """What a step of `generate()` does not ask for is not read for it, once that is known."""
    model = stowage.offload(saved("t5"), weights="*=stream")
    given = inputs("t5", model)
    with torch.no_grad():
        encoded = model.get_encoder()(given["input_ids"])
        read = []
        for _ in range(6):
            before = model.stowage.stats()["read_bytes"]
            model(encoder_outputs=encoded, decoder_input_ids=given["decoder_input_ids"])
            read.append(model.stowage.stats()["read_bytes"] - before)
    decoder = sum(p.numel() * p.element_size() for p in [*model.decoder.block.parameters(), model.lm_head.weight])
    assert read[-1] == read[-2]
    assert decoder / 2 < read[-1] < 1.1 * decoder


def test_the_class_is_the_one_that_is_asked_for(saved: Callable[..., Path]) -> None:
    ids = inputs("bert", None)["input_ids"]
    directory = saved("bert_masked")
    plain = transformers.AutoModelForMaskedLM.from_pretrained(directory).eval()
    for asked in (None, "BertForMaskedLM", "AutoModelForMaskedLM", transformers.AutoModelForMaskedLM):
        model = stowage.offload(directory, weights="*=stream", model_class=asked)
        assert type(model) is type(plain)
        with torch.no_grad():
            assert torch.equal(model(ids).logits, plain(ids).logits)
        model.stowage.close()
    text = stowage.offload(saved("llava"), weights="*=stream", model_class="AutoModelForCausalLM")
    assert type(text).__name__ == "LlamaForCausalLM"
    text.stowage.close()


def test_a_model_in_memory_may_be_of_any_class(tmp_path: Path) -> None:
    for name in ("whisper", "llava", "classification"):
        model = build(name)
        given = inputs(name, model)
        with torch.no_grad():
            expected = tensors(model(**given))
        assert stowage.offload(model, weights="*=stream", disk=f"{tmp_path}:1GiB") is model
        with torch.no_grad():
            out = tensors(model(**given))
        assert all(torch.equal(out[key], values) for key, values in expected.items())


def test_what_is_refused_says_why(saved: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(stowage.ConfigError, match="no class of Transformers"):
        stowage.offload(saved("bert"), weights="*=stream", model_class="BertForEverything")
    with pytest.raises(stowage.CheckpointError, match=r"missing keys.*give the model_class that it was saved from"):
        stowage.offload(saved("bert"), weights="*=stream", model_class="AutoModelForSequenceClassification")
    with pytest.raises(stowage.ConfigError, match="or a model of Transformers"):
        stowage.offload(object(), weights="*=stream")
    build("bert").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["MyOwnModel"]}))
    with pytest.raises(stowage.CheckpointError, match="MyOwnModel, and Transformers has no such class"):
        stowage.offload(tmp_path, weights="*=stream")


@pytest.mark.rare
@pytest.mark.slow
def test_the_budget_of_an_encoder_and_decoder_is_hard(tmp_path: Path) -> None:
    shape = {"d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 8, "num_heads": 8, "vocab_size": 4096}
    transformers.T5ForConditionalGeneration(transformers.T5Config(**shape)).save_pretrained(tmp_path)
    total = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    script = QUICKLY + PEAK.replace("[None], use_cache", "[None], decoder_input_ids=torch.arange(4)[None], use_cache")
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), str(int(total * 0.45)), "0"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": "src", "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
        check=True,
        timeout=300,
    )
    grown, device_used, _ = map(int, done.stdout.split()[-3:])
    print(f"{total:,} bytes of weights; peak grew by {grown:,}; placed {device_used:,}")
    assert device_used <= total * 0.45
    assert grown <= total * 0.45 + total // 8 + (24 << 20)
