"""Packed checkpoints: loaded as any other, the same answers wherever their bytes lie, and never taken for another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import stowage
from stowage import Engine, Memory, SamplingParams, UnsupportedModelError
from stowage.errors import ModelError
from stowage.evaluation import pack as packing
from stowage.executor import kernels
from stowage.models import loading
from stowage.planner import model_config as planner_config
from stowage.planner.model import read_model
from stowage.testing import tiny_models
from stowage.weights.quantized import codes, modules
from stowage.weights.quantized.blocks import BlockLinear
from stowage.weights.quantized.stacks import BlockStack
from tests.answers import bits
from tests.depth import mostly_rare
from tests.weights.conftest import assert_cached_one_by_one, bytes_of, logits, prompt

CASES = [
    ("llama", "int8"),
    ("qwen3_moe", "int4"),
    ("gpt_oss", "int8"),
    ("nemotron_h", "int4"),
    ("rwkv", "int8"),
    ("rwkv", "int4"),
    ("llama", "mxfp4"),
    ("gpt_oss", "mxfp4"),
    ("qwen3_moe", "q4_k"),
]
RULES = ("*=stream", "last 1 of 2=prefetch,*[a-z].0=stream,*=mapped")
GREEDY = SamplingParams(max_new_tokens=6, ignore_eos=True, logprobs=1)


def unpacked_into(plain: Any, model: Any) -> Any:
    """``plain`` with the values that the packed weights of ``model`` stand for."""
    of_packed = dict(model.named_modules())
    for name, module in plain.named_modules():
        other = of_packed[name]
        if isinstance(other, BlockLinear):
            module.weight.data = other.weight
            continue
        if isinstance(module, torch.nn.Embedding):
            continue  # its table is the output layer's, or as it was
        for own in dict(module.named_parameters(recurse=False)):
            if isinstance(stack := getattr(other, own), BlockStack):
                experts = len(getattr(module, own))
                getattr(module, own).data = torch.stack([stack[e].dequantized() for e in range(experts)])
    return plain


@pytest.mark.parametrize(
    ("family", "form"),
    mostly_rare(CASES, [("llama", "int8"), ("qwen3_moe", "int4"), ("gpt_oss", "mxfp4"), ("rwkv", "int4")]),
)
def test_every_delivery_answers_as_with_all_in_memory_which_answers_as_the_values_do(
    family: str, form: str, packs: Callable[..., Path], checkpoints: Callable[..., Path]
) -> None:
    asked = [prompt(), prompt(1, 1), prompt(36, 3).view(3, 12)]
    whole = loading.load(packs(family, form))
    expected = [logits(whole.model, ids) for ids in asked]
    values = unpacked_into(loading.load(checkpoints(family)).model, whole.model)
    changed = logits(loading.load(checkpoints(family)).model, asked[0])
    for ids, found in zip(asked, expected, strict=True):
        assert torch.allclose(found, logits(values, ids), atol=2e-4, rtol=1e-4)
    assert not torch.allclose(expected[0], changed, atol=2e-3), "another model, after all"
    for rules in RULES:
        model = stowage.offload(packs(family, form), weights=rules, host_memory="1GiB")
        assert model.stowage.identity == whole.identity
        for ids, found in zip(asked, expected, strict=True):
            assert torch.equal(logits(model, ids), found), rules
            model.stowage.check()
        model.stowage.close()


def test_in_16_bits_all_deliveries_are_alike_too(tmp_path: Path) -> None:
    """Few tokens go another way through torch than many."""
    source = tiny_models.write("llama", tmp_path / "model", dtype="bfloat16")
    packing.pack(str(source), tmp_path / "packed", "int8")
    whole = loading.load(tmp_path / "packed").model
    assert whole.dtype is torch.bfloat16
    plain = loading.load(source).model
    for rules in RULES:
        model = stowage.offload(tmp_path / "packed", weights=rules, host_memory="1GiB")
        for ids in (prompt(1), prompt(40)):
            assert torch.equal(logits(model, ids), logits(whole, ids))
        model.stowage.close()
    assert (logits(whole, prompt(40)) - logits(plain, prompt(40))).abs().mean() < 0.2


@pytest.mark.parametrize("form", mostly_rare(["int8", "int4", "q4_k", "mxfp4"], ["int8", "mxfp4"]))
def test_packed_experts_are_cached_one_by_one(form: str, tmp_path: Path) -> None:
    size = tiny_models.TinySize(hidden=128, layers=3)
    source = tiny_models.write("mixtral", tmp_path / "model", size)
    packing.pack(str(source), tmp_path / "packed", form)
    whole = loading.load(tmp_path / "packed").model
    model = stowage.offload(tmp_path / "packed", weights="*=experts")
    stats = assert_cached_one_by_one(model, whole)
    assert stats["expert_misses"] > stats["cache_experts"], "some were evicted"


@pytest.mark.parametrize(
    ("form", "expected"), mostly_rare([("q4_k", {"q4_k", "q5_0"}), ("mxfp4", {"mxfp4_block"})], ["q4_k"])
)
def test_published_formats_answer_as_their_values_do_to_the_bit(
    form: str, expected: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From every tier; inputs that are no multiple of 256 are in blocks of 32."""
    model = tiny_models.build("llama", tiny_models.TinySize(hidden=256, layers=2))
    wide = model.config.intermediate_size
    config = type(model.config)(**model.config.to_dict() | {"intermediate_size": wide + 32})
    source = tmp_path / "model"
    torch.manual_seed(0)
    type(model)(config).to(torch.bfloat16).save_pretrained(source)
    told = packing.pack(str(source), tmp_path / "packed", form)
    assert told.tensors.keys() == {"int8", *expected}, "the output layer is in int8"
    tokens = prompt(150)[0].tolist()

    def said(weights: str) -> list[Any]:
        memory = Memory(kv_cache_memory="8MiB", host_memory="16MiB", weights=weights)
        with Engine(tmp_path / "packed", memory) as engine:
            answers = [engine.generate([tokens], GREEDY)[0] for _ in range(2)]
            assert sum(answers[1].reused_tokens.values()) > 0
            return bits(answers)

    with monkeypatch.context() as patched:
        patched.setattr(kernels, "supports_blocks", lambda x, matrix: False)  # a tile of its values at a time
        values = said("auto")
    for weights in ("auto", "*=stream", "*=mapped"):
        assert said(weights) == values, weights


def test_an_engine_serves_a_packed_model_from_disk_and_its_prefixes_from_tiers(
    packs: Callable[..., Path], tmp_path: Path
) -> None:
    tokens = prompt(150)[0].tolist()
    memory = {"kv_cache_memory": "8MiB", "host_memory": "16MiB"}
    said, names = [], set()
    for weights in ("auto", "*=stream"):
        with Engine(packs("llama"), Memory(**memory, weights=weights)) as engine:
            for _ in range(2):
                (answer,) = engine.generate([tokens], GREEDY)
                said += bits([answer])
            assert sum(answer.reused_tokens.values()) > 0
            names.add(engine.parts.namespace)
    assert said[0] == said[2]
    assert said[1] == said[3]
    assert len(names) == 1


def test_deterministic_answers_do_not_depend_on_the_batch(packs: Callable[..., Path]) -> None:
    """Experts' own loop included: its products are asked of the same kernels, tile by tile."""
    prompts = [prompt(length, length)[0].tolist() for length in (70, 33, 9)]
    with Engine(
        packs("qwen3_moe", "int4"), Memory(kv_cache_memory="8MiB", weights="*=stream"), deterministic=True
    ) as engine:
        together, alone = engine.generate(list(prompts), GREEDY), [engine.generate([p], GREEDY)[0] for p in prompts]
    assert bits(together) == bits(alone)


@pytest.mark.parametrize("form", ["int8", "mxfp4"])
def test_what_would_get_no_gradient_and_what_nothing_would_read_is_refused(
    form: str, packs: Callable[..., Path], tmp_path: Path
) -> None:
    model = stowage.offload(packs("llama", form), weights="*=stream")
    with torch.no_grad():
        given = model.get_input_embeddings()(prompt())
    given.requires_grad_()
    model.requires_grad_(False)  # as what trains something beside them does
    with pytest.raises(ModelError, match="no backward pass"):
        model(inputs_embeds=given, use_cache=False)
    with pytest.raises(UnsupportedModelError, match="copy what the model was loaded from"):
        model.save_pretrained(tmp_path / "saved")
    model.stowage.close()


def test_a_packed_model_has_a_name_of_its_own(packs: Callable[..., Path], checkpoints: Callable[..., Path]) -> None:
    """Prefixes of the model that it was made from must not be taken for its own."""
    names = {loading.load(path).identity for path in (checkpoints("llama"), packs("llama"), packs("llama", "int4"))}
    assert len(names) == 3


def test_plain_transformers_refuses_it(packs: Callable[..., Path]) -> None:
    with pytest.raises(OSError, match="no file named"):
        AutoModelForCausalLM.from_pretrained(packs("llama"))


def test_budgets_count_packed_bytes(packs: Callable[..., Path], checkpoints: Callable[..., Path]) -> None:
    found = {}
    for name, path in (("plain", checkpoints("llama")), ("packed", packs("llama"))):
        with pytest.raises(stowage.BudgetError, match="at least") as raised:
            stowage.offload(path, device_memory=1000)
        found[name] = least = int(str(raised.value).split("at least ")[1].split()[0])
        model = stowage.offload(path, device_memory=least)
        assert model.stowage.placement.device_bytes <= least
        model.stowage.close()
        with pytest.raises(stowage.BudgetError):
            stowage.offload(path, device_memory=least - 1)
    whole = loading.load(packs("llama")).model
    assert bytes_of(whole) < bytes_of(loading.load(checkpoints("llama")).model) * 0.5
    assert found["packed"] < found["plain"]
    model = stowage.offload(packs("llama"), device_memory="100MiB")
    unpacking_bytes = codes.workspace_bytes(modules.packed_forms(model))
    assert unpacking_bytes > 0
    assert model.stowage.placement.device_bytes >= bytes_of(model) + unpacking_bytes


@pytest.mark.parametrize("form", mostly_rare(["int8", "int4", "q4_k", "mxfp4"], ["int8", "q4_k"]))
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_the_planner_counts_packed_bytes_and_the_weights_that_they_are(
    family: str, form: str, packs: Callable[..., Path], checkpoints: Callable[..., Path]
) -> None:
    assert planner_config.PACKED == modules.METHOD
    plan, original = read_model(packs(family, form)), read_model(checkpoints(family))
    assert plan.total_bytes == bytes_of(loading.load(packs(family, form)).model)
    assert plan.parameters_by_kind() == original.parameters_by_kind()
    assert plan.prompt_pair_operations(100) == original.prompt_pair_operations(100)
    shares = plan.format_shares("experts" if plan.layers[0].experts else "dense")
    assert set(shares) <= set(codes.FORMS) and sum(shares.values()) == pytest.approx(1, abs=0.01)
    assert not original.format_names


@pytest.mark.parametrize("family", mostly_rare(["llama", "gemma2"], ["llama"]))
def test_a_table_that_is_embedding_and_output_layer_is_packed_once(family: str, tmp_path: Path) -> None:
    """And computed with as its values are, wherever it lies; Gemma multiplies what it looks up."""
    model = tiny_models.build(family)
    model.config.tie_word_embeddings = True
    model.lm_head.weight = model.model.embed_tokens.weight
    model.save_pretrained(tmp_path / "tied")
    told = packing.pack(str(tmp_path / "tied"), tmp_path / "packed", "int4")
    plain = stowage.offload(tmp_path / "tied", device_memory="100MiB")
    assert plain.lm_head.weight is plain.model.embed_tokens.weight
    assert told.bits < 6, "the table does not count"
    whole = loading.load(tmp_path / "packed").model
    assert whole.lm_head.int8 is whole.model.embed_tokens.int8
    assert torch.equal(whole.lm_head.weight, whole.model.embed_tokens.weight.dequantized())
    values = unpacked_into(loading.load(tmp_path / "tied").model, whole)
    assert values.lm_head.weight is values.model.embed_tokens.weight
    ids = prompt(33)
    expected = logits(whole, ids)
    assert torch.allclose(expected, logits(values, ids), atol=2e-4, rtol=1e-4)
    for given in ({"device_memory": "100MiB"}, {"weights": "*=stream"}, {"weights": "*=mapped", "host_memory": "1GiB"}):
        loaded = stowage.offload(tmp_path / "packed", **given)
        assert torch.equal(logits(loaded, ids), expected)
        loaded.stowage.check()
        if "device_memory" in given:
            assert bytes_of(loaded) <= loaded.stowage.placement.device_bytes
        loaded.stowage.close()
    plan = read_model(tmp_path / "packed")
    assert plan.total_bytes == bytes_of(whole)
    assert plan.parameters_by_kind() == read_model(tmp_path / "tied").parameters_by_kind()
    said = []
    for rules in ("auto", "*=stream"):
        with Engine(tmp_path / "packed", Memory(kv_cache_memory="8MiB", weights=rules)) as engine:
            said.append(engine.generate([ids[0].tolist()], GREEDY)[0].token_ids)
    assert said[0] == said[1]


def test_biases_stay(tmp_path: Path) -> None:
    """Families rarely have them, and those of tiny models are 0."""
    model = tiny_models.build("qwen2")
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path / "model")
    packing.pack(str(tmp_path / "model"), tmp_path / "packed", "int8")
    whole = loading.load(tmp_path / "packed").model
    values = unpacked_into(loading.load(tmp_path / "model").model, whole)
    assert any(name.endswith("q_proj.bias") for name, _ in whole.named_parameters())
    assert torch.allclose(logits(whole, prompt()), logits(values, prompt()), atol=2e-4, rtol=1e-4)
