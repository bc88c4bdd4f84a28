"""Checkpoints whose files are laid out, or hold tensors, otherwise than `save_pretrained` leaves them: every way to run
them takes what Transformers would.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import stowage
from stowage.evaluation import pack as packing
from stowage.models import identity, loading
from stowage.models.files import check_files
from stowage.planner.model import read_model
from tests.depth import mostly_rare
from tests.weights import published_files as files
from tests.weights.conftest import answers_of, assert_same_answers, logits, prompt
from tests.weights.test_published import METHODS, taken_by

WEIGHTS = "model.safetensors"


def _other(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in state.items()}


def _shards_in_folders(directory: Path) -> None:
    state, places = load_file(directory / WEIGHTS), dict[str, str]()
    (directory / WEIGHTS).unlink()
    for place, names in {"a/1.safetensors": sorted(state)[::2], "a/b/1.safetensors": sorted(state)[1::2]}.items():
        (directory / place).parent.mkdir(parents=True, exist_ok=True)
        save_file({name: state[name] for name in names}, directory / place, metadata={"format": "pt"})
        places |= dict.fromkeys(names, place)
    _index(directory, places)


def _index(directory: Path, places: dict[str, str]) -> None:
    index = {"metadata": {}, "weight_map": places}
    (directory / f"{WEIGHTS}.index.json").write_text(json.dumps(index))


def _beside_an_index(directory: Path) -> None:
    state = load_file(directory / WEIGHTS)
    shard = "model-00001-of-00001.safetensors"
    save_file(_other(state), directory / shard, metadata={"format": "pt"})
    _index(directory, dict.fromkeys(state, shard))


def _beside_an_old_one(directory: Path) -> None:
    save_file(_other(load_file(directory / WEIGHTS)), directory / "model_old.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("lay", [_shards_in_folders, _beside_an_index, _beside_an_old_one])
def test_files_are_those_that_transformers_reads(
    lay: Callable[[Path], None], checkpoints: Callable[..., Path], tmp_path: Path
) -> None:
    """Streamed, in memory, packed, planned, and in what a cached prefix is called after."""
    source = checkpoints("qwen3")
    directory = Path(shutil.copytree(source, tmp_path / "model"))
    lay(directory)
    expected = logits(AutoModelForCausalLM.from_pretrained(directory).eval(), prompt())
    model = stowage.offload(directory, weights="*=stream")
    assert torch.equal(logits(model, prompt()), expected)
    model.stowage.close()
    packing.pack_lossless(str(directory), tmp_path / "packed")
    assert torch.equal(logits(loading.load(tmp_path / "packed").model, prompt()), expected)
    assert read_model(directory).total_bytes == read_model(source).total_bytes
    if lay is not _shards_in_folders:
        names = [identity.of_checkpoint(one, check_files(one)) for one in (source, directory)]
        assert names[0] == names[1]


def test_published_weights_are_not_taken_from_a_file_beside_them(tmp_path: Path) -> None:
    published, plain = files.write("llama", tmp_path, *METHODS["fp8"][1:])
    expected = answers_of(plain)
    _beside_an_old_one(published)
    assert answers_of(published) == expected


def _tied(directory: Path, same: bool) -> Path:
    """Both the embedding and the output layer in the file, which the config says are one."""
    state = load_file(directory / WEIGHTS)
    embedding = next(tensor for name, tensor in state.items() if name.endswith("embed_tokens.weight"))
    head = {"lm_head.weight": embedding.clone()} if same else {}
    files.rewrite(directory, state | head, tie_word_embeddings=True)
    return directory


@pytest.mark.parametrize("same", [True, False], ids=["the same", "others"])
@pytest.mark.parametrize("family", mostly_rare(["llama", "gemma3"], ["llama"]))
def test_an_output_layer_beside_the_embedding_that_it_is_tied_to(
    family: str, same: bool, checkpoints: Callable[..., Path], tmp_path: Path
) -> None:
    """Transformers ties them if they are the same, and leaves them as they are if not."""
    directory = _tied(Path(shutil.copytree(checkpoints(family), tmp_path / "model")), same)
    whole = AutoModelForCausalLM.from_pretrained(directory).eval()
    for rules in ("*=stream", "*=mapped", "lm_head=stream"):
        model = stowage.offload(directory, weights=rules, host_memory="1GiB")
        assert (model.lm_head.weight is model.get_input_embeddings().weight) == same
        assert torch.equal(logits(model, prompt()), logits(whole, prompt()))
        model.stowage.close()
    apart = Path(shutil.copytree(directory, tmp_path / "apart"))
    files.rewrite(apart, tie_word_embeddings=False)
    if same:
        state = load_file(directory / WEIGHTS)
        files.rewrite(apart, {n: t for n, t in state.items() if n != "lm_head.weight"}, tie_word_embeddings=True)
    answers = []
    for source in (directory, apart):
        packing.pack(str(source), tmp_path / f"{source.name}-packed", "int8")
        answers.append(logits(loading.load(tmp_path / f"{source.name}-packed").model, prompt()))
    assert torch.equal(*answers)


@pytest.mark.parametrize("same", [True, False], ids=["the same", "others"])
def test_a_quantised_one_with_an_output_layer_beside_its_embedding(same: bool, tmp_path: Path) -> None:
    published, plain = files.write("llama", tmp_path, *METHODS["int4-32"][1:])
    for directory in (published, plain):
        _tied(directory, same)
    assert_same_answers(published, plain, "auto", "*=stream")
    model = loading.load(published).model
    twice = model.lm_head.weight.nbytes if same else 0
    assert read_model(published).total_bytes == taken_by(model) - twice
