"""A real model in FP8 with scales of blocks, as it is published, against Transformers' own dequantised run of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from stowage import Engine, Memory, SamplingParams
from stowage.models import loading
from stowage.weights.quantized.blocks import BlockLinear
from tests.real_model.test_exact import MODEL
from tests.weights import published_files as files

BLOCK = 64
"""Transformers reads blocks that fill a matrix; its sizes here are multiples of this one."""
NEW_TOKENS = 12
QUESTIONS = ("What is the capital of France?", "Count from 17 to 23.", "¿Qué hora es?", "Who wrote Romeo and Juliet?")
TEXTS = ("def fibonacci(n):\n    ", "In 1969, the first man", '{"name": "Alice", "age":')

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not MODEL.exists(), reason="there is no real model here: make real-model"),
]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("published") / "fp8"
    shutil.copytree(MODEL, directory, copy_function=shutil.copyfile)
    quantise, state = files.fp8(BLOCK, BLOCK, "weight_scale_inv"), {}
    for name, values in load_file(MODEL / "model.safetensors").items():
        if values.dim() == 2 and ".layers." in name:
            parts, _ = quantise(values.float())
            state |= {f"{name.removesuffix('.weight')}.{part}": tensor for part, tensor in parts.items()}
        else:
            state[name] = values
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    stated = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": stated}))
    return directory


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    chats: list[Any] = [[{"role": "user", "content": text}] for text in QUESTIONS]
    found = [tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats]
    return [list(one) for one in (*found, *(tokenizer(text).input_ids for text in TEXTS))]


def theirs(published: Path, dtype: str, attention: str) -> Any:
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    options = {"dtype": getattr(torch, dtype), "attn_implementation": attention}
    options |= {"quantization_config": FineGrainedFP8Config(dequantize=True)}
    return AutoModelForCausalLM.from_pretrained(published, **options).eval()


@torch.no_grad()
def logits(model: Any, prompts: list[list[int]]) -> torch.Tensor:
    return torch.cat([model(torch.tensor([prompt])).logits[0].float() for prompt in prompts])


@torch.no_grad()
def greedy(model: Any, prompt: list[int]) -> list[int]:
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    ids = torch.tensor([prompt])
    return list(model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist())


def test_in_float32_tokens_are_those_of_the_dequantised_run(published: Path, prompts: list[list[int]]) -> None:
    found, expected = loading.load(published, dtype="float32").model, theirs(published, "float32", "sdpa")
    layers = [module for module in found.model.layers.modules() if isinstance(module, BlockLinear)]
    assert len(layers) == 7 * found.config.num_hidden_layers, "computed from as they lie"
    assert torch.equal(layers[0].weight, expected.model.layers[0].self_attn.q_proj.weight)
    assert (logits(found, prompts) - logits(expected, prompts)).abs().max() < 1e-3
    with Engine(published, Memory(kv_cache_memory="64MiB"), dtype="float32") as engine:
        answers = engine.generate(list(prompts), SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True))
        assert [answer.token_ids for answer in answers] == [greedy(expected, prompt) for prompt in prompts]


def test_in_bfloat16_it_is_no_further_from_the_dequantised_run_than_that_is_from_itself(
    published: Path, prompts: list[list[int]]
) -> None:
    """Computed with another function for attention."""
    expected, other = (logits(theirs(published, "bfloat16", kind), prompts) for kind in ("eager", "sdpa"))
    found = logits(loading.load(published, dtype="bfloat16").model, prompts)
    for distance in (torch.mean, torch.max):
        assert distance((found - expected).abs()) <= 1.25 * distance((other - expected).abs())
