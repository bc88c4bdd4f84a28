"""Checkpoints of models that take pictures or sound: their text is answered as the whole model's own ``generate()``
does, and nothing else of them is read.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from scripts.models_doc import PAGE, outer_row
from transformers import AutoModelForMultimodalLM

import stowage
from stowage.config.memory import Memory
from stowage.engine.engine import Engine
from stowage.engine.prompts import Prompts
from stowage.errors import RequestError, UnsupportedModelError
from stowage.evaluation.pack import pack
from stowage.models import families, loading
from stowage.models.loading import eos_ids
from stowage.models.multimodal import text_model, text_part
from stowage.planner.model import read_model
from stowage.testing import tiny_models
from stowage.testing.tiny_models import TinySize
from stowage.testing.tiny_models.checkpoint import outer_config
from stowage.testing.tiny_models.outer import Outer, without_timm
from tests.depth import mostly_rare
from tests.engine.conftest import check_and_close, greedy, random_prompt
from tests.engine.families.test_families import CUTS, LONG, ask
from tests.engine.families.world import World

PLACEHOLDERS = {300, 301, 302}


def plain_text(prompt: list[int]) -> list[int]:
    """Without tokens that stand for pictures."""
    return [token + 10 if token in PLACEHOLDERS else token for token in prompt]


class OuterWorld(World):
    """``path``: a checkpoint of the whole model, which ``plain`` is in memory."""

    def __init__(self, name: str, directory: Path, **overrides) -> None:
        self.row = tiny_models.OUTER[name]
        self.family = tiny_models.TABLE[self.row.text]
        size = TinySize(layers=self.family.layers, context_tokens=512)
        self.path = tiny_models.write(name, directory / "model", size, **overrides)
        self.plain = tiny_models.build(name, size, **overrides)
        self.plain.set_attn_implementation("eager")


def answers_as_the_whole(world: World, engine: Engine) -> None:
    prompts = [plain_text(random_prompt(17, 2)), plain_text(random_prompt(130, 3))]
    completions = engine.generate(prompts, greedy(6))
    world.check_all(prompts, completions)
    assert completions[1].token_ids == world.generate(prompts[1], 6)


@pytest.mark.parametrize(
    "name", mostly_rare(tiny_models.OUTER, ["llava", "gemma3_vision", "qwen3_vl", "llama4_vision"])
)
def test_text_is_answered_as_by_the_whole_model(name, tmp_path):
    """A batch in pieces; then what is shared comes from the device. Only tensors of text are in memory."""
    world = OuterWorld(name, tmp_path)
    sizes = {"kv_cache_memory": "4MiB", "block_size": 16, "chunk_blocks": 2, "snapshot_tokens": 64}
    engine = Engine(world.path, Memory(**sizes, max_num_batched_tokens=64))
    answers_as_the_whole(world, engine)
    prompt = plain_text(random_prompt(130, 3))[:97] + plain_text(random_prompt(9, 4))
    (completion,) = engine.generate([prompt], greedy(3))
    world.check(prompt, completion)
    assert sum(completion.reused_tokens.values()) == (64 if engine.parts.layout.recurrent else 96)
    own = sum(p.numel() for n, p in world.plain.named_parameters() if re.search(r"(language|text)_model\.|^lm_head", n))
    assert sum(p.numel() for p in engine.model.parameters()) == own
    held = {tensor.data_ptr(): tensor.numel() for tensor in engine.model.state_dict().values()}
    assert read_model(world.path).total_parameters == sum(held.values())
    assert outer_row(world.row) in PAGE.read_text(), "make reference"
    check_and_close([engine])


@pytest.mark.parametrize("name", ["gemma3_vision", "qwen3_5_vision"])
def test_what_is_shared_comes_from_every_tier(name, tmp_path):
    """Host, disk, and disk after a restart."""
    world = OuterWorld(name, tmp_path)
    sizes = {"kv_cache_memory": "8MiB", "host_memory": "16MiB", "block_size": 16, "chunk_blocks": 2}
    memory = Memory(**sizes, disk=f"{tmp_path / 'cache'}:32MiB", max_num_batched_tokens=64, snapshot_tokens=64)
    engine = Engine(world.path, memory)
    engine.generate([LONG], greedy(3))
    grid = 64 if engine.parts.layout.recurrent else 32
    for tier in ("device", "host", "disk"):
        for cut in CUTS:
            ask(world, engine, tier, cut, cut // grid * grid)
    check_and_close([engine])
    engine = Engine(world.path, memory)
    ask(world, engine, "disk", CUTS[0], CUTS[0] // grid * grid)
    check_and_close([engine])


def test_the_lists_say_what_is_tested():
    rows = tiny_models.OUTER.values()
    texts = {r.model_type: {tiny_models.TABLE[name].model_type for name in (r.text, *r.others)} for r in rows}
    assert texts == families.OUTER
    assert not families.OUTER.keys() & (families.PROVED | families.REFUSED.keys())
    assert set().union(*texts.values()) <= families.PROVED
    assert set(families.AS_TEXT.values()) <= families.PROVED


def renamed(path: Path, old: str, new: str) -> None:
    """Call the tensors of a checkpoint as another version of its code did."""
    file = path / "model.safetensors"
    tensors = {new + n.removeprefix(old) if n.startswith(old) else n: t for n, t in load_file(file).items()}
    assert tensors.keys() != load_file(file).keys()
    save_file(tensors, file, metadata={"format": "pt"})


def whole_with(row: Outer, text: str) -> object:
    """The whole model, with a text part of family ``text``."""
    size = TinySize(layers=2, context_tokens=512)
    other = replace(row, text=text, changed=lambda size: {})
    with without_timm():
        model = AutoModelForMultimodalLM.from_config(outer_config(other, size, {})).eval()
    tiny_models.vary(model)
    return model


PAIRS = [(row, text) for row in tiny_models.OUTER.values() for text in row.others]


@pytest.mark.parametrize(("row", "text"), PAIRS, ids=[f"{row.name}-{text}" for row, text in PAIRS])
def test_other_text_models_in_the_same_one(row, text):
    """Nothing is added to a text model's logits, and nothing left out."""
    whole = whole_with(row, text)
    part = text_part(whole.config)
    assert part.config.model_type == tiny_models.TABLE[text].model_type
    ids = torch.tensor([random_prompt(90)])
    with torch.inference_mode():
        alone = text_model(whole, part)(ids).logits
        assert torch.allclose(whole(ids).logits, alone, atol=1e-4)
    assert alone.std() > 0.1


@pytest.mark.parametrize(("name", "text"), [("llava_next", "granite"), ("internvl", "cohere2")])
def test_a_text_model_that_is_another_in_there_is_refused(name, text, tmp_path):
    """Transformers' outer models leave out the scale of these logits."""
    whole = whole_with(tiny_models.OUTER[name], text)
    with pytest.raises(UnsupportedModelError, match=f"type '{name}' with a text model of type '{text}'"):
        Engine(whole, Memory(kv_cache_memory="4MiB"))
    whole.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=f"type '{name}' with a text model of type '{text}'"):
        loading.load(tmp_path)


OLD, NEW, BARE = "language_model.model.", "model.language_model.", "model."


@pytest.mark.parametrize(
    ("name", "names", "others"),
    [
        ("gemma3_vision", OLD, NEW),
        ("mistral3_vision", OLD, NEW),
        ("llava", OLD, NEW),
        ("kimi_k25", OLD, NEW),
        ("qwen2_vl", BARE, NEW),
        ("qwen2_5_vl", BARE, NEW),
    ],
)
def test_older_and_newer_names_are_the_same_model(name, names, others, tmp_path):
    """In files written before Transformers 4.52, and in those of later versions."""
    path = tiny_models.write(name, tmp_path / "model", TinySize(layers=2))
    before = loading.load(path).model.state_dict()
    renamed(path, names, others)
    if names == OLD:
        renamed(path, "language_model.lm_head.", "lm_head.")
    after = loading.load(path).model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)


def test_a_config_from_before_there_were_text_configs(tmp_path):
    """Qwen2-VL and Qwen2.5-VL are published with all fields of text beside ``vision_config``."""
    world = OuterWorld("qwen2_5_vl", tmp_path)
    file = world.path / "config.json"
    entries = json.loads(file.read_text())
    text = entries.pop("text_config")
    rope = text.pop("rope_parameters")
    old = {"rope_theta": rope["rope_theta"], "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]}}
    file.write_text(json.dumps({**text, **old, **entries, "model_type": "qwen2_5_vl"}))
    engine = Engine(world.path, Memory(kv_cache_memory="4MiB"))
    answers_as_the_whole(world, engine)
    check_and_close([engine])


def test_kimi_k25_as_it_is_published(tmp_path):
    """Its text config has a type of its own, which Transformers takes for another's."""
    path = tiny_models.write("kimi_k25", tmp_path / "model", TinySize(layers=2))
    entries = json.loads((path / "config.json").read_text())
    entries["text_config"]["model_type"] = "kimi_k2"
    (path / "config.json").write_text(json.dumps(entries))
    assert loading.load(path).model.config.model_type == "deepseek_v3"


def test_an_output_layer_that_is_the_embedding(tmp_path):
    """What the whole model's config says counts, whatever the part's says."""
    world = OuterWorld("gemma3_vision", tmp_path, tie_word_embeddings=True)
    file = world.path / "config.json"
    entries = json.loads(file.read_text())
    entries["text_config"]["tie_word_embeddings"] = False
    file.write_text(json.dumps(entries))
    assert not any("lm_head" in name for name in load_file(world.path / "model.safetensors"))
    engine = Engine(world.path, Memory(kv_cache_memory="4MiB"))
    assert engine.model.lm_head.weight is engine.model.model.embed_tokens.weight
    answers_as_the_whole(world, engine)
    check_and_close([engine])


def test_where_a_text_ends_and_its_weights_type_are_the_whole_models(tmp_path):
    """Where the two parts of a config contradict each other, Transformers follows the outer one."""
    path = tiny_models.write("gemma3_vision", tmp_path / "model", TinySize(layers=2))
    (path / "generation_config.json").unlink()
    entries = json.loads((path / "config.json").read_text())
    entries |= {"eos_token_id": [77, 78], "dtype": "bfloat16"}
    entries["text_config"] |= {"eos_token_id": 5, "dtype": "float32"}
    (path / "config.json").write_text(json.dumps(entries))
    whole = AutoModelForMultimodalLM.from_pretrained(path, dtype="auto")
    text = loading.load(path).model
    assert eos_ids(text) == eos_ids(whole) == {77, 78}
    assert text.dtype == whole.dtype == torch.bfloat16


def test_a_tensor_of_text_that_is_missing_is_not_made_up(tmp_path):
    path = tiny_models.write("llava", tmp_path / "model", TinySize(layers=2))
    renamed(path, "language_model.model.layers.1.mlp.up_proj.", "model.vision_tower.up_proj.")
    with pytest.raises(stowage.CheckpointError, match=r"missing keys.*layers\.1\.mlp\.up_proj"):
        loading.load(path)


@pytest.mark.parametrize(
    ("name", "token"),
    mostly_rare([("gemma4_vision", 301), ("gemma4_unified_vision", 300), ("gemma3n_vision", 500)], ["gemma4_vision"]),
)
def test_tokens_of_pictures_are_refused(name, token, tmp_path):
    overrides = {"vocab_size_per_layer_input": 500} if name == "gemma3n_vision" else {}
    engine = Engine(OuterWorld(name, tmp_path, **overrides).path, Memory(kv_cache_memory="4MiB"))
    with pytest.raises(RequestError, match=f"token {token} stands for a picture"):
        engine.generate([[5, token, 7]], greedy(1))
    assert token in engine._loop._eos
    check_and_close([engine])


def test_tokens_that_only_some_tables_have_are_refused():
    """Of Gemma 3n's text model alone as well: the tables of its layers end before pictures and sound begin."""
    with Engine(tiny_models.build("gemma3n", vocab_size_per_layer_input=500), Memory(kv_cache_memory="4MiB")) as engine:
        assert engine.generate([[5, 499, 7]], greedy(1))
        with pytest.raises(RequestError, match="token 500 stands for a picture"):
            engine.generate([[5, 500, 7]], greedy(1))


@pytest.mark.parametrize("name", ["gemma3_vision", "qwen3_vl_moe"])
def test_a_model_in_memory_lends_its_text(name):
    """The same tensors, not copies of them."""
    model = tiny_models.build(name)
    ids = torch.tensor([random_prompt(40)])
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8)[0, 40:]
    with Engine(model, Memory(kv_cache_memory="4MiB")) as engine:
        (completion,) = engine.generate([ids[0].tolist()], greedy(8))
        assert completion.token_ids[: len(expected)] == expected.tolist()
        assert engine.model.lm_head.weight.data_ptr() == model.lm_head.weight.data_ptr()
    with pytest.raises(UnsupportedModelError, match="give the checkpoint's directory"):
        Engine(model, Memory(kv_cache_memory="4MiB", device_memory="1GiB"))
    model.bfloat16().model.language_model.norm.float()
    with pytest.raises(UnsupportedModelError, match="in another form"):
        Engine(model, Memory(kv_cache_memory="4MiB"))


@pytest.mark.parametrize("name", ["gemma3_vision", "qwen3_vl_moe"])
def test_weights_that_stay_away_and_packed_ones(name, tmp_path):
    """``offload`` gives a text model that answers as the whole one does. Of it, `pack` makes the file that it makes of
    a checkpoint of the text model alone.
    """
    world = OuterWorld(name, tmp_path)
    prompt = random_prompt(40)
    ids = torch.tensor([prompt])
    image = f"{tmp_path}:64MiB"
    asked = {"model_class": "AutoModelForCausalLM", "attn_implementation": "eager"}
    model = stowage.offload(world.path, weights="model.layers.*=stream", disk=image, **asked)
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8, eos_token_id=-1
        )
    assert out[0, 40:].tolist() == world.generate(prompt, 8)
    model.stowage.close()
    loading.load(world.path).model.save_pretrained(tmp_path / "text")
    packed = [load_packed(path, tmp_path) for path in (world.path, tmp_path / "text")]
    assert packed[0].keys() == packed[1].keys()
    assert all(torch.equal(packed[0][name], packed[1][name]) for name in packed[0])


@pytest.mark.parametrize("name", ["gemma3_vision", "qwen3_5_vision"])
def test_prefixes_of_a_text_model(name, tmp_path):
    """For one's own ``generate()``: not of the whole model, whose tokens may be pictures, but of its text."""
    world = OuterWorld(name, tmp_path)
    with pytest.raises(UnsupportedModelError, match="model_class='AutoModelForCausalLM'"):
        stowage.PrefixCache(world.plain, "8MiB")
    model = stowage.offload(world.path, weights="*=resident", model_class="AutoModelForCausalLM")
    with stowage.PrefixCache(model, "8MiB", block_size=16, snapshot_tokens=64) as prefixes:
        for turn in range(2):
            ids = torch.tensor([random_prompt(130)])
            options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "eos_token_id": -1}
            cache = prefixes.prefill(ids)
            out = model.generate(ids, past_key_values=cache, max_new_tokens=6, **options)
            assert out[0, 130:].tolist() == world.generate(ids[0].tolist(), 6)
            prefixes.keep(cache, out)
            assert (prefixes.stats()["prefixes"]["tokens_restored"] > 0) == (turn > 0)
    model.stowage.close()


EACH, END = "{% for m in messages %}{{ m['role'] }}: ", ";{% endfor %}"
TEMPLATES = {
    "parts": EACH
    + "{% for p in m['content'] | selectattr('type', 'equalto', 'text') %}{{ p['text'] }}{% endfor %}"
    + END,
    "fails": EACH + "{% for p in m['content'] %}{{ p['text'].strip() }}{% endfor %}" + END,
    "text": EACH + "{{ m['content'] }}" + END,
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_a_chat_template_beside_the_tokenizer(template, tmp_path):
    """As processors keep it. What is said reaches the model, whether a template wants text or parts."""
    path = tiny_models.write("llava", tmp_path / "model", TinySize(layers=2))
    (path / "chat_template.jinja").unlink()
    (path / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    tokenizer = loading.load(path).tokenizer
    prompts = Prompts(tokenizer, None)
    messages = [{"role": "user", "content": "ahoy"}, {"role": "assistant", "content": "there"}]
    assert tokenizer.decode(prompts.tokenize(messages, 100)) == "user: ahoy;assistant: there;"
    listed = [{"role": "user", "content": [{"type": "text", "text": "ahoy"}]}]
    if template != TEMPLATES["text"]:
        assert tokenizer.decode(prompts.tokenize(listed, 100)) == "user: ahoy;"


def load_packed(path: Path, directory: Path) -> dict[str, torch.Tensor]:
    target = directory / f"packed-{path.name}"
    pack(str(path), target, "int8")
    return loading.load(target).model.state_dict()
