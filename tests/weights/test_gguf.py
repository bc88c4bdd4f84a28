"""GGUF files: every family and every type of tensor answers as the model that it was written from, wherever its bytes
lie, and nothing is written for that.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import AutoModelForCausalLM

import stowage
from stowage import CheckpointError, ConfigError, Engine, Memory, ModelError, UnsupportedModelError
from stowage.models import loading
from stowage.models.gguf import checkpoint as gguf_checkpoint
from stowage.planner.model import read_model
from stowage.testing import tiny_models
from stowage.weights.quantized.blocks import BlockLinear
from tests.answers import bits
from tests.depth import mostly_rare
from tests.families import all_of
from tests.weights import gguf_files
from tests.weights.conftest import GREEDY, assert_cached_one_by_one, assert_same_answers, logits, prompt
from tests.weights.gguf_models import FAMILIES, SIZE, VARIANTS, made, model_of

KINDS = (
    "Q8_0 Q4_0 Q4_1",
    "Q4_K Q5_K Q6_K",
    "F16 BF16 F32",
    "Q5_0 Q5_1 MXFP4",
    "Q2_K Q3_K IQ4_NL IQ4_XS",
    "IQ3_XXS IQ3_S IQ2_XXS IQ2_XS",
    "IQ2_S IQ1_S IQ1_M",
    "TQ1_0 TQ2_0 Q1_0",
)
TOKENS = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        *map(chr, range(33, 127)),
        "Ġ",
        "He",
        "Hey",
    ],
    "tokenizer.ggml.token_type": [3, 3, 3, *[1] * 97],
    "tokenizer.ggml.merges": ["H e", "He y"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.padding_token_id": 2,
    "tokenizer.chat_template": "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}",
}


@pytest.mark.parametrize("name", all_of([*FAMILIES, *VARIANTS]))
def test_every_family_computes_what_its_file_was_written_from(name: str, tmp_path: Path) -> None:
    plain = made(name, tmp_path / "model")
    path = gguf_files.write(plain, tmp_path / "model.gguf")
    ids = prompt(100)
    expected = logits(plain, ids)
    whole = loading.load(path)
    assert whole.model.dtype is torch.float32, "the type of its matrices"
    assert torch.allclose(logits(whole.model, ids), expected, atol=5e-4)
    model = stowage.offload(path, weights="*=stream")
    assert torch.allclose(logits(model, ids), expected, atol=5e-4)
    assert model.stowage.stats()["image_bytes"] == 0, "nothing is written"
    model.stowage.close()


def mixed(kinds: Sequence[Kind]) -> Callable[[str], Kind]:
    """Each part of a layer in another kind."""

    def kind(name: str) -> Kind:
        parts = ("token_embd", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
        part = next((number for number, part in enumerate(parts) if part in name), 0)
        return kinds[part % len(kinds)]

    return kind


def dequantised(path: Path, plain: Any, directory: Path) -> Path:
    """A checkpoint in bfloat16 of the values in a file, as the package ``gguf`` says."""
    with torch.device("meta"):  # routers of some are float32 whatever the rest is
        made = AutoModelForCausalLM.from_config(plain.config, dtype=torch.bfloat16).state_dict()
    plain.to(torch.bfloat16)
    for name, tensor in [*plain.named_parameters(), *plain.named_buffers()]:
        strict = any(f".{part}." in f".{name}." for part in plain._keep_in_fp32_modules_strict or ())
        if strict or (name in made and made[name].dtype is torch.float32):
            tensor.data = tensor.float()
    plain.load_state_dict(gguf_files.state_of(path, plain))
    plain.save_pretrained(directory)
    return directory


@pytest.mark.parametrize("kinds", mostly_rare(KINDS, ["Q4_K Q5_K Q6_K", "Q8_0 Q4_0 Q4_1"]))
def test_an_engine_answers_as_on_the_dequantised_checkpoint_to_the_bit(kinds: str, tmp_path: Path) -> None:
    plain = model_of("llama", tmp_path / "model", SIZE)
    chosen = [Kind[name] for name in kinds.split()]
    path = gguf_files.write(plain, tmp_path / "model.gguf", mixed(chosen))
    values = dequantised(path, plain, tmp_path / "values")
    assert_same_answers(path, values, "auto", "*=stream", "*=mapped")
    loaded = loading.load(path, "bfloat16").model
    names = {module.spec.name.upper() for module in loaded.modules() if isinstance(module, BlockLinear)}
    assert names >= {kind.name for kind in chosen} - {"BF16", "MXFP4"}, "computed from as they lie"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kind"),
    mostly_rare(
        [
            pytest.param(family, kind, marks=() if kind == own else pytest.mark.every_family)
            for family, own in (("gpt_oss", "MXFP4"), ("llama4", "Q8_0"))
            for kind in ("MXFP4", "Q8_0", "BF16")
        ],
        [("llama4", "Q8_0")],
    ),
)
def test_experts_that_have_inputs_first_in_checkpoints_are_computed_from_as_they_lie_to_the_bit(
    family: str, kind: str, tmp_path: Path
) -> None:
    """In files their outputs come first, and gates lie apart from what they gate. Transformers has a row of each after
    the other in gpt-oss, and gives each of Llama 4's experts all tokens.
    """
    plain = model_of(family, tmp_path / "model", SIZE, **FAMILIES[family])
    path = gguf_files.write(plain, tmp_path / "model.gguf", lambda name: Kind[kind if "exps" in name else "Q8_0"])
    values = dequantised(path, plain, tmp_path / "values")
    state, read = plain.state_dict(), gguf_checkpoint.open_gguf(path).state("bfloat16")
    assert read.keys() == state.keys()
    assert all(torch.equal(read[name], state[name]) for name in state)
    asked = [prompt(length, length)[0].tolist() for length in (70, 3, 40)]

    def said(source: Path, weights: str, *together: list[list[int]]) -> list[Any]:
        sizes: Any = {"kv_cache_memory": "8MiB", "host_memory": "16MiB", "max_num_batched_tokens": 32}
        with Engine(source, Memory(**sizes, weights=weights), dtype="bfloat16") as engine:
            return [answer for prompts in together for answer in bits(engine.generate(prompts, GREEDY))]

    expected = said(values, "auto", asked)
    apart = "*=experts" if family == "gpt_oss" else "*=mapped"
    for source, weights in itertools.product((values, path), ("auto", "*=stream", apart)):
        assert said(source, weights, asked) == expected
        assert said(source, weights, *([one] for one in asked)) == expected, "alone"
    names = loading.load(path, "bfloat16").model.state_dict()
    kept = "gate_up_proj_1_" if family == "gpt_oss" else "gate_up_proj_"
    assert any(kept in name for name in names), "computed from as they lie"


def test_experts_stay_as_they_are_and_are_cached_one_by_one(tmp_path: Path) -> None:
    plain = model_of("mixtral", tmp_path / "model", tiny_models.TinySize(hidden=256, layers=3))
    path = gguf_files.write(plain, tmp_path / "model.gguf", Kind.Q4_0)
    whole = loading.load(path, "bfloat16")
    model = stowage.offload(path, weights="*=experts", dtype="bfloat16")
    assert_cached_one_by_one(model, whole.model)


def test_a_tied_embedding_is_looked_up_row_by_row(tmp_path: Path) -> None:
    plain = model_of("gemma2", tmp_path / "model", SIZE, tie_word_embeddings=True)
    path = gguf_files.write(plain, tmp_path / "model.gguf", Kind.Q8_0)
    whole = loading.load(path, "bfloat16").model
    head, table = whole.lm_head, whole.model.embed_tokens
    assert isinstance(head, BlockLinear)
    assert head.q8_0 is table.q8_0
    assert table.embed_scale == plain.model.embed_tokens.embed_scale, "what no file holds"
    difference = logits(whole, prompt()).float() - logits(plain, prompt()).float()
    assert difference.abs().mean() < 0.2 * logits(plain, prompt()).float().abs().mean()
    model = stowage.offload(path, weights="*=stream", dtype="bfloat16")
    for ids in (prompt(), prompt(1, 1)):
        assert torch.equal(logits(model, ids), logits(whole, ids))
    model.stowage.close()


def test_its_bytes_are_what_is_planned_and_placed(tmp_path: Path) -> None:
    plain = model_of("llama", tmp_path / "model", SIZE)
    path = gguf_files.write(plain, tmp_path / "model.gguf", Kind.Q4_0)
    planned = read_model(path)
    whole = loading.load(path).model
    taken = sum(p.nbytes for p in whole.parameters())
    assert planned.total_bytes == taken < 0.35 * sum(p.numel() for p in plain.parameters()) * 2
    assert planned.total_parameters == sum(p.numel() for p in plain.parameters())
    assert planned.format_shares("dense") == planned.format_shares("head") == {"q4_0": pytest.approx(1, abs=0.01)}
    outputs = sum(len(p) for p in plain.model.layers.parameters() if p.dim() > 1)
    assert planned.outputs == {"dense": {"q4_0": outputs}, "head": {"q4_0": len(plain.lm_head.weight)}}
    assert read_model(tmp_path / "model").outputs == {
        part: {"": each["q4_0"]} for part, each in planned.outputs.items()
    }
    model = stowage.offload(path, weights="*=stream")
    assert model.stowage.stats()["stream_bytes"] == sum(p.nbytes for p in whole.parameters() if p.dtype is torch.uint8)
    model.stowage.close()


def test_split_files_and_directories_are_one_model(tmp_path: Path) -> None:
    plain = model_of("llama", tmp_path / "model")
    whole = gguf_files.write(plain, tmp_path / "whole.gguf", Kind.Q8_0)
    home = tmp_path / "home"
    home.mkdir()
    gguf_files.write(plain, home / "m.gguf", Kind.Q8_0, split_max_tensors=20)
    files = sorted(home.glob("*.gguf"))
    assert len(files) == 2
    expected = logits(loading.load(whole).model, prompt())
    identities = set()
    for source in (home, *files):
        loaded = loading.load(source)
        identities.add(loaded.identity)
        assert torch.equal(logits(loaded.model, prompt()), expected)
    assert len(identities) == 1
    tuned = tmp_path / "tuned"
    shutil.copytree(home, tuned)
    with (tuned / files[1].name).open("r+b") as later:
        later.seek(-1, os.SEEK_END)
        later.write(b"\x55")
    assert loading.load(tuned / files[0].name).identity not in identities, "all files are looked at"
    shutil.copy(whole, home / "mmproj-m.gguf")  # its part for pictures
    assert torch.equal(logits(loading.load(home).model, prompt()), expected)
    shutil.copy(whole, home / "other.gguf")
    with pytest.raises(CheckpointError, match=r"holds 2 models in GGUF files \(m-00001-of-00002.gguf, other.gguf\)"):
        loading.load(home)


def test_tokens_ends_and_templates_come_from_the_file(tmp_path: Path) -> None:
    plain = model_of("llama", tmp_path / "model")
    loaded = loading.load(gguf_files.write(plain, tmp_path / "model.gguf", Kind.Q8_0, TOKENS))
    tokenizer = loaded.tokenizer
    names = TOKENS["tokenizer.ggml.tokens"]
    assert loading.eos_ids(loaded.model) == {0, 2}
    assert [names[i] for i in tokenizer("Hey 1234").input_ids] == ["Hey", "Ġ", "1", "2", "3", "4"], "digit by digit"
    assert tokenizer.decode(tokenizer("Hey 12 ,a").input_ids) == "Hey 12 ,a"
    said = tokenizer.apply_chat_template([{"role": "user", "content": "Hey"}], tokenize=False)
    assert tokenizer(said).input_ids == [1, names.index("Hey"), 2]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)


def test_a_template_of_its_own_for_tools_is_the_one_that_is_used_with_them(tmp_path: Path) -> None:
    """As Command R has it."""
    other = {"tokenizer.chat_templates": ["tool_use"], "tokenizer.chat_template.tool_use": "{{ tools | length }} tools"}
    plain = model_of("llama", tmp_path / "model")
    path = gguf_files.write(plain, tmp_path / "model.gguf", Kind.Q8_0, TOKENS | other)
    tokenizer, asked = loading.load(path).tokenizer, [{"role": "user", "content": "Hey"}]
    assert tokenizer.apply_chat_template(asked, tokenize=False) == "<|im_start|>Hey<|im_end|>"
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    assert tokenizer.apply_chat_template(asked, tools, tokenize=False) == "1 tools"


def test_pieces_with_scores_are_merged_as_sentencepiece_does(tmp_path: Path) -> None:
    pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    pieces += [(f"<0x{n:02X}>", 0.0, 6) for n in range(256)]
    pieces += [("▁t", -1.0, 1), ("he", -2.0, 1), ("▁the", -3.0, 1), *((c, -9.0, 1) for c in "▁the")]
    names, scores, kinds = (list(part) for part in zip(*pieces, strict=True))
    fields = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": names,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    plain = model_of("llama", tmp_path / "model")
    tokenizer = loading.load(gguf_files.write(plain, tmp_path / "model.gguf", Kind.Q8_0, fields)).tokenizer
    found = tokenizer("the theé").input_ids
    assert [names[i] for i in found] == ["<s>", "▁the", "▁the", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(found, skip_special_tokens=True) == "the theé"


@pytest.mark.parametrize(("family", "factor", "high"), [("llama", 32.0, 4.0), ("llama4", 16.0, 1.0)])
def test_llama_3_scaled_rotations_are_found_again(family: str, factor: float, high: float, tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": high,
        "original_max_position_embeddings": 8192,
    }
    plain = model_of(family, tmp_path / "model", **FAMILIES[family], rope_parameters=rope)
    divided = 500000.0 ** -(np.arange(0, 16, 2) / 16) / plain.model.rotary_emb.inv_freq.numpy()
    path = gguf_files.write(plain, tmp_path / "model.gguf", more=[("rope_freqs.weight", divided.astype(np.float32))])
    loaded = loading.load(path).model
    assert loaded.config.rope_parameters == rope
    assert torch.allclose(logits(loaded, prompt()), logits(plain, prompt()), atol=1e-5)
    odd = gguf_files.write(plain, tmp_path / "odd.gguf", more=[("rope_freqs.weight", divided.astype(np.float32) + 1)])
    with pytest.raises(UnsupportedModelError, match=r"not Llama 3's"):
        loading.load(odd)


def test_a_script_asks_it_as_any_model(tmp_path: Path) -> None:
    """Without ``no_grad``; and takes its weights one by one, tied ones once."""
    plain = model_of("llama", tmp_path / "model", SIZE, tie_word_embeddings=True)
    path = gguf_files.write(plain, tmp_path / "model.gguf", Kind.Q8_0)
    expected = logits(loading.load(path).model, prompt())
    for memory in ({"weights": "*=stream"}, {"device_memory": "64MiB"}):
        model = stowage.offload(path, **memory)
        assert model.name_or_path == str(path)
        assert torch.equal(model(prompt()).logits, expected)
        with pytest.raises((ModelError, RuntimeError), match=r"gradient|does not require grad"):
            model(prompt()).logits.sum().backward()
        names = [name for name, _ in model.stowage.tensors()]
        assert "model.embed_tokens.q8_0" in names
        assert "lm_head.q8_0" not in names
        assert len(names) == 2 * 9 + 2
        model.stowage.close()


def test_a_file_is_known_by_its_first_bytes_too(tmp_path: Path) -> None:
    """As Ollama keeps them."""
    plain = model_of("llama", tmp_path / "model")
    whole = gguf_files.write(plain, tmp_path / "model.gguf", Kind.Q8_0)
    blob = whole.rename(tmp_path / "sha256-0123")
    assert read_model(blob).total_bytes
    with Engine(blob, Memory(kv_cache_memory="8MiB")) as engine:
        assert len(engine.generate([[5, 6, 7]], GREEDY)[0].token_ids) == 5


def test_what_is_not_read_is_refused_by_name(tmp_path: Path) -> None:
    plain = model_of("llama", tmp_path / "model", SIZE)

    def refused(match: str, kind: Kind = Kind.Q8_0, **given: Any) -> None:
        path = gguf_files.write(plain, tmp_path / "refused.gguf", kind, **given)
        with pytest.raises((UnsupportedModelError, CheckpointError), match=match) as error:
            loading.load(path)
        assert len(str(error.value).replace(str(path), "model.gguf")) <= 400

    refused(r"of the family rwkv7, which is not read from GGUF", tokens={"general.architecture": "rwkv7"})
    refused(r"token_embd.weight in Q8_1, which is not computed with here: .*Q4_K", Kind.Q8_1)
    refused(r"tokenizer that cuts texts as 'odd'", tokens={**TOKENS, "tokenizer.ggml.pre": "odd"})
    refused(r"and does not say how it cuts texts", tokens={**TOKENS, "tokenizer.ggml.pre": None})
    refused(r"tokenizer of the kind 'rwkv'", tokens={**TOKENS, "tokenizer.ggml.model": "rwkv"})
    refused(r"merges \('H', 'ey'\) to no token", tokens={**TOKENS, "tokenizer.ggml.merges": ["H ey"]})
    refused(r"the way 'longrope'", tokens={"llama.rope.scaling.type": "longrope"})
    refused(r"said to have 4294967295 layers, and has 21 tensors", tokens={"llama.block_count": (1 << 32) - 1})
    refused(r"says attention.clamp_kqv = 8.0, which is not computed", tokens={"llama.attention.clamp_kqv": 8.0})
    refused(r"says attention.causal = False", tokens={"llama.attention.causal": False})
    refused(r"says embedding_scale = 12.0", tokens={"llama.embedding_scale": 12.0})
    refused(r"says attention.sliding_window_pattern", tokens={"llama.attention.sliding_window_pattern": [True, False]})
    refused(r"says expert_gating_func = 2", tokens={"llama.expert_gating_func": 2})
    refused(r"describes no llama", tokens={"llama.attention.head_count": 0})
    refused(r"has blk.0.odd.weight, and 0 other tensors", more=[("blk.0.odd.weight", np.ones(4, np.float32))])
    refused(r"has no blk.1.attn_norm.weight, .* a variant that is not read", without=("blk.1.attn_norm.weight",))
    refused(r"says rope.dimension_count = 8", tokens={"llama.rope.dimension_count": 8})
    refused(r"says rope.scaling.yarn_ext_factor = 0.5", tokens={"llama.rope.scaling.yarn_ext_factor": 0.5})
    refused(r"says rope.freq_base = nan", tokens={"llama.rope.freq_base": float("nan")})
    refused(r"describes no llama: unsupported operand", tokens={"llama.rope.freq_base": "10000"})
    refused(r"describes no llama: 0.0 cannot be raised", tokens={"llama.attention.key_length": 0})
    refused(r"would be \(128, 256\)", tokens={"llama.attention.head_count": 2, "llama.attention.key_length": 64})
    path = gguf_files.write(plain, tmp_path / "model.gguf", Kind.Q8_0)
    described = path.read_bytes().partition(b"blk.0.attn_q.weight")
    repacked = b"".join([*described[:2], described[2][:20], bytes([31]), described[2][21:]])
    (tmp_path / "repacked.gguf").write_bytes(repacked)
    with pytest.raises(CheckpointError, match=r"has blk.0.attn_q.weight in Q4_0_4_4, .* Give a file .* in Q4_0\."):
        loading.load(tmp_path / "repacked.gguf")
    with pytest.raises(ConfigError, match=r"a GGUF file is loaded as AutoModelForCausalLM or LlamaForCausalLM"):
        stowage.offload(path, weights="*=stream", model_class="LlamaForSequenceClassification")
    assert gguf_checkpoint.file_in(tmp_path / "model") is None, "a checkpoint of another kind"


def test_a_file_that_changes_under_a_model_is_noticed(tmp_path: Path) -> None:
    plain = model_of("llama", tmp_path / "model")
    path = gguf_files.write(plain, tmp_path / "model.gguf", Kind.Q8_0)
    model = stowage.offload(path, weights="*=stream")
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=r"was changed while a model is running from it"):
        logits(model, prompt())
    model.stowage.close()
