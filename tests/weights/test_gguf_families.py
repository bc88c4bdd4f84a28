"""GGUF files of families whose parameters lie in another order, and how their tokenizers cut texts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from stowage import CheckpointError, UnsupportedModelError
from stowage.models import loading
from stowage.models.gguf import checkpoint as gguf_checkpoint
from stowage.models.gguf import families, latents
from stowage.models.gguf.config import config_of
from stowage.testing.tiny_models.table import TABLE
from stowage.weights import gguf
from stowage.weights.gguf import GgufFile
from tests.depth import mostly_rare
from tests.families import all_of
from tests.weights import gguf_files
from tests.weights.conftest import assert_same_answers, logits, prompt
from tests.weights.gguf_models import FAMILIES, SIZE, VARIANTS, made, model_of, vocabulary_of
from tests.weights.test_gguf import dequantised, mixed

RELAID = {
    "afmoe": "*=experts",
    "apertus": "*=stream",
    "deepseek_v2": "*=stream",
    "deepseek_v3": "*=experts",
    "ernie4_5_moe": "*=experts",
    "exaone_moe": "*=mapped",
    "falcon_h1": "*=stream",
    "falcon h1 with a norm": "*=stream",
    "falcon_mamba": "*=mapped",
    "gemma3n": "*=mapped",
    "glm4_moe": "*=mapped",
    "glm_moe_dsa": "*=experts",
    "granite 4 without experts": "*=stream",
    "granitemoehybrid": "*=experts",
    "jamba": "*=experts",
    "kimi_linear": "*=experts",
    "lfm2_moe": "*=stream",
    "hunyuan_moe": "*=experts",
    "ling 2": "*=stream",
    "mamba": "*=stream",
    "mamba2": "*=stream",
    "llama with biases": "*=stream",
    "mimo_v2_flash": "*=experts",
    "minicpm3": "*=stream",
    "minimax_m2": "*=experts",
    "mistral large 3": "*=stream",
    "mistral4": "*=experts",
    "nemotron 3 nano": "*=experts",
    "nemotron_h": "*=mapped",
    "qwen3_5": "*=mapped",
    "qwen3_5_moe": "*=experts",
    "qwen3_next": "*=stream",
}
"""Families with parameters that lie otherwise in files, and where a model of each has its weights."""
EACH_WAY = frozenset(
    "deepseek_v3 gemma3n glm_moe_dsa granitemoehybrid kimi_linear lfm2_moe mamba2 minicpm3 mistral4 nemotron_h "
    "qwen3_5_moe".split()
)
"""For each way in which they lie otherwise."""


@pytest.mark.parametrize(
    "name",
    mostly_rare(all_of(RELAID, of=EACH_WAY), ["deepseek_v3", "kimi_linear", "lfm2_moe", "nemotron_h", "minicpm3"]),
)
def test_families_that_lie_otherwise_answer_as_their_dequantised_checkpoint_to_the_bit(
    name: str, tmp_path: Path
) -> None:
    size = replace(SIZE, layers=TABLE[VARIANTS[name][0] if name in VARIANTS else name].layers)
    plain = made(name, tmp_path / "model", size)
    kinds = mixed([Kind.Q4_K, Kind.Q8_0, Kind.Q4_0])  # of those the first is random numbers

    def kind(name: str) -> Kind:
        return Kind.Q8_0 if "exps" in name or "ssm" in name else kinds(name)

    path = gguf_files.write(plain, tmp_path / "model.gguf", kind)
    values = dequantised(path, plain, tmp_path / "values")
    read = gguf_checkpoint.open_gguf(path).state("bfloat16")
    expected = plain.state_dict()
    assert all(torch.equal(read[name], expected[name]) for name in read)
    assert_same_answers(path, values, RELAID[name])


def test_layers_that_guess_tokens_ahead_are_left_out(tmp_path: Path) -> None:
    plain = model_of("glm4_moe", tmp_path / "model")
    ahead = [(f"blk.4.{name}.weight", np.ones((32, 32), np.float32)) for name in ("nextn.eh_proj", "attn_q")]
    fields = {"glm4moe.block_count": 5, "glm4moe.nextn_predict_layers": 1}
    path = gguf_files.write(plain, tmp_path / "model.gguf", tokens=fields, more=ahead)
    assert torch.allclose(logits(loading.load(path).model, prompt()), logits(plain, prompt()), atol=1e-4)


def test_older_files_of_deepseek_have_keys_and_values_in_one_tensor(tmp_path: Path) -> None:
    plain = model_of("deepseek_v3", tmp_path / "model", **FAMILIES["deepseek_v3"])
    config, layers = plain.config, range(plain.config.num_hidden_layers)
    whole = [layer.self_attn.kv_b_proj.weight.detach().numpy() for layer in plain.model.layers]
    sizes = {"key_length": config.qk_head_dim, "value_length": config.v_head_dim, "key_length_mla": 0}
    path = gguf_files.write(
        plain,
        tmp_path / "model.gguf",
        tokens={f"deepseek2.attention.{name}": size for name, size in {**sizes, "value_length_mla": 0}.items()},
        more=[(f"blk.{layer}.attn_kv_b.weight", whole[layer]) for layer in layers],
        without=[f"blk.{layer}.attn_{part}_b.weight" for layer in layers for part in "kv"],
    )
    assert torch.allclose(logits(loading.load(path).model, prompt()), logits(plain, prompt()), atol=1e-4)


def test_groups_that_older_files_of_deepseek_do_not_name_are_those_of_the_model(tmp_path: Path) -> None:
    sizes = {"block_count": 61, "expert_count": 256, "expert_gating_func": 2, "rope.dimension_count": 64}
    sizes |= {"attention.head_count": 128, "attention.key_length_mla": 192, "attention.value_length_mla": 128}
    fields = {"general.architecture": "deepseek2", **{f"deepseek2.{name}": size for name, size in sizes.items()}}
    file = GgufFile((tmp_path / "model.gguf",), fields, {})
    assert families.family_of(file) == "deepseek_v3"
    assert families.entries_of(file, "deepseek_v3", {}).items() >= {("n_group", 8), ("topk_group", 4)}
    assert "n_group" not in families.entries_of(file, "deepseek_v3", {"n_group": 2})


def test_files_of_mistral_3_are_of_two_kinds_and_a_third_is_refused(tmp_path: Path) -> None:
    plain = model_of("mistral", tmp_path / "model")
    own = gguf_files.fields(plain.config, "llama").items()
    fields = {"general.architecture": "mistral3", **{key.replace("llama.", "mistral3."): value for key, value in own}}
    loaded = loading.load(gguf_files.write(plain, tmp_path / "model.gguf", tokens=fields)).model
    assert loaded.config.model_type == "mistral"
    assert torch.allclose(logits(loaded, prompt()), logits(plain, prompt()), atol=1e-4)
    mixture = gguf_files.write(plain, tmp_path / "mixture.gguf", tokens=fields | {"mistral3.expert_count": 4})
    with pytest.raises(UnsupportedModelError, match=r"a mixture of experts of the family mistral3"):
        loading.load(mixture)


def test_a_file_of_mistral_4_may_not_say_how_much_queries_are_scaled(tmp_path: Path) -> None:
    path = gguf_files.write(made("mistral4", tmp_path / "model"), tmp_path / "model.gguf")
    file = gguf.read(path)
    silent = {key: value for key, value in file.fields.items() if ".temperature_" not in key}
    config = config_of(replace(file, fields=silent), {})
    assert config.rope_parameters["llama_4_scaling_beta"] == 0.1


REFUSED = (
    ("apertus", "xielu.beta", [0.5], "does not say xielu.beta of each layer"),
    ("qwen3_5", "qwen35.ssm.state_size", 32, "its fields and its tensors are of different models"),
    ("qwen3_5", "qwen35.ssm.group_count", 0, "does not say how large its heads are"),
    ("qwen3_5", "qwen35.ssm.group_count", 3, "does not say how large its heads are"),
    ("deepseek_v3", "deepseek2.rope.dimension_count", 1 << 20, "does not say how large its heads are"),
    ("deepseek_v3", "deepseek2.attention.kv_lora_rank", 16, "its fields and its tensors are of different models"),
    ("gemma4", "gemma4.attention.sliding_window_pattern", [True], "does not say which layers have a window"),
    ("glm_moe_dsa", "glm-dsa.attention.indexer.types", [False] * 4, "does not say which of its layers have an indexer"),
    ("glm_moe_dsa", "glm-dsa.attention.indexer.top_k", 0, "does not say which keys its queries read"),
    ("kimi_linear", "kimi-linear.kda.head_dim", 0, "does not say how large its heads are"),
    ("mistral4", "mistral4.attention.temperature_length", 16, "does not say from where on queries are scaled"),
)


def test_sizes_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    for number, (family, field, value, match) in enumerate(REFUSED):
        plain = model_of(family, tmp_path / f"model{number}", **FAMILIES[family])
        path = gguf_files.write(plain, tmp_path / f"{number}.gguf", tokens={field: value})
        with pytest.raises(CheckpointError, match=match):
            loading.load(path)


OTHERWISE = (
    ("afmoe", "afmoe.expert_weights_norm", False, "does not make the weights of chosen experts add up to one"),
    ("deepseek_v3", "deepseek2.attention.temperature_scale", 0.1, r"says attention.temperature_scale = 0.1"),
    ("glm_moe_dsa", "glm-dsa.attention.indexer.kpool", 4, r"says attention.indexer.kpool = 4"),
    ("kimi_linear", "kimi-linear.expert_weights_norm", False, "does not make the weights of chosen experts add up to"),
    ("kimi_linear", "kimi-linear.kda.safe_gate", True, r"says kda.safe_gate = True"),
    ("llama4", "llama4.attention.sliding_window", 0, "no layers that attend within pieces of a text"),
    ("llama4", "llama4.expert_gating_func", 1, "scores experts in another way than by sigmoid"),
    ("mimo_v2_flash", "mimo2.attention.head_count_kv", [2] * 4, "of 2 heads of keys, .* a variant that is not read"),
    ("mimo_v2_flash", "mimo2.attention.value_scale", 1, "does not say by how much values are scaled"),
    ("mimo_v2_flash", "mimo2.expert_gating_func", 1, "scores experts in another way than by sigmoid"),
)


@pytest.mark.parametrize(("family", "field", "value", "match"), OTHERWISE)
def test_what_would_be_computed_otherwise_is_refused(
    family: str, field: str, value: object, match: str, tmp_path: Path
) -> None:
    path = gguf_files.write(made(family, tmp_path / "model"), tmp_path / "model.gguf", tokens={field: value})
    with pytest.raises(UnsupportedModelError, match=match):
        loading.load(path)


def test_indexers_of_layers_that_share_one_are_left_out(tmp_path: Path) -> None:
    plain = made("glm 5.2", tmp_path / "model")
    unused = [(f"blk.3.indexer.{name}.weight", np.ones((64, 64), np.float32)) for name in ("attn_k", "proj")]
    path = gguf_files.write(plain, tmp_path / "model.gguf", more=unused)
    assert torch.allclose(logits(loading.load(path).model, prompt()), logits(plain, prompt()), atol=1e-4)


@pytest.mark.parametrize(("context", "without"), [(1 << 20, [3, 4, 5, 7]), (202752, [])])
def test_which_layers_of_glm_5_have_an_indexer_where_its_file_is_silent(
    context: int, without: list[int], tmp_path: Path
) -> None:
    fields = {"general.architecture": "glm-dsa", "glm-dsa.block_count": 8, "glm-dsa.context_length": context}
    assert latents.unindexed(GgufFile((tmp_path / "model.gguf",), fields, {})) == without


CUTS = {
    "afmoe": ("a  1234中b", ["a", "  ", "1", "234", "中", "b"]),
    "bailingmoe2": ("a's 12 +\n", ["a", "'s", " ", "1", "2", " +\n"]),
    "deepseek-coder": ("a 12b +x中", ["a", " ", "1", "2", "b", " +", "x", "中"]),
    "deepseek-llm": ("a b\n12+ж中", ["a", " b", "\n", "1", "2", "+", "ж", "中"]),
    "deepseek-v3": ("a1234中b", ["a", "123", "4", "中", "b"]),
    "exaone-moe": ("a b1", ["a b", "1"]),
    "hunyuan": ("a b12", ["a", " b", "1", "2"]),
    "glm5": ("a 1234b", ["a", " ", "123", "4", "b"]),
    "kanana2": ("aB'd1234", ["a", "B'd", "123", "4"]),
    "kimi-k2": ("x1234中y", ["x", "123", "4", "中", "y"]),
    "minimax-m2": ("aB'd1234", ["a", "B'd", "123", "4"]),
    "joyai-llm": ("a1234中b", ["a", "123", "4", "中", "b"]),
    "mellum": ("a 1234b", ["a", " 1234", "b"]),
    "midm-2.0": ("a 1234b", ["a", " ", "123", "4", "b"]),
    "minicpm5": ("a 1234's", ["a", " ", "123", "4", "'s"]),
    "qwen35": ("x\u0301y12", ["x\u0301y", "1", "2"]),
    "superbpe": ("a b 1234's", ["a b ", "1", "234", "'s"]),
    "tiny_aya": ("a  1234 12345b'S", ["a", "  ", "1", "234", " ", "123", "45", "b'S"]),
    "viking": ("a b. 12c", ["a", " b", ".", " ", "1", "2", "c"]),
    "youtu": ("aB's12 한국。b", ["a", "B's", "1", "2", " ", "한국", "。", "b"]),
}


@pytest.mark.parametrize("pre", CUTS)
def test_texts_are_cut_as_the_models_own_tokenizers_do(pre: str, tmp_path: Path) -> None:
    """Whatever stands in one piece is merged to one token here."""
    text, pieces = CUTS[pre]
    fields = vocabulary_of(text, pre)
    path = gguf_files.write(model_of("llama", tmp_path / "model"), tmp_path / "model.gguf", tokens=fields)
    tokenizer = loading.load(path).tokenizer
    assert [tokenizer.decode([token]) for token in tokenizer(text).input_ids] == pieces


def test_gemma_4_merges_pieces_whose_spaces_are_marked(tmp_path: Path) -> None:
    tokens = ["<pad>", "<eos>", "<bos>", *(f"<0x{n:02X}>" for n in range(256)), *"▁the\n", "▁t", "he", "▁the", "\n\n"]
    kinds = [3] * 3 + [6] * 256 + [1] * (len(tokens) - 259)
    fields = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * len(tokens),
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": ["▁ t", "h e", "▁t he", "\n \n"],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.add_bos_token": True,
    }
    path = gguf_files.write(model_of("llama", tmp_path / "model"), tmp_path / "model.gguf", tokens=fields)
    tokenizer = loading.load(path).tokenizer
    found = tokenizer("the the\n\né").input_ids
    assert [tokens[token] for token in found] == ["<bos>", "t", "he", "▁the", "\n\n", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(found, skip_special_tokens=True) == "the the\n\né"
