"""Packed in 4 bits but for what loses most by it: what is chosen is what was measured, wherever the weights lie."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from stowage import ConfigError, Memory
from stowage.errors import ModelError
from stowage.evaluation import sensitivity
from stowage.evaluation.sensitivity import Packable, chosen
from stowage.models import loading
from stowage.testing import tiny_models
from stowage.weights.quantized.modules import targets

TEXT = "The hold is full, and what is needed first lies on top. " * 9


def test_eight_bits_go_where_they_save_most_for_a_byte() -> None:
    sizes = [Packable("wide", 1000, 500, 1000), Packable("small", 100, 50, 100), Packable("head", 100, 100, 100)]
    divergences = {"wide": 0.5, "small": 0.1}
    assert chosen(sizes, divergences, 4.7) == {"small"}, "twice as much for a byte"
    assert chosen(sizes, divergences | {"wide": 2.0}, 7.7) == {"wide"}, "the small one would be too much then"
    assert chosen(sizes, divergences | {"small": 0.01}, 4.7) == {"small"}, "the wide one does not fit"
    assert chosen(sizes, divergences, 8.0) == {"wide", "small"}
    with pytest.raises(ConfigError, match=r"give 4\.34 or more"):
        chosen(sizes, divergences, 4.0)


def test_what_is_chosen_does_not_depend_on_where_the_weights_lie(checkpoints: Callable[..., Path]) -> None:
    source = checkpoints("llama")
    found = {
        rules: sensitivity.choose(str(source), Memory(weights=rules), TEXT, 32, 7.0) for rules in ("auto", "*=stream")
    }
    assert found["auto"] == found["*=stream"]
    paths = {target.path for target in targets(loading.load(source).model)}
    assert found["auto"] < paths, "some, not all"


def test_a_matrix_that_decides_nothing_is_in_4_bits_and_one_that_decides_all_in_8(tmp_path: Path) -> None:
    """Layer 0's down_proj is made so small that nothing of it is left, layer 1's so large that all else is noise."""
    source = tiny_models.write("llama", tmp_path / "model")
    model = loading.load(source).model
    layers = model.model.layers
    layers[0].mlp.down_proj.weight.data *= 1e-6
    layers[1].mlp.down_proj.weight.data *= 50
    model.save_pretrained(source)
    kept = sensitivity.choose(str(source), Memory(), TEXT, 32, 7.0)
    assert "model.layers.0.mlp.down_proj.weight" not in kept
    assert "model.layers.1.mlp.down_proj.weight" in kept


def test_stacked_experts_are_in_4_bits(tmp_path: Path) -> None:
    source = tiny_models.write("qwen3_moe", tmp_path / "model")
    kept = sensitivity.choose(str(source), Memory(), TEXT, 32, 7.0)
    assert kept
    assert not any("experts" in path for path in kept)


def test_without_a_tokenizer_or_with_too_little_text_nothing_is_chosen(
    checkpoints: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match="too short"):
        sensitivity.choose(str(checkpoints("llama")), Memory(), "", 32, 5.0)
    source = tiny_models.write("llama", tmp_path / "mute")
    for path in source.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(ModelError, match="no tokenizer"):
        sensitivity.choose(str(source), Memory(), TEXT, 32, 5.0)
