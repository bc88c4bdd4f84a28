"""Each matrix in as many bits as it needs, and fitted to what it reads: what was measured, wherever the weights lie."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from stowage import ConfigError, Memory
from stowage.demo import corpus
from stowage.errors import ModelError
from stowage.evaluation import calibration
from stowage.evaluation.calibration import Fitted
from stowage.evaluation.sensitivity import Choice, Gradients, Packable, chosen
from stowage.models import loading
from stowage.testing import tiny_models
from stowage.weights.quantized.codes import PackedMatrix
from stowage.weights.quantized.modules import targets
from tests.depth import mostly_rare

TEXT = "The hold is full, and what is needed first lies on top. " * 40


def fitted(source: Path, form: str | float, tmp_path: Path, rules: str = "auto") -> Fitted:
    return calibration.fit(str(source), Memory(weights=rules), TEXT, form, tmp_path)


def test_bytes_go_where_they_save_most() -> None:
    wide = Packable("wide", 1000, (Choice("int4", 500, 0.5), Choice("int8", 1000, 0.0)))
    small = Packable("small", 100, (Choice("int4", 50, 0.1), Choice("int8", 100, 0.0)))
    fixed = Packable("fixed", 100, (Choice("int8", 100),))
    matrices = [wide, small, fixed]
    assert chosen(matrices, 4.7) == {"wide": "int4", "small": "int8", "fixed": "int8"}, "twice as much for a byte"
    assert chosen(matrices, 8.0) == {"wide": "int8", "small": "int8", "fixed": "int8"}
    worse = Packable("wide", 1000, (Choice("int4", 500, 2.0), Choice("int8", 1000, 0.0)))
    assert chosen([worse, small, fixed], 7.7)["small"] == "int4", "it would be too much then"
    with pytest.raises(ConfigError, match=r"give 4\.34 or more"):
        chosen(matrices, 4.0)


def test_what_saves_less_for_a_byte_than_more_bytes_do_is_left_out() -> None:
    one = Packable(
        "one", 100, (Choice("a", 50, 1.0), Choice("b", 60, 0.95), Choice("c", 70, 0.2), Choice("d", 90, 0.1))
    )
    other = Packable("other", 100, (Choice("a", 50, 0.5), Choice("b", 60, 0.4), Choice("worse", 80, 0.6)))
    for total, expected in ((100, "aa"), (109, "aa"), (119, "ab"), (120, "ca"), (130, "cb"), (150, "db"), (200, "db")):
        assert "".join(chosen([one, other], total * 8 / 200).values()) == expected, total


def test_the_first_positions_count_by_themselves_and_later_ones_by_their_mean() -> None:
    tell = Gradients()
    for _ in range(2):
        tell.add(torch.tensor([[3.0, 4.0], [1.0, 0.0], [0.0, 2.0], [0.0, 0.0], [2.0, 0.0]])[None])
    assert tell.counts.tolist() == [50.0, 5.0, 5.0, 4.0, 4.0]
    assert torch.as_tensor(tell.outputs).tolist() == [28.0, 40.0]
    assert tell.read == 10


@pytest.mark.rare
def test_it_does_not_depend_on_where_the_weights_lie(checkpoints: Callable[..., Path], tmp_path: Path) -> None:
    source = checkpoints("llama")
    found = [fitted(source, 5.5, tmp_path, rules) for rules in ("auto", "*=stream")]
    assert found[0].forms == found[1].forms
    assert len(set(found[0].forms.values())) > 1
    model = loading.load(source).model
    for target in targets(model):
        values = target.module.weight
        one, other = (each.packed(target, values, "int8") for each in found)
        assert one[0] == other[0]
        assert torch.equal(one[1], other[1])


@torch.no_grad()
def test_fitted_matrices_change_answers_less(checkpoints: Callable[..., Path], tmp_path: Path) -> None:
    """On text that they were not fitted to."""
    source, errors, text = checkpoints("llama"), [], corpus.heldout_text()
    loaded = loading.load(source)
    ids = torch.tensor([loaded.tokenizer.encode(text[20_000:22_000])])
    expected = loaded.model(input_ids=ids).logits
    found = calibration.fit(str(source), Memory(), text[:12_000], "int4_32", tmp_path)
    for fit in (True, False):
        model = loading.load(source).model
        for target in targets(model):
            values = target.module.weight.detach()
            form = target.form("int4_32")
            packed = found.packed(target, values, "int4_32")[1] if fit else target.pack(values, form)
            target.module.weight.data = PackedMatrix(form, packed, torch.float32).dequantized()
        errors.append((model(input_ids=ids).logits - expected).square().mean())
    assert errors[0] < 0.9 * errors[1]


@pytest.mark.slow
@torch.no_grad()
def test_what_a_family_writes_to_is_fitted_as_it_was(tmp_path: Path) -> None:
    """RWKV divides weights of its deeper layers by powers of two when it first computes."""
    source = tiny_models.write("rwkv", tmp_path / "model")
    found = calibration.fit(str(source), Memory(), TEXT, "int4_32", tmp_path)
    for target in targets(loading.load(source).model):
        form, packed = found.packed(target, target.module.weight, "int4_32")
        off = PackedMatrix(form, packed, torch.float32).dequantized() - target.module.weight
        assert off.norm() < 0.2 * target.module.weight.norm(), target.path


@torch.no_grad()
@pytest.mark.parametrize("family", mostly_rare(["qwen3_moe", "gpt_oss"], ["qwen3_moe"]))
def test_experts_are_fitted_to_what_the_tokens_that_choose_them_bring(family: str, tmp_path: Path) -> None:
    """Two of them have inputs first. On text that they were not fitted to."""
    source, errors = tiny_models.write(family, tmp_path / "model"), []
    loaded = loading.load(source)
    ids = torch.tensor([loaded.tokenizer.encode(corpus.heldout_text()[:2000])])
    expected = loaded.model(input_ids=ids).logits
    found = calibration.fit(str(source), Memory(), corpus.calibration_text()[:12_000], "int4_32", tmp_path)
    for fit in (True, False):
        model = loading.load(source).model
        for target in targets(model):
            if target.experts:
                values, form = getattr(target.module, target.own), target.form("int4_32")
                packed = found.packed(target, values, "")[1] if fit else target.pack(values, form)
                each = [PackedMatrix(form, one.reshape(-1), torch.float32, target.transposed) for one in packed]
                values.data = torch.stack([one.dequantized() for one in each])
        errors.append((model(input_ids=ids).logits - expected).square().mean())
    assert 0 < errors[0] < 0.95 * errors[1]


def test_a_matrix_that_decides_nothing_gets_the_fewest_bits_and_one_that_decides_all_the_most(tmp_path: Path) -> None:
    """Layer 0's down_proj is made so small that nothing of it is left, layer 1's so large that all else is noise."""
    source = tiny_models.write("llama", tmp_path / "model")
    model = loading.load(source).model
    layers = model.model.layers
    layers[0].mlp.down_proj.weight.data *= 1e-6
    layers[1].mlp.down_proj.weight.data *= 50
    model.save_pretrained(source)
    forms = fitted(source, 6.0, tmp_path).forms
    assert forms["model.layers.0.mlp.down_proj.weight"] in ("int4_64", "int4_128")
    assert forms["model.layers.1.mlp.down_proj.weight"] == "int8"


@pytest.mark.parametrize("rules", mostly_rare(["auto", "*=experts"], ["*=experts"]))
def test_stacked_experts_are_in_4_bits(rules: str, tmp_path: Path) -> None:
    """And come with their layers meanwhile, where a cache of them would be used otherwise."""
    source = tiny_models.write("qwen3_moe", tmp_path / "model")
    forms = fitted(source, 5.5, tmp_path, rules).forms
    assert {form for path, form in forms.items() if "experts" in path} <= {"int4_64", "int4_32"}
    assert any("experts" in path for path in forms)


def test_without_a_tokenizer_or_with_too_little_text_nothing_is_fitted(
    checkpoints: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match="too short"):
        calibration.fit(str(checkpoints("llama")), Memory(), "One.", "int4_32", tmp_path)
    source = tiny_models.write("llama", tmp_path / "mute")
    for path in source.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(ModelError, match="no tokenizer"):
        calibration.fit(str(source), Memory(), TEXT, 5.0, tmp_path)
