"""GGUF files of every family: llama.cpp loads them, and its logits are those of the model that they were written from.

What reads files here and what writes them for tests could be wrong together. Needs `make bench-env`; `make llamacpp`
runs it.
"""

from __future__ import annotations

import re
import subprocess
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from stowage.models import loading
from stowage.models.gguf.tokenizer import PRES
from stowage.weights.quantized.formats import FORMATS
from tests.weights import gguf_files
from tests.weights.conftest import logits, prompt
from tests.weights.gguf_models import FAMILIES, SIZE, VARIANTS, made, model_of, vocabulary_of

pytestmark = pytest.mark.llamacpp
PYTHON = Path(__file__).parents[2] / ".venv-bench/bin/python"
PROGRAM = Path(__file__).with_name("llamacpp.py")
CLOSE = {"gemma": 2e-2, "gemma 3n e2b": 5e-2, "gemma3": 1e-2, "gemma4": 2e-2, "qwen 2.5 vl": 2e-3, "starcoder2": 1e-2}
"""Where it is not 5e-4: llama.cpp looks GELU up in a table of 16 bits, and takes a deviation of Gemma 3n's gates for
that of a sample, which it is not in Transformers; angles of Qwen2-VL are products of many factors there.
"""
ELSEWHERE = {
    "deepseek_v2": "without q_lora_rank only with as many layers as DeepSeek-V2-Lite has",
    "exaone4": "its windows only with as many layers as EXAONE 4 32B has",
    "gemma2": "Transformers leaves caps of scores out with its own choice of attention",
    "gemma3n": "sizes of its own, which llama.cpp takes for those of E2B and E4B",
    "gpt_oss": "llama.cpp rounds between which frequencies YaRN goes over, and Transformers does not",
    "olmoe": "only with as many heads of keys as of queries",
}
"""Families whose tiny model llama.cpp computes otherwise, or not at all, and why."""
SHORT = ("mixtral", "phi3", "starcoder2")
"""Of models with windows that llama.cpp does not read from files: prompts are shorter than these."""
TEXT = "Hello World's 12345 3.14\n\n  x\t!?? don't I'LL ÄÖü x\u0301y 中文12かな 한국어 €$ foo_bar/\r\n   end-of ж  "
ASCII = ("gpt-4o", "kanana2", "kimi-k2", "llama4", "minimax-m2", "tekken")
"""Names of which llama.cpp tells capitals from small letters in ASCII only."""
NOT_HERE = ("gpt2",)
"""Names that this llama.cpp does not know."""


def logits_of_llama_cpp(path: Path, ids: torch.Tensor) -> torch.Tensor:
    found = path.with_suffix(".logits")
    said = " ".join(map(str, ids[0].tolist()))
    done = subprocess.run([PYTHON, PROGRAM, path, found], input=said, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return torch.from_numpy(np.fromfile(found, np.float32)).view(ids.shape[1], -1)


@pytest.mark.parametrize("name", [name for name in (*FAMILIES, *VARIANTS) if name not in ELSEWHERE])
def test_llama_cpp_computes_the_same(name: str, tmp_path: Path) -> None:
    plain = made(name, tmp_path / "model")
    arch = gguf_files.arch_of(plain.config)
    tokens = {"tokenizer.ggml.model": "none", f"{arch}.vocab_size": plain.config.vocab_size}
    path = gguf_files.write(plain, tmp_path / "model.gguf", tokens=tokens)
    ids = prompt(20 if name in SHORT else 100)
    theirs, ours = logits_of_llama_cpp(path, ids), logits(loading.load(path).model, ids)[0]
    assert torch.allclose(theirs, ours, atol=CLOSE.get(name, 5e-4)), (theirs - ours).abs().max()


@pytest.mark.parametrize("kind", [Kind(each.ggml) for each in FORMATS.values() if each.ggml > Kind.F16], ids=str)
def test_llama_cpp_means_the_same_by_the_bytes_of_every_type(kind: Kind, tmp_path: Path) -> None:
    """It rounds what weights are multiplied with to 8 bits, so logits are only near."""
    plain = model_of("llama", tmp_path / "model", SIZE)
    tokens = {"tokenizer.ggml.model": "none", "llama.vocab_size": plain.config.vocab_size}
    path, ids = gguf_files.write(plain, tmp_path / "model.gguf", kind, tokens=tokens), prompt(100)
    theirs, ours = logits_of_llama_cpp(path, ids), logits(loading.load(path, "float32").model, ids)[0]
    assert ours.std() > 1e-3
    assert (theirs - ours).norm() < 0.1 * ours.norm(), float((theirs - ours).norm() / ours.norm())


@pytest.mark.parametrize("pre", [pre for pre in PRES if pre not in NOT_HERE])
def test_llama_cpp_cuts_texts_as_we_do(pre: str, tmp_path: Path) -> None:
    plain, text = made("llama", tmp_path / "model"), unicodedata.normalize("NFC", TEXT)
    if pre in ASCII:
        text = text.encode("ascii", "ignore").decode()
    if pre == "deepseek-llm":  # of digits its models have no tokens but single ones
        text = re.sub(r"\d+", "1", text)
    fields = vocabulary_of(text, pre) | {"tokenizer.ggml.add_bos_token": False}
    path = gguf_files.write(plain, tmp_path / "model.gguf", tokens=fields)
    done = subprocess.run([PYTHON, PROGRAM, path], input=text.encode(), capture_output=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    ours = loading.load(path).tokenizer(text).input_ids
    assert [int(token) for token in done.stdout.split()] == ours
