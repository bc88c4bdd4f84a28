"""``--deterministic``: the same bits alone and batched, in any pieces, from every tier, preempted, in any order."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_next import modeling_qwen3_next

from stowage.config.memory import Memory
from stowage.engine.engine import Engine
from stowage.engine.sequence import Sequence
from stowage.errors import BudgetError, ConfigError, DirectoryError, UnsupportedModelError
from stowage.executor import attention, kernels
from stowage.executor.block_pool import bytes_needed
from stowage.executor.determinism import pieces as prompt_pieces
from stowage.executor.determinism.pieces import Pieces
from stowage.executor.determinism.row_invariance import RowInvariance
from stowage.executor.fused import recurrent_layers
from stowage.testing import tiny_models
from tests.answers import answer_bits, bits
from tests.depth import mostly_rare
from tests.engine.conftest import check_and_close, greedy, random_prompt

KINDS = ("llama", "gemma3", "llama4", "deepseek_v3", "qwen3_next")
"""Full attention, windows, chunks, latents, recurrent state."""
PROMPT = random_prompt(333, seed=1)
OTHERS = [random_prompt(50 + 61 * i, seed=10 + i) for i in range(4)]
NEW_TOKENS = 500
ELSEWHERE = pytest.mark.every_family
"""Of several that differ in little, `make families` runs the others."""
MANY_LAYERS = [
    ("llama", 60),
    *(
        pytest.param(*more, marks=ELSEWHERE)
        for more in (("qwen3_next", 36), ("gemma3", 48), ("llama4", 30), ("deepseek_v3", 30))
    ),
]
WITHOUT_KERNELS = [
    *product(KINDS, ["bfloat16"]),
    ("llama", "float16"),
    *(
        pytest.param(*more, marks=ELSEWHERE)
        for more in (
            *product(["gpt_oss", "falcon", "jamba"], ["bfloat16"]),
            *product(["gemma3", "llama4", "deepseek_v3", "qwen3_next", "gpt_oss", "falcon"], ["float16"]),
        )
    ),
]


@pytest.fixture
def opened(checkpoints):
    engines = []

    def engine(family, context_tokens=4096, **memory):
        made = Engine(
            checkpoints(family, context_tokens), Memory(**({"kv_cache_memory": "16MiB"} | memory)), deterministic=True
        )
        engines.append(made)
        return made

    yield engine
    check_and_close(engines)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    mostly_rare(
        ["llama", "deepseek_v3", "qwen3_next", *(pytest.param(kind, marks=ELSEWHERE) for kind in ("gemma3", "llama4"))],
        ["llama"],
    ),
)
def test_500_tokens(family, opened, tmp_path):
    """One answer of 500 tokens: alone; beside others, in other pieces, on a device with room for one such
    sequence, so that some are preempted; then from disk after a restart, from host, and from the device.
    """
    alone = opened(family)
    (expected,) = bits(alone.generate([PROMPT], greedy(NEW_TOKENS)))
    need = bytes_needed(alone.parts.layout.blocks, len(PROMPT) + NEW_TOKENS, 200)
    stored = {"host_memory": "64MiB", "disk": f"{tmp_path / 'cache'}:256MiB"}
    crowded = opened(family, kv_cache_memory=int(need * 1.15), max_num_batched_tokens=200, **stored)
    asked = [(OTHERS[3], 250), (OTHERS[1], 100), (PROMPT, NEW_TOKENS)]
    handles = [crowded.submit(prompt, greedy(count)) for prompt, count in asked]
    assert all(handle.wait(300) for handle in handles)
    assert answer_bits(handles[2].result()) == expected
    if family in ("llama", "deepseek_v3"):  # the others keep little of what is far behind, and find room
        assert crowded.stats()["engine"]["preemptions"] > 0
    assert crowded.flush()
    crowded.close()
    engine = opened(family, **stored)
    for tier in ("disk", "host", "device"):
        (again,) = engine.generate([PROMPT], greedy(60))
        assert again.reused_tokens[tier] == sum(again.reused_tokens.values()) >= 256
        assert answer_bits(again) == (expected[0][:60], expected[1][:60])
        if tier == "disk":
            engine.drop_device_cache()


@pytest.fixture
def scanned(monkeypatch, tmp_path):
    """Recurrent layers are computed by torch, prompts by a scan."""
    monkeypatch.setattr(recurrent_layers, "_KNOWN", {})
    forget_trials(monkeypatch, tmp_path)


def forget_trials(monkeypatch, tmp_path):
    """What went well before is not taken to go well with what a test has replaced."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.mark.parametrize("family", mostly_rare(["llama", "qwen3_next", "bamba"], ["llama", "bamba"]))
def test_the_next_turn(family, opened):
    """What was generated is part of the next prompt, and is reused: one computation made it."""
    _next_turn(family, opened, 384)


@pytest.mark.rare
def test_the_next_turn_of_one_that_scans(opened, scanned):
    """It is computed again."""
    _next_turn("qwen3_next", opened, 320)


def _next_turn(family, opened, reused):
    engine = opened(family, snapshot_tokens=64)
    (first,) = engine.generate([PROMPT], greedy(60))
    question = PROMPT + first.token_ids + random_prompt(20, seed=99)
    (warm,) = engine.generate([question], greedy(20))
    assert warm.reused_tokens["device"] == reused
    (cold,) = opened(family).generate([question], greedy(20))
    assert answer_bits(warm) == answer_bits(cold)


def test_a_scan_that_nobody_saw_is_found_by_the_trial(opened, scanned, monkeypatch):
    """Then prompts are cut at its multiples."""
    monkeypatch.setattr(prompt_pieces, "whole_prompts", lambda model: True)
    _next_turn("qwen3_next", opened, 320)


def test_an_engine_that_cannot_be_opened_leaves_the_model_as_it_was(checkpoints, tmp_path):
    """It had its norms and recurrent layers computed by kernels already."""
    model = AutoModelForCausalLM.from_pretrained(checkpoints("qwen3_next")).eval()
    own = vars(modeling_qwen3_next).copy()
    (tmp_path / "cache").write_text("a file")
    memory = Memory(kv_cache_memory="8MiB", host_memory="8MiB", disk=f"{tmp_path / 'cache'}:64MiB")
    with pytest.raises(DirectoryError):
        Engine(model, memory, deterministic=True)
    assert {name: value for name, value in vars(modeling_qwen3_next).items() if value is not own.get(name)} == {}
    assert not [module for module in model.modules() if "forward" in vars(module)]
    assert model.config._attn_implementation != attention.NAME


@pytest.mark.parametrize("family", mostly_rare(["llama", "qwen3_next"], ["llama"]))
def test_preempted_and_computed_again(family, opened):
    """No host memory: what was preempted is computed again."""
    _preempted(family, opened)


@pytest.mark.rare
def test_one_that_scans_is_preempted_and_computed_again(opened, scanned):
    """Its generated tokens one by one."""
    _preempted("qwen3_next", opened)


def _preempted(family, opened):
    roomy = opened(family, 160)
    prompts = [random_prompt(60 + i, seed=i) for i in range(3)]
    expected = [answer_bits(roomy.generate([prompt], greedy(90))[0]) for prompt in prompts]
    need = bytes_needed(roomy.parts.layout.blocks, 160, 128)
    crowded = opened(family, 160, kv_cache_memory=int(need * 1.7), max_num_batched_tokens=128)
    assert bits(crowded.generate(prompts, greedy(90))) == expected
    assert crowded.stats()["engine"]["preemptions_recomputed"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype"),
    mostly_rare([("llama", "float32"), ("llama", "bfloat16"), ("qwen3_next", "float32")], [("llama", "bfloat16")]),
)
def test_any_schedule(family, dtype, checkpoints):
    """Random prompts with common beginnings, arriving in random order, in steps and on devices of random sizes, with
    caches dropped in between: every answer is what a fresh engine gives when it is asked that alone.
    """
    model = AutoModelForCausalLM.from_pretrained(checkpoints(family, 1024), dtype=getattr(torch, dtype)).eval()
    trunk = random_prompt(200, seed=7)
    known: dict[int, object] = {}

    def engine(**memory):
        return Engine(model, Memory(host_memory="8MiB", **memory), deterministic=True)

    with engine(kv_cache_memory="16MiB") as fresh:
        need = bytes_needed(fresh.parts.layout.blocks, 368, 300)

        @settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
        @given(
            asked=st.lists(st.integers(0, 11), min_size=1, max_size=5),
            step=st.integers(80, 300),
            room=st.floats(1.1, 4.0),
            drop=st.booleans(),
        )
        def check(asked, step, room, drop):
            prompts = {n: trunk[: 17 * n] + random_prompt(1 + 13 * n, seed=n) for n in asked}
            for number, prompt in prompts.items():
                if number not in known:
                    fresh.drop_device_cache()
                    fresh.drop_host()
                    (known[number],) = bits(fresh.generate([prompt], greedy(24)))
            with engine(kv_cache_memory=int(need * room), max_num_batched_tokens=step) as other:
                for _ in range(2):
                    completions = other.generate([prompts[n] for n in asked], greedy(24))
                    same = [answer_bits(c) == known[n] for c, n in zip(completions, asked, strict=True)]
                    assert all(same), same
                    if drop:
                        other.drop_device_cache()
                other.check()

        check()


def test_a_prompt_scored_beside_others(opened):
    """Log-probabilities of a prompt, too."""
    engine = opened("qwen3_next", max_num_batched_tokens=128)
    scored = replace(greedy(4), prompt_logprobs=1)
    (alone,) = engine.generate([PROMPT], scored)
    engine.drop_device_cache()
    handles = [engine.submit(prompt, greedy(30)) for prompt in OTHERS] + [engine.submit(PROMPT, scored)]
    for handle in handles:
        assert handle.wait(120)
    assert handles[-1].result().prompt_logprobs == alone.prompt_logprobs


def test_caches_of_others_are_not_reused(checkpoints, tmp_path):
    """What was computed without it may have other bits."""
    memory = Memory(kv_cache_memory="8MiB", host_memory="16MiB", disk=f"{tmp_path / 'cache'}:64MiB")
    with Engine(checkpoints("llama"), memory, batch_dependent=True) as engine:
        engine.generate([PROMPT], greedy(2))
        assert engine.flush() and not engine.exact and "--batch-dependent" in engine.exactness_note
    with Engine(checkpoints("llama"), memory) as engine:
        (completion,) = engine.generate([PROMPT], greedy(2))
        assert engine.exact and not engine.exactness_note
    assert sum(completion.reused_tokens.values()) == 0


def test_what_depends_on_neighbours_is_refused(checkpoints, monkeypatch, tmp_path, caplog):
    """The trial at the start finds a kernel whose rows depend on how many there are. Where exact answers are not
    required the engine says that it has none.
    """
    forget_trials(monkeypatch, tmp_path)
    honest = kernels.linear_of

    def other_with_few_rows(x, matrix, bias=None):
        out = honest(x, matrix, bias)
        return out * (1 + 1e-6) if out.numel() // out.shape[-1] < 3 else out

    monkeypatch.setattr(kernels, "linear_of", other_with_few_rows)
    memory = Memory(kv_cache_memory="8MiB", host_memory="8MiB", disk=f"{tmp_path / 'cache'}:64MiB")
    with pytest.raises(UnsupportedModelError, match="are not exact: token"):
        Engine(checkpoints("llama"), memory, deterministic=True)
    assert not (tmp_path / "cache").exists(), "no store is left open"
    with Engine(checkpoints("llama"), memory) as engine:
        assert not engine.exact and not engine.stats()["exact"] and "other bits" in engine.exactness_note
    assert "the last bits of answers may depend" in caplog.text


@pytest.mark.parametrize(
    ("family", "dtype"), mostly_rare(WITHOUT_KERNELS, [("llama", "bfloat16"), ("gemma3", "bfloat16")])
)
def test_without_kernels(family, dtype, checkpoints, monkeypatch, tmp_path):
    """Each piece of a prompt is a forward of its own, at its own place: slower, and exact. Jamba: every token."""
    if dtype == "bfloat16":
        monkeypatch.setitem(os.environ, "STOWAGE_PURE_PYTHON", "1")
    roomy = Memory(kv_cache_memory="32MiB")
    prompts = [PROMPT, *OTHERS, PROMPT + OTHERS[1]] if family != "jamba" else [PROMPT, *OTHERS[:2]]
    with Engine(checkpoints(family), roomy, dtype=dtype) as engine:
        why = engine.exactness_note
        assert engine.exact and ("unset it" in why or "float16" in why or engine.executor == "fallback")
        expected = []
        for prompt in prompts:
            expected += bits(engine.generate([prompt], greedy(8)))
            engine.drop_device_cache()
    tiered = Memory(kv_cache_memory="8MiB", host_memory="32MiB", disk=f"{tmp_path / 'cache'}:256MiB")
    with Engine(checkpoints(family), tiered, dtype=dtype) as engine:
        assert bits(engine.generate(prompts, greedy(8))) == expected, "together"
        assert bits(engine.generate(prompts, greedy(8))) == expected, "from the device"
        assert engine.flush()
    with Engine(checkpoints(family), tiered, dtype=dtype) as engine:
        engine.forget_costs()
        found = engine.generate(prompts, greedy(8))
        assert bits(found) == expected, "after a restart"
        assert sum(completion.reused_tokens["disk"] for completion in found) > 0


@pytest.mark.rare
@pytest.mark.slow
@pytest.mark.parametrize(("family", "layers"), MANY_LAYERS)
def test_many_layers(family, layers, tmp_path):
    """Rounding grows with depth; four layers hide it."""
    path = tiny_models.write(family, tmp_path / "model", tiny_models.TinySize(layers=layers))
    prompts = [PROMPT, *OTHERS, PROMPT + OTHERS[1]]
    with Engine(path, Memory(kv_cache_memory="128MiB"), dtype="bfloat16") as engine:
        assert engine.exact
        expected = []
        for prompt in prompts:
            expected += bits(engine.generate([prompt], greedy(8)))
            engine.drop_device_cache()
    tiered = Memory(kv_cache_memory="32MiB", host_memory="128MiB", disk=f"{tmp_path / 'cache'}:512MiB")
    for _ in range(2):
        with Engine(path, tiered, dtype="bfloat16") as engine:
            engine.forget_costs()
            assert bits(engine.generate(prompts, greedy(8))) == expected
            assert engine.flush()


@pytest.mark.parametrize("family", mostly_rare(["llama", "gemma3", "qwen3_next"], ["gemma3"]))
def test_where_torch_is_quicker_with_many_rows(family, checkpoints, monkeypatch, tmp_path):
    """Pieces of prompts by torch, single tokens of all sequences by the kernels."""
    monkeypatch.setattr(kernels, "torch_is_faster", lambda dtype: True)
    forget_trials(monkeypatch, tmp_path)
    prompts = [PROMPT, *OTHERS, PROMPT + OTHERS[1]]
    with Engine(checkpoints(family), Memory(kv_cache_memory="32MiB"), dtype="bfloat16") as engine:
        assert engine.exact and engine.parts.pieces == Pieces(256, alone=True)
        expected = []
        for prompt in prompts:
            expected += bits(engine.generate([prompt], greedy(8)))
            engine.drop_device_cache()
        assert bits(engine.generate(prompts, greedy(8))) == expected, "together"
        found = engine.generate(prompts, greedy(8))
        assert bits(found) == expected, "from the device"
        assert sum(completion.reused_tokens["device"] for completion in found) >= 2 * 256


def test_bad_input(checkpoints, scanned):
    with pytest.raises(BudgetError, match="--max-num-batched-tokens 80"):
        Engine(checkpoints("qwen3_next"), Memory(kv_cache_memory="8MiB", max_num_batched_tokens=64), deterministic=True)
    with pytest.raises(BudgetError, match="raise --kv-cache-memory"):
        Engine(checkpoints("llama"), Memory(kv_cache_memory="34KiB", max_num_batched_tokens=16), deterministic=True)
    with pytest.raises(ConfigError, match="contradict each other"):
        Engine(checkpoints("llama"), deterministic=True, batch_dependent=True)


def _sequence(prompt, computed):
    sequence = object.__new__(Sequence)
    sequence.prompt_tokens, sequence.computed = prompt, computed
    return sequence


@given(st.integers(1, 400), st.sampled_from([16, 64]), st.lists(st.integers(1, 200), min_size=40, max_size=40))
def test_pieces_of_a_prompt(prompt, grid, budgets):
    """However small the steps, the same places are scanned; a prompt's last token may be alone."""
    pieces = Pieces(grid)
    sequence = _sequence(prompt, 0)
    for budget in budgets:
        count = pieces.cut(sequence, budget)
        assert 0 <= count <= budget
        assert count or budget < grid, "a piece of a whole grid always fits"
        end = sequence.computed + count
        if count:
            alone = sequence.computed >= prompt or (prompt % grid == 1 and sequence.computed == prompt - 1)
            assert (count == 1) == alone or (count == prompt == 1)
            assert alone or end % grid == 0 or end == prompt
        sequence.computed = end
    assert Pieces().cut(sequence, 7) == 7


@pytest.mark.parametrize("count", [1, 7, 255, 256, 257, 40_000, 70_001])
def test_functions_of_single_numbers(count):
    """Each number gives what it gives in any other place."""
    x = torch.linspace(-3, 3, 70_001)[:count]
    whole = torch.linspace(-3, 3, 70_001)
    with RowInvariance(linear=True, exact=True):
        for function in (torch.nn.functional.silu, torch.exp, torch.tanh, torch.cos, torch.nn.functional.softplus):
            assert torch.equal(function(x), function(whole)[:count])
            assert torch.equal(function(x[::3]), function(whole)[:count:3])
        assert torch.equal(x.clone().exp_(), x.exp())
