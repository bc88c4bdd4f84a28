"""Bad input gets a clear error that says what to do, and nothing is lost."""

import json
import os
import re
import shutil

import pytest
from transformers import AutoModelForCausalLM

from stowage.config.memory import Memory
from stowage.engine.engine import Engine
from stowage.engine.sampling_params import SamplingParams
from stowage.errors import (
    BudgetError,
    CheckpointError,
    ConfigError,
    DirectoryError,
    RequestError,
    UnsupportedModelError,
)
from stowage.models.hub import find
from stowage.planner.model import read_model
from stowage.plugins.transformers.prefix_cache import PrefixCache
from stowage.testing import tiny_models
from tests.depth import mostly_rare
from tests.engine.conftest import assert_same, greedy, random_prompt


@pytest.fixture
def damaged(checkpoints, tmp_path):
    return shutil.copytree(checkpoints("llama"), tmp_path / "model")


def test_missing_directory(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        Engine(tmp_path / "nowhere")


def test_unknown_hub_id():
    with pytest.raises(CheckpointError, match="stowage tiny"):
        find("nobody/no-such-model")


def test_a_file_is_no_checkpoint(damaged):
    with pytest.raises(CheckpointError, match=r"directory that holds config\.json"):
        Engine(damaged / "model.safetensors")


def test_empty_directory(tmp_path):
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        Engine(tmp_path)


def test_truncated_weights(damaged):
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="damaged"):
        Engine(damaged)


def test_missing_tensor(damaged):
    from safetensors.torch import load_file, save_file

    tensors = load_file(damaged / "model.safetensors")
    tensors.pop("model.layers.1.self_attn.q_proj.weight")
    save_file(tensors, damaged / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="q_proj"):
        Engine(damaged)


@pytest.mark.parametrize("text", ["[1]", "{", '"none"'])
def test_settings_of_generation_that_are_none(text, damaged):
    (damaged / "generation_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"generation_config.json is damaged .* or remove it"):
        Engine(damaged)


def test_an_index_without_metadata(damaged):
    from safetensors import safe_open

    with safe_open(damaged / "model.safetensors", "pt") as file:
        index = {"weight_map": dict.fromkeys(file.keys(), "model-1.safetensors")}
    (damaged / "model.safetensors").rename(damaged / "model-1.safetensors")
    (damaged / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="the index of its files has no 'metadata'"):
        Engine(damaged)


def test_missing_shard(damaged):
    (damaged / "model.safetensors").unlink()
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (damaged / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="is missing"):
        Engine(damaged)


ELSEWHERE = ["../other/model.safetensors", "{root}/other/model.safetensors", "a/../../x.safetensors", "model.bin", ""]


@pytest.mark.parametrize("name", [*ELSEWHERE, 5, None, {}])
def test_an_index_that_leads_elsewhere(name, damaged, tmp_path):
    """Nothing but the checkpoint's own files is opened, whatever its index says."""
    shutil.copytree(damaged, tmp_path / "other")
    (damaged / "model.safetensors").unlink()
    name = name.format(root=tmp_path) if isinstance(name, str) else name
    (damaged / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match=r"index.json is damaged"):
        Engine(damaged)


def test_links_that_lead_elsewhere(damaged, tmp_path):
    other = shutil.copytree(damaged, tmp_path / "other")
    (damaged / "model.safetensors").unlink()
    (damaged / "model.safetensors").symlink_to(other / "model.safetensors")
    with pytest.raises(CheckpointError, match="leads out of the checkpoint's directory"):
        Engine(damaged)


def test_links_of_the_hub_and_within_the_directory(damaged, tmp_path):
    hub = tmp_path / "models--some--tiny"
    (hub / "blobs").mkdir(parents=True)
    snapshot = shutil.copytree(damaged, hub / "snapshots" / ("0" * 40))
    shutil.move(snapshot / "model.safetensors", hub / "blobs" / "1234")
    (snapshot / "model.safetensors").symlink_to("../../blobs/1234")
    shutil.move(damaged / "model.safetensors", damaged / "weights")
    (damaged / "model.safetensors").symlink_to("weights")
    (tmp_path / "link").symlink_to(damaged)
    for path in (snapshot, damaged, tmp_path / "link"):
        with Engine(path, Memory(kv_cache_memory="8MiB")) as engine:
            assert len(engine.generate([[5, 6]], greedy(2))[0].token_ids) == 2


@pytest.mark.parametrize("family", ["gemma3", "mistral", "gpt_oss"])
def test_a_window_of_one_token(family, tmp_path):
    """Transformers disagrees with itself about it, by whole logits."""
    path = tiny_models.write(family, tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"sliding_window": 1}))
    with pytest.raises(UnsupportedModelError, match="sliding_window is 1"):
        Engine(path, Memory(kv_cache_memory="8MiB"))
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    with pytest.raises(UnsupportedModelError, match="sliding_window is 1"):
        Engine(model, Memory(kv_cache_memory="8MiB"))
    with pytest.raises(UnsupportedModelError, match="sliding_window is 1"):
        PrefixCache(model, host_memory="8MiB")
    config["layer_types"] = ["full_attention"] * config["num_hidden_layers"]
    (path / "config.json").write_text(json.dumps(config | {"sliding_window": 1}))
    with Engine(path, Memory(kv_cache_memory="8MiB")) as engine:
        assert len(engine.generate([[5, 6]], greedy(2))[0].token_ids) == 2


@pytest.mark.parametrize("family", ["ministral3", "deepseek_v3"])
def test_heads_rotated_by_half_in_a_family_that_rotates_all_of_them(family, tmp_path):
    """Transformers makes frequencies for a part of a head, and fails at the first product of another size."""
    rope = {"rope_theta": 1e6, "original_max_position_embeddings": 64, "llama_4_scaling_beta": 0.1}
    rope |= {"rope_type": "yarn", "factor": 4.0}
    path = tiny_models.write(family, tmp_path / "model", rope_parameters=rope | {"partial_rotary_factor": 0.5})
    for asked in (lambda: Engine(path, Memory(kv_cache_memory="8MiB")), lambda: read_model(path)):
        with pytest.raises(UnsupportedModelError, match=r"partial_rotary_factor = 0.5 .* rotates whole heads"):
            asked()


def test_pickled_weights_are_refused(damaged):
    (damaged / "model.safetensors").unlink()
    (damaged / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(CheckpointError, match="pickle"):
        Engine(damaged)


def test_damaged_config(damaged):
    (damaged / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        Engine(damaged)


def test_family_that_is_not_supported(damaged):
    config = json.loads((damaged / "config.json").read_text())
    (damaged / "config.json").write_text(
        json.dumps(config | {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]})
    )
    with pytest.raises(UnsupportedModelError, match=r"'t5' are not supported yet.*llama"):
        Engine(damaged)


def test_rope_that_depends_on_the_batch(damaged):
    """Up to the length that it was first trained with, its frequencies are constant; longer prompts are refused."""
    config = json.loads((damaged / "config.json").read_text())
    config["rope_parameters"] = {
        "rope_type": "dynamic",
        "factor": 2.0,
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 64,
    }
    (damaged / "config.json").write_text(json.dumps(config))
    with Engine(damaged, Memory(kv_cache_memory="4MiB")) as engine:
        assert len(engine.generate([random_prompt(50)], greedy(30))[0].token_ids) == 15
        with pytest.raises(RequestError, match="context of 64"):
            engine.generate([random_prompt(65)], greedy(1))


@pytest.mark.parametrize("family", tiny_models.KINDS)
def test_budget_for_no_sequence_says_the_least(family, checkpoints):
    """The least that the message names works."""
    with pytest.raises(BudgetError, match=r"--kv-cache-memory (\d+)KiB") as caught:
        Engine(checkpoints(family), Memory(kv_cache_memory="1KiB"))
    least = str(caught.value).split("--kv-cache-memory ")[1].split()[0]
    with Engine(checkpoints(family), Memory(kv_cache_memory=least, max_num_batched_tokens=1024)) as engine:
        assert len(engine.generate([random_prompt(4)], greedy(2))[0].token_ids) == 2


@pytest.mark.parametrize("family", mostly_rare(tiny_models.KINDS, ["llama", "gemma3", "nemotron_h"]))
def test_budget_for_one_long_sequence_says_the_least(family, checkpoints, references):
    prompt = random_prompt(2000)
    with Engine(checkpoints(family), Memory(kv_cache_memory="400KiB", max_num_batched_tokens=64)) as engine:
        with pytest.raises(BudgetError, match="--kv-cache-memory") as caught:
            engine.generate([prompt], greedy(20))
        (short,) = engine.generate([prompt[:20]], greedy(4))
        assert_same(short, references(family).answer(prompt[:20], 4))
    least = str(caught.value).split("--kv-cache-memory ")[1].rstrip(".")
    with Engine(checkpoints(family), Memory(kv_cache_memory=least, max_num_batched_tokens=64)) as engine:
        assert_same(engine.generate([prompt], greedy(20))[0], references(family).answer(prompt, 20))


def test_host_too_small_for_one_chunk(checkpoints):
    with pytest.raises(BudgetError):
        Engine(checkpoints("llama"), Memory(kv_cache_memory="8MiB", host_memory="8KiB"))


def test_prompts_that_cannot_be_served(engines, references):
    engine = engines("llama", context_tokens=128)
    for prompt, text in (
        (random_prompt(129), "context of 128"),
        ([], "empty"),
        ([5, 600], "vocabulary"),
        ([-1], "vocabulary"),
        (3.5, "a prompt is text"),
        ([{"role": "user"}], "role and content"),
        ([{"role": "user", "content": 5}], "role and content"),
        ([{"role": None, "content": "x"}], "role and content"),
        ([{"role": "user", "content": [5]}], "role and content"),
        ([{"role": "user", "content": "\ud800"}], "half a surrogate pair"),
        ("a\ud800b", "half a surrogate pair at 1"),
        (None, "a prompt is text"),
        (b"bytes", "a prompt is text"),
        ({"role": "user"}, "a prompt is text"),
        ([None], "a prompt is text"),
        ([[1, 2]], "a prompt is text"),
        ([1, 10**30], "vocabulary"),
    ):
        with pytest.raises(RequestError, match=text):
            engine.generate([prompt], greedy(2))
    (completion,) = engine.generate([random_prompt(120)], greedy(50))
    assert completion.finish_reason == "length" and len(completion.token_ids) == 9, "the context ends the answer"


def test_one_bad_prompt_does_not_hurt_the_others(engines, references):
    engine = engines("llama", context_tokens=128)
    good = engine.submit(random_prompt(50), greedy(30))
    with pytest.raises(RequestError):
        engine.submit([], greedy(2))
    assert good.wait(60)
    assert len(good.result().token_ids) == 30


def test_arguments_of_the_wrong_type(engines, checkpoints):
    engine = engines("llama")
    for wrong, name in (
        (lambda: engine.generate(5), "prompts"),
        (lambda: engine.generate(b"text"), "prompts"),
        (lambda: engine.generate([[5]], {"temperature": 1}), "params"),
        (lambda: engine.submit([5], "x"), "params"),
        (lambda: engine.submit([5], None, 5), "on_delta"),
        (lambda: engine.submit([5], salt=5), "salt"),
        (lambda: next(engine.iterate([5], 5)), "params"),
    ):
        with pytest.raises(RequestError, match=name):
            wrong()
    for wrong, name in (({"memory": {}}, "memory"), ({"salt": 5}, "salt"), ({"tiers": 5}, "tiers")):
        with pytest.raises(ConfigError, match=name):
            Engine(checkpoints("llama"), **wrong)
    assert len(engine.generate([[5, 6]], greedy(2))[0].token_ids) == 2


def test_unknown_dtype(checkpoints):
    with pytest.raises(ConfigError, match="bfloat16"):
        Engine(checkpoints("llama"), dtype="float8")


def test_directory_of_another_user(checkpoints, tmp_path):
    if os.geteuid() != 0:
        pytest.skip("only root can give a directory away")
    foreign = tmp_path / "cache"
    foreign.mkdir(mode=0o700)
    os.chown(foreign, 12345, 12345)
    with pytest.raises(DirectoryError):
        Engine(checkpoints("llama"), Memory(kv_cache_memory="8MiB", host_memory="8MiB", disk=f"{foreign}:64MiB"))


def test_stop_strings_without_a_tokenizer(references):
    from stowage.engine.sampling_params import SamplingParams

    model = tiny_models.build("llama")
    with Engine(model, Memory(kv_cache_memory="8MiB")) as engine:
        with pytest.raises(RequestError, match="tokenizer"):
            engine.generate([[5, 6]], SamplingParams(stop=("x",)))
        with pytest.raises(RequestError, match="token ids"):
            engine.generate(["text"], SamplingParams())
        assert len(engine.generate([[5, 6]], greedy(3))[0].token_ids) == 3


def test_a_model_that_is_not_on_the_cpu():
    model = tiny_models.build("llama").to("meta")
    with pytest.raises(UnsupportedModelError, match="meta"):
        Engine(model, Memory(kv_cache_memory="8MiB"))


def test_a_length_that_is_set_bounds_prompt_and_answer(engines):
    """Of a model whose own context is longer; answers within it are the same."""
    prompt, params = random_prompt(90, seed=5), SamplingParams(max_new_tokens=40, ignore_eos=True)
    expected = engines("llama").generate([prompt], params)[0].token_ids
    engine = engines("llama", max_model_len=100)
    assert engine.sequence_tokens_max == 100
    completion = engine.generate([prompt], params)[0]
    assert completion.finish_reason == "length" and completion.token_ids == expected[: len(completion.token_ids)]
    assert 90 + len(completion.token_ids) in (100, 101), "the last token drawn is not computed with"
    with pytest.raises(RequestError, match="100"):
        engine.generate([random_prompt(120)], params)
    assert engines("llama", 128, max_model_len=128).sequence_tokens_max == 128
    with pytest.raises(
        ConfigError, match="max_model_len is 129, and this model takes sequences of up to 128 tokens: give"
    ):
        engines("llama", 128, max_model_len=129)


def test_a_length_that_memory_does_not_hold_is_refused(engines):
    """With a size that is enough, and a length that is."""
    with pytest.raises(BudgetError, match="max_model_len is 2000, and a KV cache of 100 KiB holds") as told:
        engines("llama", 4096, kv_cache_memory="100KiB", host_memory="0", max_model_len=2000)
    size, length = re.search(r"--kv-cache-memory (\w+), or max_model_len (\d+)", str(told.value)).groups()
    assert engines("llama", 4096, kv_cache_memory=size, host_memory="0", max_model_len=2000).sequence_tokens_max == 2000
    least = engines("llama", 4096, kv_cache_memory="100KiB", host_memory="0", max_model_len=int(length))
    assert least.sequence_tokens_max == int(length)
    with pytest.raises(BudgetError, match="max_model_len"):
        engines("llama", 4096, kv_cache_memory="100KiB", host_memory="0", max_model_len=int(length) + 1)
    behind = engines("llama", 4096, kv_cache_memory="100KiB", host_memory="4MiB", max_model_len=2000)
    assert behind.sequence_tokens_max == 2000, "host memory counts"
