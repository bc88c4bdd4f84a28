"""LoRA adapters: PEFT's answers, under every budget, beside each other, and never from another's prefix."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from typer.testing import CliRunner

import stowage
from stowage import Engine, Memory, SamplingParams
from stowage.cli.app import app
from stowage.testing import tiny_models
from tests.answers import bits
from tests.depth import mostly_rare
from tests.engine.conftest import LOGPROB_BOUND
from tests.weights import gguf_files, published_files

SIZE = tiny_models.TinySize(hidden=256, layers=3)
MEMORY = {"kv_cache_memory": "8MiB", "block_size": 16}
GREEDY = SamplingParams(max_new_tokens=8, ignore_eos=True, logprobs=1)
PROMPTS = [[7 + at, *(11 + (5 * at + 3 * n) % 400 for n in range(40 + at))] for at in range(4)]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]


def adapter_of(base: Path, directory: Path, seed: int, **config: Any) -> Path:
    """An adapter as PEFT saves it, whose B is not zero."""
    torch.manual_seed(seed)
    asked = {"r": 8, "lora_alpha": 24, "target_modules": [*ATTENTION, *MLP], "init_lora_weights": False, **config}
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    peft.get_peft_model(model, peft.LoraConfig(**asked)).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    for dtype in ("float32", "bfloat16"):
        tiny_models.write("llama", root / dtype, SIZE, dtype=dtype)
    adapter_of(root / "float32", root / "one", 1)
    adapter_of(root / "float32", root / "two", 2, target_modules=["q_proj", "down_proj"], use_rslora=True, r=4)
    adapter_of(root / "float32", root / "ranks", 3, rank_pattern={"1.mlp.up_proj": 2}, alpha_pattern={"q_proj": 5})
    return root


def with_peft(base: Path, adapter: Path | None) -> Any:
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto").eval()
    return model if adapter is None else peft.PeftModel.from_pretrained(model, adapter).eval()


@torch.no_grad()
def logits(model: Any, ids: Tensor) -> Tensor:
    out: Tensor = model(input_ids=ids, use_cache=False).logits
    return out


def answers(engine: Engine, adapter: str | None = None, prompts: list[list[int]] = PROMPTS) -> list[Any]:
    return bits(engine.generate(prompts, GREEDY, adapter=adapter))


@pytest.mark.parametrize("dtype", mostly_rare(["float32", "bfloat16"], ["bfloat16"]))
@pytest.mark.parametrize("adapter", ["one", "two", "ranks"])
def test_an_offloaded_model_answers_as_peft_to_the_bit(adapter: str, dtype: str, world: Path) -> None:
    ids = torch.tensor([PROMPTS[0]])
    expected, base = (logits(with_peft(world / dtype, a), ids) for a in (world / adapter, None))
    assert (expected - base).abs().max() > 1e-2
    total = sum(path.stat().st_size for path in (world / dtype).glob("*.safetensors"))
    for asked in ({"weights": "*=stream"}, {"weights": "*=prefetch", "host_memory": "1GiB"}, {"device_memory": total}):
        model = stowage.offload(world / dtype, adapter=world / adapter, **asked)
        for _ in range(2):
            assert torch.equal(logits(model, ids), expected), asked
        if "device_memory" in asked:
            kept = sum(t.numel() * 4 for t in load_file(world / adapter / "adapter_model.safetensors").values())
            assert model.stowage.placement.device_bytes + kept <= total
        model.stowage.close()


def test_an_adapter_stays_what_it_was_when_its_file_is_written_to(world: Path, tmp_path: Path) -> None:
    """Its matrices were the file's own pages."""
    own = Path(shutil.copytree(world / "one", tmp_path / "one"))
    with Engine(world / "float32", Memory(**MEMORY), adapter=own) as engine:
        expected = answers(engine)
        file = own / "adapter_model.safetensors"
        size = file.stat().st_size
        with file.open("r+b") as there:
            there.seek(size // 2)
            there.write(bytes(size - size // 2))
        engine.drop_device_cache()
        assert answers(engine) == expected


def test_an_engine_answers_as_peft_does(world: Path) -> None:
    names = {"one": world / "one", "two": world / "two"}
    with Engine(world / "float32", Memory(**MEMORY), adapter=names) as engine:
        assert engine.adapter_names == ("one", "two")
        for name, directory in (("", None), ("one", world / "one"), ("two", world / "two")):
            plain = with_peft(world / "float32", directory)
            for prompt, (tokens, _) in zip(PROMPTS, answers(engine, name), strict=True):
                ids = torch.tensor([prompt])
                out = plain.generate(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=8,
                    do_sample=False,
                    eos_token_id=-1,
                )
                assert out[0, len(prompt) :].tolist() == tokens
        engine.check()
    with Engine(world / "float32", Memory(**MEMORY), adapter=world / "one") as engine:
        scored = SamplingParams(max_new_tokens=1, prompt_logprobs=0, ignore_eos=True)
        (done,) = engine.generate([PROMPTS[0]], scored)
        wanted = logits(with_peft(world / "float32", world / "one"), torch.tensor([PROMPTS[0]]))[0].log_softmax(-1)
        found = [p.logprob for p in done.prompt_logprobs[1:] if p is not None]
        rows = wanted[:-1].gather(1, torch.tensor(PROMPTS[0][1:])[:, None])[:, 0]
        assert len(found) == len(PROMPTS[0]) - 1
        assert (torch.tensor(found) - rows).abs().max() < 1e-5 * wanted.abs().max()


@pytest.mark.parametrize("memory", [{}, {"weights": "*layers*=stream"}])
@pytest.mark.parametrize("dtype", mostly_rare(["float32", "bfloat16"], ["bfloat16"]))
def test_neighbours_and_budgets_change_no_bit(dtype: str, memory: dict[str, Any], world: Path) -> None:
    """Deterministic: requests of three kinds at once, against each alone in an engine that has nothing else."""
    names = {"one": world / "one", "two": world / "two"}
    kinds = ["", "one", "two", "one", ""]
    with Engine(world / dtype, Memory(**MEMORY), deterministic=True, adapter=names) as engine:
        alone = [answers(engine, kind, [PROMPTS[at % 4]])[0] for at, kind in enumerate(kinds)]
    assert alone[0] != alone[1]
    with Engine(world / dtype, Memory(**MEMORY, **memory), deterministic=True, adapter=names) as engine:
        for _ in range(2):
            requests = [engine.submit(PROMPTS[at % 4], GREEDY, adapter=kind) for at, kind in enumerate(kinds)]
            assert bits(request.result() for request in requests if request.wait(60)) == alone
        engine.check()


def test_recorded_and_fused_steps_are_the_base_models_alone(world: Path) -> None:
    """Whatever was learned from one kind of request is not used for another."""
    prompts = [PROMPTS[0]]
    with Engine(world / "float32", Memory(**MEMORY)) as engine:
        base = answers(engine, None, prompts)
    with Engine(world / "float32", Memory(**MEMORY), adapter={"one": world / "one"}) as engine:
        turns = [answers(engine, kind, prompts) for kind in ("", "one", "", "one", "one", "")]
    assert turns[0] == turns[2] == turns[5] == base
    assert turns[1] == turns[3] == turns[4] != base


def test_prefixes_never_mix(world: Path, tmp_path: Path) -> None:
    """Not on the device, in host memory or on disk; and the base model's are those of an engine without adapters."""
    long = [[9, *(11 + (7 * n) % 400 for n in range(199))]]
    memory = Memory(kv_cache_memory="8MiB", host_memory="16MiB", disk=f"{tmp_path}:64MiB", block_size=16)
    with Engine(world / "float32", memory, deterministic=True) as engine:
        base = answers(engine, None, long)
        assert engine.flush()
    shutil.copytree(world / "two", tmp_path / "changed")
    for names in ({"a": world / "one", "b": world / "two"}, {"b": world / "one", "a": tmp_path / "changed"}):
        with Engine(world / "float32", memory, deterministic=True, adapter=names) as engine:
            (first,) = engine.generate(long, GREEDY, adapter="")
            assert any(first.reused_tokens.values()) and answers(engine, "", long) == base
            kinds = [answers(engine, name, long) for name in names]
            assert kinds[0] != kinds[1] and base not in kinds
            assert answers(engine, "a", long) == kinds[list(names).index("a")]
            assert engine.flush()
    weights = load_file(tmp_path / "changed" / "adapter_model.safetensors")
    name = sorted(weights)[0]
    save_file({**weights, name: weights[name] * 1.5}, tmp_path / "changed" / "adapter_model.safetensors")
    with Engine(world / "float32", memory, deterministic=True, adapter={"a": tmp_path / "changed"}) as engine:
        (other,) = engine.generate(long, GREEDY, adapter="a")
        assert not any(other.reused_tokens.values())


def test_a_model_in_memory_is_given_back(world: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(world / "float32").eval()
    before = logits(model, torch.tensor(PROMPTS[:1]))
    with Engine(model, Memory(**MEMORY), adapter=world / "one") as engine:
        assert answers(engine) != answers(engine, "")
    assert torch.equal(logits(model, torch.tensor(PROMPTS[:1])), before)


def test_an_offloaded_model_with_an_adapter_in_an_engine_and_a_cache(world: Path) -> None:
    with Engine(world / "float32", Memory(**MEMORY), adapter=world / "one") as engine:
        expected = answers(engine)
    model = stowage.offload(world / "float32", weights="*=stream", adapter=world / "one")
    other = stowage.offload(world / "float32", weights="*=stream")
    assert model.stowage.identity != other.stowage.identity
    with Engine(model, Memory(**MEMORY)) as engine:
        assert [tokens for tokens, _ in answers(engine)] == [tokens for tokens, _ in expected]
    for call in (lambda: model.save_pretrained("anywhere"), lambda: model.merge_and_unload()):
        with pytest.raises(stowage.ModelError, match="Merge it in memory"):
            call()


@pytest.mark.parametrize("family", mostly_rare(["gpt2", "olmo_hybrid", "bamba", "gemma3", "bloom"], ["gpt2", "bamba"]))
def test_other_families(family: str, tmp_path: Path) -> None:
    """Linear layers that are stored the other way round, recurrent layers, windows, the fallback."""
    base = tiny_models.write(family, tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(base)
    linear = {n.rpartition(".")[2] for n, m in model.named_modules() if type(m).__name__ in ("Linear", "Conv1D")}
    targets = sorted(name for name in linear if name not in ("lm_head", "gate", "shared_expert_gate"))
    adapter = adapter_of(base, tmp_path / "adapter", 4, target_modules=targets, r=2)
    expected = logits(with_peft(base, adapter), torch.tensor(PROMPTS[:1]))[0].log_softmax(-1)
    scored = SamplingParams(max_new_tokens=6, prompt_logprobs=0, ignore_eos=True)
    with Engine(base, Memory(**MEMORY), adapter=adapter) as engine:
        (done,) = engine.generate(PROMPTS[:1], scored)
        found = torch.tensor([p.logprob for p in done.prompt_logprobs[1:] if p is not None])
    rows = expected[:-1].gather(1, torch.tensor(PROMPTS[0][1:])[:, None])[:, 0]
    assert (found - rows).abs().max() < LOGPROB_BOUND


def edited(directory: Path, **config: Any) -> None:
    file = directory / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))


BAD: dict[str, tuple[Callable[[Path], Any], type[Exception], str]] = {
    "no config": (lambda d: (d / "adapter_config.json").unlink(), stowage.CheckpointError, "no adapter_config.json"),
    "no weights": (lambda d: (d / "adapter_model.safetensors").unlink(), stowage.CheckpointError, "is missing"),
    "no directory": (shutil.rmtree, stowage.CheckpointError, "does not exist"),
    "cut": (
        lambda d: (d / "adapter_model.safetensors").write_bytes((d / "adapter_model.safetensors").read_bytes()[:-100]),
        stowage.CheckpointError,
        "is damaged",
    ),
    "no json": (lambda d: (d / "adapter_config.json").write_text("{"), stowage.CheckpointError, "is damaged"),
    "dora": (lambda d: edited(d, use_dora=True), stowage.UnsupportedModelError, "use_dora=True"),
    "pissa": (lambda d: edited(d, init_lora_weights="pissa"), stowage.UnsupportedModelError, "init_lora_weights"),
    "new": (lambda d: edited(d, use_novelty=7), stowage.UnsupportedModelError, "use_novelty=7"),
    "other type": (lambda d: edited(d, peft_type="IA3"), stowage.UnsupportedModelError, "of type IA3"),
    "rank": (lambda d: edited(d, r=3), stowage.CheckpointError, "with rank 3"),
    "no rank": (lambda d: edited(d, r="x"), stowage.CheckpointError, "r='x'"),
}


@pytest.mark.parametrize("fault", BAD)
def test_bad_adapters_are_refused(fault: str, world: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(world / "one", tmp_path / "adapter"))
    spoil, error, match = BAD[fault]
    spoil(directory)
    with pytest.raises(error, match=match):
        Engine(world / "float32", Memory(**MEMORY), adapter=directory)
    with pytest.raises(error, match=match):
        stowage.offload(world / "float32", weights="*=stream", adapter=directory)


def test_adapters_of_other_models_are_refused(world: Path, tmp_path: Path) -> None:
    small = tiny_models.write("llama", tmp_path / "small")
    gpt2 = tiny_models.write("gpt2", tmp_path / "gpt2")
    for base in (small, gpt2):
        with pytest.raises(stowage.CheckpointError, match="is an adapter of another model"):
            Engine(base, Memory(**MEMORY), adapter=world / "one")
    weights = load_file(world / "one" / "adapter_model.safetensors")
    shutil.copytree(world / "one", tmp_path / "less")
    kept = {name: value for name, value in weights.items() if ".layers.2." not in name}
    save_file(kept, tmp_path / "less" / "adapter_model.safetensors")
    with pytest.raises(stowage.CheckpointError, match="is incomplete"):
        Engine(world / "float32", Memory(**MEMORY), adapter=tmp_path / "less")
    save_file({**kept, "base_model.model.model.embed_tokens.lora_embedding_A": kept[min(kept)].clone()},
              tmp_path / "less" / "adapter_model.safetensors")  # fmt: skip
    with pytest.raises(stowage.UnsupportedModelError, match="lora_embedding_A"):
        Engine(world / "float32", Memory(**MEMORY), adapter=tmp_path / "less")
    with pytest.raises(stowage.CheckpointError, match="--adapter"):
        Engine(world / "one", Memory(**MEMORY))
    with pytest.raises(stowage.BudgetError, match="the adapters alone take"):
        Engine(world / "float32", Memory(device_memory="100KiB", kv_cache_memory="8KiB"), adapter=world / "one")
    with (
        Engine(world / "float32", Memory(**MEMORY), adapter={"one": world / "one"}) as engine,
        pytest.raises(stowage.RequestError, match="there is no adapter 'three'"),
    ):
        engine.generate(PROMPTS, GREEDY, adapter="three")


def test_a_layer_that_is_not_called_is_not_passed_over(tmp_path: Path) -> None:
    """Latent attention computes with a weight of ``kv_b_proj`` by itself: an adapter of it would be lost."""
    base = tiny_models.write("deepseek_v3", tmp_path / "base")
    adapter = adapter_of(base, tmp_path / "adapter", 4, target_modules=["kv_b_proj"], r=2)
    with pytest.raises(stowage.UnsupportedModelError, match="kv_b_proj, which is computed here in a way"):
        Engine(base, Memory(**MEMORY), adapter=adapter)
    fine = adapter_of(base, tmp_path / "fine", 4, target_modules=["o_proj"], r=2)
    with Engine(base, Memory(**MEMORY), adapter=fine) as engine:
        assert answers(engine) != answers(engine, "")


@pytest.mark.parametrize("family", ["llava", "gemma3_vision"])
def test_the_text_of_a_model_that_takes_pictures(family: str, tmp_path: Path) -> None:
    """Whole under `offload`, its text alone in an engine: the same adapter, whose names are the whole model's."""
    base = tiny_models.write(family, tmp_path / "base")
    load = AutoModelForImageTextToText.from_pretrained
    torch.manual_seed(1)
    targets = r".*language_model.*\.(q_proj|up_proj)"
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False)
    peft.get_peft_model(load(base), config).save_pretrained(tmp_path / "adapter")
    plain = peft.PeftModel.from_pretrained(load(base).eval(), tmp_path / "adapter").eval()
    ids = torch.tensor(PROMPTS[:1])
    given = {"input_ids": ids, "use_cache": False}
    given |= {"token_type_ids": torch.zeros_like(ids)} if family == "gemma3_vision" else {}
    with torch.no_grad():
        expected = plain(**given).logits
        image = f"{tmp_path}/image:1GiB"
        model = stowage.offload(base, weights="*=stream", disk=image, adapter=tmp_path / "adapter")
        assert torch.equal(model(**given).logits, expected)
    scored = SamplingParams(max_new_tokens=1, prompt_logprobs=0, ignore_eos=True)
    with Engine(base, Memory(**MEMORY), adapter=tmp_path / "adapter") as engine:
        (done,) = engine.generate(PROMPTS[:1], scored)
    found = torch.tensor([p.logprob for p in done.prompt_logprobs[1:] if p is not None])
    rows = expected[0].log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
    assert (found - rows).abs().max() < LOGPROB_BOUND


@pytest.mark.rare
def test_packed_weights_and_a_hard_budget(world: Path, tmp_path: Path) -> None:
    assert CliRunner().invoke(app, ["pack", str(world / "float32"), str(tmp_path / "packed")]).exit_code == 0
    found = []
    small = {"kv_cache_memory": "2MiB", "max_num_batched_tokens": 64, "device_memory": "8MiB", "block_size": 16}
    for memory in (MEMORY, MEMORY | {"weights": "*layers*=stream"}, small):
        names = {"one": world / "one"}
        with Engine(tmp_path / "packed", Memory(**memory), deterministic=True, adapter=names) as engine:
            found.append([answers(engine, name) for name in ("", "one")])
    assert found[0] == found[1] == found[2]
    assert found[0][0] != found[0][1]


@pytest.mark.slow
def test_published_weights_have_the_answers_of_plain_ones(tmp_path: Path) -> None:
    """Those that others quantised, and a GGUF file's, whose queries and keys lie otherwise: wherever they lie."""
    method = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    published, plain = published_files.write(
        "llama", tmp_path, method, published_files.fp8(128, 128, "weight_scale_inv")
    )
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    file = gguf_files.write(model, tmp_path / "model.gguf", Kind.Q4_0)
    model.load_state_dict(gguf_files.state_of(file, model))
    model.to(torch.bfloat16).save_pretrained(tmp_path / "values")
    adapter = adapter_of(plain, tmp_path / "adapter", 5)
    for quantised, values in ((published, plain), (file, tmp_path / "values")):
        found = []
        for source, weights in ((values, "auto"), (quantised, "auto"), (quantised, "*layers*=stream")):
            memory = Memory(**MEMORY | {"weights": weights})
            with Engine(source, memory, dtype="bfloat16", adapter={"one": adapter}) as engine:
                found.append([answers(engine, name) for name in ("", "one")])
        assert found[0] == found[1] == found[2]
        assert found[0][0] != found[0][1]


def test_rwkv_is_refused(tmp_path: Path) -> None:
    base = tiny_models.write("rwkv", tmp_path / "base")
    adapter = adapter_of(base, tmp_path / "adapter", 4, target_modules=["key"], r=2)
    with pytest.raises(stowage.UnsupportedModelError, match="scaled down layer by layer"):
        Engine(base, Memory(**MEMORY), adapter=adapter)
