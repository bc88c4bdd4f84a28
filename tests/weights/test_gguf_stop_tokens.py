"""The tokens with which answers of a GGUF file's model end."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind

from stowage.models import loading
from tests.weights import gguf_files
from tests.weights.gguf_models import model_of
from tests.weights.test_gguf import TOKENS


@pytest.mark.parametrize("kind", [1, 3, 4], ids=["text", "control", "the user's own"])
def test_a_turn_ends_with_its_token_whatever_kind_a_file_says_it_is(kind: int, tmp_path: Path) -> None:
    """Converters have written tokens as text that a tokenizer was given later."""
    names = TOKENS["tokenizer.ggml.tokens"]
    own = {"tokenizer.ggml.token_type": [3, kind, kind, *[1] * 97], "tokenizer.ggml.eos_token_id": 0}
    plain = model_of("llama", tmp_path / "model")
    loaded = loading.load(gguf_files.write(plain, tmp_path / "model.gguf", Kind.Q8_0, TOKENS | own))
    assert loading.eos_ids(loaded.model) == {0, 2}
    found = loaded.tokenizer("Hey<|im_end|>").input_ids
    assert found == [names.index("Hey"), 2]
    assert loaded.tokenizer.decode(found, skip_special_tokens=True) == "Hey"


@pytest.mark.parametrize("other", ["<end_of_utterance>", "[EOT]", "<｜end▁of▁sentence｜>", "<eos>", "<|tool_response>"])
def test_every_token_that_ends_answers_of_llama_cpp_ends_ours(other: str, tmp_path: Path) -> None:
    names = [other if name == "<|im_end|>" else name for name in TOKENS["tokenizer.ggml.tokens"]]
    own = {"tokenizer.ggml.tokens": names, "tokenizer.ggml.eos_token_id": 0}
    plain = model_of("llama", tmp_path / "model")
    loaded = loading.load(gguf_files.write(plain, tmp_path / "model.gguf", Kind.Q8_0, TOKENS | own))
    assert loading.eos_ids(loaded.model) == {0, 2}


def test_gpt_oss_goes_on_after_what_it_thought(tmp_path: Path) -> None:
    tokens = ["<|endoftext|>", "<|return|>", "<|call|>", "<|end|>", *map(chr, range(33, 127)), "He"]
    own = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [3] * 4 + [1] * 95}
    fields = (
        TOKENS
        | own
        | {"tokenizer.ggml.pre": "gpt-4o", "tokenizer.ggml.merges": ["H e"], "tokenizer.ggml.eos_token_id": 1}
    )
    plain = model_of("gpt_oss", tmp_path / "model")
    loaded = loading.load(gguf_files.write(plain, tmp_path / "model.gguf", tokens=fields))
    assert loading.eos_ids(loaded.model) == {0, 1, 2}, "<|end|> ends what it thinks, and not its answer"
