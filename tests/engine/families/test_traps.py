"""Where Transformers' models do something that a paged engine can get silently wrong: each trap by itself."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache

import stowage
from stowage.config.memory import Memory
from stowage.core.geometry import Kind
from stowage.engine.engine import Engine
from stowage.engine.sampling_params import SamplingParams
from stowage.errors import RequestError, UnsupportedModelError
from stowage.evaluation import pack as packing
from stowage.models import layout as layers
from stowage.models.probing import cache_name
from stowage.testing import tiny_models
from tests.depth import mostly_rare
from tests.engine.conftest import greedy, random_prompt
from tests.engine.families.world import World

MEMORY = Memory(kv_cache_memory="8MiB", host_memory="8MiB", max_num_batched_tokens=32)


def run(world: World, *prompts: list[int], memory: Memory = MEMORY, new_tokens: int = 4) -> Engine:
    """Answers that are Transformers'; the engine, closed."""
    with Engine(world.model, memory) as engine:
        world.check_all(prompts, engine.generate(list(prompts), greedy(new_tokens)))
    return engine


@torch.inference_mode()
def in_pieces(model, prompt, cut, **options):
    """Plain Transformers, the prompt in two pieces with its own cache: the last token's logits."""
    options[cache_name(model)] = DynamicCache(config=model.config)
    ids = torch.tensor([prompt])
    model(ids[:, :cut], use_cache=True, **options)
    return model(ids[:, cut:], use_cache=True, **options).logits[0, -1]


@pytest.mark.parametrize("family", mostly_rare(["jamba", "zamba", "mamba", "recurrent_gemma"], ["jamba", "mamba"]))
def test_a_continuation_of_several_tokens_that_forgets_the_state(family):
    """Transformers begins anew where it is given more than one token; here they go in one by one."""
    world, prompt = World(family), random_prompt(50)
    whole = world.plain(torch.tensor([prompt])).logits[0, -1]
    assert float((in_pieces(world.plain, prompt, 30) - whole).abs().max()) > 1e-3, "Transformers was repaired"
    assert not run(world, prompt, random_prompt(40, 1)).parts.layout.continues


def test_a_cap_that_sdpa_leaves_out():
    world, prompt = World("gemma2"), random_prompt(60)
    sdpa = world.fresh()
    sdpa.set_attn_implementation("sdpa")
    ids = torch.tensor([prompt])
    assert float((sdpa(ids).logits - world.plain(ids).logits).abs().max()) > 1e-2, "Transformers was repaired"
    run(world, prompt, random_prompt(7))


def test_sinks_take_their_share():
    """With sinks that swallow nearly everything, as with none to speak of."""
    for value in (8.0, -8.0):
        world = World("gpt_oss")
        for model in (world.model, world.plain):
            for name, parameter in model.named_parameters():
                if name.endswith("sinks"):
                    parameter.data.fill_(value)
        run(world, random_prompt(120), random_prompt(9))


def test_a_temperature_that_counts_what_is_cached():
    """Llama-4 scales a query by its position, which it takes from the cache's length: each of a batch has its own."""
    world = World("llama4", attn_scale=1.0, floor_scale=8)
    run(world, *(random_prompt(length, length) for length in (130, 20, 75)), new_tokens=12)


@pytest.mark.parametrize("family", ["gemma3n", "gemma4"])
def test_layers_that_share_keys_keep_none(family):
    engine = run(World(family), random_prompt(150))
    kept = {layer.index: layer.readers for block in engine.parts.layout.blocks for layer in block.layers}
    assert kept == {0: (), 1: (), 2: (4,), 3: (5,)}


def test_heads_that_differ_from_layer_to_layer():
    engine = run(World("gemma4"), random_prompt(30))
    shapes = {la.kind: la.tensors[0].shape for b in engine.parts.layout.blocks for la in b.layers}
    assert shapes == {Kind.SLIDING: (2, 16), Kind.FULL: (1, 32)}


def test_one_module_for_several_layers():
    """Zamba2 attends with the same module in two layers, each of which has keys of its own."""
    engine = run(World("zamba2"), random_prompt(50))
    assert [b.group.layers for b in engine.parts.layout.blocks if b.group.kind is Kind.FULL] == [(1, 3)]


def test_positions_are_given_and_not_guessed():
    """Bamba counts positions from 0 in every forward that is given none; the engine gives them."""
    world = World("bamba")
    given = []
    hook = world.model.register_forward_pre_hook(lambda _, args, kwargs: given.append(kwargs), with_kwargs=True)
    run(world, random_prompt(70), random_prompt(33))
    hook.remove()
    assert given and all(kwargs["position_ids"].shape == kwargs["input_ids"].shape for kwargs in given)


def test_a_mask_that_a_model_makes_by_itself():
    """Doge lets queries read the keys that weigh most; given no mask it counts those of the future in."""
    world, ids = World("doge"), torch.tensor([random_prompt(90)])
    world.model.set_attn_implementation("sdpa")
    with torch.no_grad():
        off = float((world.model(ids).logits[:, :60] - world.model(ids[:, :60]).logits).abs().max())
    assert off > 1e-2, "Transformers was repaired"
    run(world, random_prompt(90), random_prompt(20))
    assert world.model.config._attn_implementation == "sdpa"


def test_states_in_modules_are_taken_out_of_them():
    """RecurrentGemma: an engine leaves nothing there that another one, or ``generate()``, would go on from."""
    world = World("recurrent_gemma")
    run(world, random_prompt(40), random_prompt(33))
    blocks = [layer.temporal_block for layer in world.model.model.layers]
    assert [block.conv1d_state for block in blocks if hasattr(block, "conv1d_state")] == [None]
    assert [block.rg_lru.recurrent_states for block in blocks if hasattr(block, "rg_lru")] == [None]


def test_weights_that_a_model_would_halve():
    """RWKV: nothing is written to them, before Transformers has halved them and after; answers are the same."""
    world, ids = World("rwkv", num_hidden_layers=4), torch.tensor([random_prompt(40)])
    before = {name: tensor.clone() for name, tensor in world.model.state_dict().items()}
    run(world, random_prompt(40), random_prompt(33))
    assert all(torch.equal(tensor, before[name]) for name, tensor in world.model.state_dict().items())
    with torch.no_grad():
        assert torch.equal(world.model(ids).logits, world.plain(ids).logits)
    assert any(not torch.equal(tensor, before[name]) for name, tensor in world.model.state_dict().items())
    run(world, random_prompt(40), random_prompt(33))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["", "int8", "int4"])
def test_weights_that_a_model_would_halve_packed_and_wherever_they_lie(form, tmp_path):
    """RWKV divides some at its first forward: they stay as they lie, packed too, and answers are the same to the bit,
    wherever that is.
    """
    path = tiny_models.write("rwkv", tmp_path / "model", tiny_models.TinySize(hidden=128, layers=4))
    if form:
        packing.pack(str(path), tmp_path / "packed", form)
        path = tmp_path / "packed"
    ids = random_prompt(40)
    asked = SamplingParams(max_new_tokens=6, ignore_eos=True, logprobs=1)

    def answers(**given):
        with Engine(path, Memory(kv_cache_memory="8MiB", **given)) as engine:
            told = engine.generate([ids], asked)[0]
        model = stowage.offload(path, **(given or {"weights": "*=resident"}))
        with torch.no_grad():
            seen = model(torch.tensor([ids])).logits
            assert torch.equal(model(torch.tensor([ids])).logits, seen)
        model.stowage.close()
        return told.token_ids, told.logprobs, seen

    *expected, rows = answers()
    for weights in ("last 1 of 2=prefetch,*=stream", "*=mapped"):
        *found, seen = answers(weights=weights, host_memory="64MiB")
        assert found == expected
        assert torch.equal(seen, rows)


def test_a_scan_longer_than_the_context():
    """Mamba 2: where a prompt is never cut, how it would be cut does not matter to exact answers."""
    world = World("mamba2", context_tokens=64, chunk_size=128)
    prompts = [random_prompt(40), random_prompt(30, 1)]
    with Engine(world.model, Memory(kv_cache_memory="8MiB", max_num_batched_tokens=100), deterministic=True) as engine:
        (alone,) = engine.generate(prompts[:1], greedy(4))
        both = engine.generate(prompts, greedy(4))
        world.check_all(prompts, both)
        assert (both[0].token_ids, both[0].logprobs) == (alone.token_ids, alone.logprobs)


def test_long_rope_ends_where_its_frequencies_change():
    world = World("phi4_mini", context_tokens=128)
    run(world, random_prompt(120), new_tokens=8)
    with Engine(world.model, MEMORY) as engine:
        assert engine.parts.layout.context_tokens == 128 < world.model.config.max_position_embeddings
        with pytest.raises(RequestError, match="context of 128"):
            engine.generate([random_prompt(129)], greedy(1))


def test_experts_in_float32_stay_so_in_bfloat16(tmp_path):
    """``_keep_in_fp32_modules``: DeepSeek-V3 chooses experts by a bias that bfloat16 would round."""
    path = tiny_models.write("deepseek_v3", tmp_path / "model", dtype="bfloat16")
    with Engine(path, MEMORY) as engine:
        kept = {n: t.dtype for n, t in engine.model.state_dict().items() if n.endswith("e_score_correction_bias")}
        assert kept and set(kept.values()) == {torch.float32}
        frequencies = [b.dtype for n, b in engine.model.named_buffers() if n.endswith("inv_freq")]
        assert frequencies and set(frequencies) == {torch.float32}
        assert len(engine.generate([random_prompt(50)], greedy(4))[0].token_ids) == 4


def test_kimi_k2_is_a_deepseek_v3(tmp_path):
    """Its config has a type that Transformers does not know, and names the class that it is."""
    path = tiny_models.write("deepseek_v3", tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    config |= {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}}
    (path / "config.json").write_text(json.dumps(config))
    prompt = random_prompt(40)
    with Engine(path, MEMORY) as engine:
        assert engine.model.config.model_type == "deepseek_v3"
        ids = torch.tensor([prompt])
        plain = tiny_models.build("deepseek_v3")
        expected = plain.generate(ids, do_sample=False, max_new_tokens=4, eos_token_id=None)[0, 40:].tolist()
        assert engine.generate([prompt], greedy(4))[0].token_ids == expected


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"layer_types": ["full_attention"] * 2}, None),
        ({"layer_types": ["full_attention"] * 2, "use_bidirectional_attention": True}, "bidirectional"),
    ],
)
def test_a_config_that_says_otherwise(overrides, says):
    """What a layer is goes by the config of this model, not by its family."""
    world = World("gemma3", **{"num_hidden_layers": 2} | overrides)
    if says is None:
        layout = run(world, random_prompt(100)).parts.layout
        assert [block.group.kind for block in layout.blocks] == [Kind.FULL]
        return
    with pytest.raises(UnsupportedModelError, match=says):
        Engine(world.model, MEMORY).close()


@pytest.mark.parametrize(
    ("family", "entry", "value", "declared"),
    [
        ("mistral", "layer_types", ["full_attention"] * 2, "full_attention"),
        ("llama", "sliding_window", 72, "sliding_a"),
    ],
)
def test_a_mask_that_does_not_fit_what_the_config_declares(family, entry, value, declared):
    """The cache would keep all and the mask show a window, or the reverse: answers would depend on what is left."""
    model = tiny_models.build(family, tiny_models.TinySize(layers=2, context_tokens=256))
    setattr(model.config, entry, value)
    with pytest.raises(UnsupportedModelError, match=f"layer 0 is declared as '{declared}.*another mask"):
        Engine(model, MEMORY).close()


def test_two_engines_open_on_one_running_model():
    """The second one does not look at a model that the first is running."""
    world = World("llama")
    with Engine(world.model, MEMORY) as first:
        request = first.submit(random_prompt(20), greedy(200))
        with Engine(world.model, MEMORY) as second:
            world.check(random_prompt(30), second.generate([random_prompt(30)], greedy(4))[0])
        while not request.wait(0.5):
            pass
        world.check(random_prompt(20), request.result())


def test_the_context_of_a_model_that_states_none():
    assert layers.context_tokens(tiny_models.config("llama")) == 4096
    assert layers.context_tokens(SimpleNamespace(max_position_embeddings=None, rope_parameters=None)) == 1 << 20
