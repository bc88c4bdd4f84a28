"""The committed model: its perplexity does not depend on where a prefix came from; the demo does what it says."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from stowage.config.memory import Memory
from stowage.demo import __main__ as demo
from stowage.demo.__main__ import main
from stowage.demo.corpus import heldout_text, model_path
from stowage.engine.engine import Engine
from stowage.engine.sampling_params import SamplingParams

WINDOW_TOKENS, SHARED_TOKENS, WINDOWS = 512, 256, 6
SCORE = SamplingParams(max_new_tokens=1, prompt_logprobs=0, prompt_logprobs_from=SHARED_TOKENS + 1)


def perplexity(engine: Engine, windows: list[list[int]], tier: str = "") -> float:
    """Per token, over the second half of every window, given its first half."""
    completions = [engine.generate([window], SCORE)[0] for window in windows]
    assert not tier or all(c.reused_tokens[tier] == SHARED_TOKENS for c in completions)
    scores = [score.logprob for c in completions for score in c.prompt_logprobs[SHARED_TOKENS + 1 :]]
    return math.exp(-sum(scores) / len(scores))


@pytest.mark.rare
def test_perplexity_is_the_same_through_every_tier(tmp_path):
    tokens = AutoTokenizer.from_pretrained(model_path())(heldout_text()[:20000])["input_ids"]
    windows = [tokens[i * WINDOW_TOKENS : (i + 1) * WINDOW_TOKENS] for i in range(WINDOWS)]
    with Engine(model_path(), Memory(kv_cache_memory="32MiB"), dtype="float32") as plain:
        expected = perplexity(plain, windows)
    assert expected < 60, "the committed model has learned English"
    memory = Memory(kv_cache_memory="32MiB", host_memory="64MiB", disk=f"{tmp_path / 'cache'}:128MiB")
    for tier in ("device", "host", "disk"):
        with Engine(model_path(), memory, dtype="float32", salt=tier) as engine:
            for window in windows:
                engine.generate([window[: SHARED_TOKENS + 1]], SamplingParams(max_new_tokens=1))
            assert engine.flush()
            if tier != "device":
                engine.drop_device_cache()
            if tier == "disk":
                engine.drop_host()
            assert perplexity(engine, windows, tier) == pytest.approx(expected, rel=1e-5)


def test_demo_without_a_model(tmp_path, monkeypatch):
    """As where the wheel was installed, which has none."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "model_path", lambda: tmp_path / "model")
    with pytest.raises(SystemExit, match=r"python -m stowage\.testing\.real_model"):
        main([])
    with pytest.raises(SystemExit, match="no checkpoint"):
        main(["--model", str(tmp_path)])


REAL = Path(__file__).parents[2] / demo.REAL_MODEL


@pytest.mark.rare
@pytest.mark.slow
@pytest.mark.parametrize("model", [model_path(), pytest.param(REAL, marks=pytest.mark.real)], ids=lambda m: m.name)
def test_demo(model, tmp_path, capsys):
    assert main(["--directory", str(tmp_path), "--model", str(model)]) == 0
    shown = capsys.readouterr().out
    for text in ("Placement", "after a restart", "from disk", "to the last bit: yes"):
        assert text in shown
    numbers = json.loads((tmp_path / "demo.json").read_text())
    first, second = (run["answers"][0] for run in numbers["runs"])
    assert numbers["identical"] and first["token_ids"] == second["token_ids"]
    assert sum(first["reused_tokens"].values()) == 0
    assert second["reused_tokens"]["disk"] == numbers["reused_from_disk"] > 2000
    assert ElementTree.fromstring((tmp_path / "demo.svg").read_text()).tag.endswith("svg")
