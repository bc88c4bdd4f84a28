"""What weights are: the same content anywhere gives one identity, any other content another."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from stowage.errors import CheckpointError
from stowage.models import identity
from stowage.models.identity import of_checkpoint, of_parameters
from tests.forked import exit_code_of_a_child


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files count as old the moment they are written."""
    monkeypatch.setattr(identity, "_SETTLED_S", -1e9)


def make(directory: Path, weights: bytes = b"weights" * 1000) -> list[Path]:
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(weights)
    return [directory / "config.json", directory / "model.safetensors"]


def test_a_copy_is_the_same_model(tmp_path: Path) -> None:
    files = make(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    copies = [tmp_path / "b" / path.name for path in files]
    assert of_checkpoint(tmp_path / "a", files, tmp_path) == of_checkpoint(tmp_path / "b", copies, tmp_path)


def test_one_byte_makes_another_model(tmp_path: Path) -> None:
    first = of_checkpoint(tmp_path / "a", make(tmp_path / "a"), tmp_path)
    other = of_checkpoint(tmp_path / "b", make(tmp_path / "b", b"weightt" + b"weights" * 999), tmp_path)
    assert first != other


def test_a_model_that_is_a_file_is_what_all_its_files_hold(tmp_path: Path) -> None:
    """Of one that is split, whichever is given; with its part for pictures."""
    first, second = (tmp_path / f"m-0000{number}-of-00002.gguf" for number in (1, 2))
    other = tmp_path / "other.gguf"
    for path in (first, second, other):
        path.write_bytes(path.name.encode())
    assert identity.files_in(first) == identity.files_in(second) == [first, second]
    assert identity.files_in(other) == [other]
    pictures = tmp_path / "mmproj-m.gguf"
    pictures.write_bytes(b"")
    assert identity.files_in(second) == [first, second, pictures]
    second.unlink()
    with pytest.raises(CheckpointError, match=r"m-00002-of-00002\.gguf is missing"):
        identity.files_in(first)


def test_a_file_changed_in_place_is_hashed_again(tmp_path: Path, settled: None) -> None:
    files = make(tmp_path / "a")
    before = of_checkpoint(tmp_path / "a", files, tmp_path)
    with files[1].open("r+b") as file:
        file.write(b"W")
    os.utime(files[1], (2e9, 2e9))  # so that the test does not depend on how fine the file system's clock is
    assert of_checkpoint(tmp_path / "a", files, tmp_path) != before


def test_a_file_written_just_now_is_hashed_every_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within one tick of the clock a second write changes neither size nor times: they prove nothing yet."""
    files = make(tmp_path / "a")
    before = of_checkpoint(tmp_path / "a", files, tmp_path / "state")
    frozen = files[1].stat()
    with files[1].open("r+b") as file:
        file.write(b"W")
    real = Path.stat
    monkeypatch.setattr(Path, "stat", lambda path, **options: frozen if path == files[1] else real(path, **options))
    assert of_checkpoint(tmp_path / "a", files, tmp_path / "state") != before


def test_digests_are_remembered_privately(tmp_path: Path, settled: None) -> None:
    files = make(tmp_path / "a")
    first = of_checkpoint(tmp_path / "a", files, tmp_path / "state")
    memory = tmp_path / "state" / "identities.json"
    assert len(json.loads(memory.read_text())) == 2
    assert memory.stat().st_mode & 0o777 == 0o600
    assert of_checkpoint(tmp_path / "a", files, tmp_path / "state") == first
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["identities.json"]


def test_a_damaged_memory_costs_nothing_but_time(tmp_path: Path, settled: None) -> None:
    files = make(tmp_path / "a")
    first = of_checkpoint(tmp_path / "a", files, tmp_path / "state")
    for damage in ("{", "[]", '{"x": 3}', '{"x": "short"}'):
        (tmp_path / "state" / "identities.json").write_text(damage)
        assert of_checkpoint(tmp_path / "a", files, tmp_path / "state") == first


def test_parameters_in_memory() -> None:
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    before = of_parameters(model)
    assert of_parameters(model) == before
    with torch.no_grad():
        model.weight[2, 2] += 1e-3
    assert of_parameters(model) != before


def test_a_forked_child_names_weights_too(tmp_path: Path) -> None:
    """The threads that hashed them before are the parent's alone."""
    files = make(tmp_path / "a", os.urandom(8 << 20))
    name = of_checkpoint(tmp_path / "a", files, tmp_path)
    assert exit_code_of_a_child(lambda: of_checkpoint(tmp_path / "a", files, tmp_path) == name) == 0


@pytest.mark.parametrize("suffix", ["safetensors", "bin", "pt", "pth", "gguf"])
def test_all_files_that_others_read_weights_from_name_a_model(suffix: str, tmp_path: Path) -> None:
    """SGLang's and vLLM's plugins have one list of them."""
    from stowage.plugins.sglang import names

    make(tmp_path / "a")
    assert names._weights(str(tmp_path / "a")) == of_checkpoint(tmp_path / "a", identity.files_in(tmp_path / "a"))
    others = set()
    for content in (b"1", b"2"):
        (tmp_path / "a" / f"other.{suffix}").write_bytes(content)
        others.add(names._weights(str(tmp_path / "a")))
    assert len(others) == 2


def test_what_a_model_is_called_is_not_what_it_answers(tmp_path: Path) -> None:
    files = make(tmp_path / "a")
    for name in ("tokenizer.json", "generation_config.json", "model.safetensors.index.json", "README.md"):
        (tmp_path / "a" / name).write_text("{}")
    assert identity.files_in(tmp_path / "a") == files and identity.have_tensors(files)
    assert not identity.have_tensors([tmp_path / "config.json", tmp_path / "modeling.py"])
