"""Checkpoints packed without loss: the same model to the bit however it is delivered, and refused when damaged."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import stowage
from stowage.errors import CheckpointError, ConfigError, StorageError, UnsupportedModelError
from stowage.evaluation.pack import Packed, pack_lossless
from stowage.models import loading
from stowage.planner.headers import read_tensors
from stowage.weights import safetensors_file
from stowage.weights.checkpoint import Checkpoint
from stowage.weights.lossless import writer
from stowage.weights.lossless.packed_tensor import FRAME_BYTES, METADATA, PackedTensor
from tests.depth import mostly_rare
from tests.native import needs_native
from tests.weights.conftest import logits, prompt

pytestmark = needs_native
FAMILIES = ("llama", "qwen3_moe", "gpt_oss", "nemotron_h")
RULES = ("*=stream", "last 1 of 2=prefetch,*[a-z].0=stream,*=mapped", "*.experts=experts,*=stream")


@pytest.fixture(autouse=True)
def small_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "_LEAST_BYTES", 1024)


@pytest.fixture
def packed(checkpoints: Callable[..., Path], tmp_path: Path) -> Callable[[str], tuple[Path, Packed]]:
    def pack(family: str) -> tuple[Path, Packed]:
        return tmp_path / family, pack_lossless(str(checkpoints(family)), tmp_path / family)

    return pack


@pytest.mark.parametrize("family", mostly_rare(FAMILIES, ["llama", "nemotron_h"]))
def test_every_delivery_gives_the_bits_of_the_model_as_it_was(
    family: str, packed: Callable[[str], tuple[Path, Packed]], checkpoints: Callable[..., Path]
) -> None:
    directory, what = packed(family)
    assert what.tensors["lossless"] > 3 and what.bytes_after < what.bytes_before
    asked = [prompt(), prompt(36, 3).view(3, 12)]
    plain = loading.load(checkpoints(family)).model
    expected = [logits(plain, ids) for ids in asked]
    for name, values in loading.load(directory).model.state_dict().items():
        assert torch.equal(values.view(-1).view(torch.uint8), plain.state_dict()[name].view(-1).view(torch.uint8)), name
    for rules in RULES[: 3 if family in ("qwen3_moe", "gpt_oss") else 2]:
        model = stowage.offload(directory, weights=rules, host_memory="1GiB")
        for ids, found in zip(asked, expected, strict=True):
            assert torch.equal(logits(model, ids), found), rules
        model.stowage.check()
        model.stowage.close()


def test_what_loads_it_without_knowing_refuses_it(packed: Callable[[str], tuple[Path, Packed]]) -> None:
    directory, _ = packed("llama")
    with pytest.raises(RuntimeError, match="mismatch"):
        AutoModelForCausalLM.from_pretrained(directory)


def test_the_planner_sees_the_tensors_as_they_are_in_memory(
    packed: Callable[[str], tuple[Path, Packed]], checkpoints: Callable[..., Path]
) -> None:
    directory, _ = packed("llama")
    seen, known = ({t.name: (t.dtype, t.shape) for t in read_tensors(d)} for d in (directory, checkpoints("llama")))
    assert seen == known


def test_room_is_looked_for_before_anything_is_written(
    checkpoints: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more than it takes: what fits is packed."""
    source, whole = str(checkpoints("llama")), pack_lossless(str(checkpoints("llama")), tmp_path / "whole").bytes_after
    real, written = writer._Shard.write, []
    monkeypatch.setattr(writer._Shard, "write", lambda shard, done: (written.append(shard), real(shard, done)))
    monkeypatch.setattr(safetensors_file, "free_bytes", lambda _directory: int(whole * 0.8))
    with pytest.raises(StorageError, match=r"takes .*KiB, and .*KiB are free where .*out.part lies.*another disk"):
        pack_lossless(source, tmp_path / "out")
    assert written == [] and [path.name for path in tmp_path.iterdir()] == ["whole"]
    monkeypatch.setattr(safetensors_file, "free_bytes", lambda _directory: whole)
    assert pack_lossless(source, tmp_path / "out").bytes_after == whole and len(written) == 1


def test_it_is_written_once(packed: Callable[[str], tuple[Path, Packed]], tmp_path: Path) -> None:
    directory, _ = packed("llama")
    with pytest.raises(ConfigError, match="nothing is overwritten"):
        pack_lossless(str(directory), directory)
    with pytest.raises(UnsupportedModelError, match="packed already"):
        pack_lossless(str(directory), tmp_path / "again")
    assert not (tmp_path / "again").exists() and not (tmp_path / "again.part").exists()


# The form at rest


@pytest.fixture
def shard(tmp_path: Path) -> tuple[Path, dict[str, bytes]]:
    """A packed file, and the bytes of its tensors."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "large": torch.randn(2 * FRAME_BYTES + 77, generator=generator).to(torch.bfloat16),
        "wide": torch.randn(300, 301, generator=generator),
        "short": torch.randn(700, generator=generator).to(torch.float16),
        "noise": torch.randint(0, 255, (FRAME_BYTES + 9,), dtype=torch.uint8, generator=generator),
        "norm": torch.ones(5),
    }
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    save_file(tensors, tmp_path / "in" / "model.safetensors", {"format": "pt"})
    written = writer.write(
        [tmp_path / "in" / "model.safetensors"], tmp_path / "in", tmp_path / "out", lambda _done, _all: None
    )
    assert (written.packed, written.kept) == (3, 2)
    raw = {name: tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()}
    return tmp_path / "out" / "model.safetensors", raw


def test_any_part_can_be_read_alone(shard: tuple[Path, dict[str, bytes]]) -> None:
    path, raw = shard
    checkpoint, chance = Checkpoint([path]), random.Random(3)
    for name, whole in raw.items():
        segment = checkpoint.tensors[name]
        assert segment.length == len(whole) and segment.file.is_packed == (name in ("large", "wide", "short"))
        for _ in range(40):
            begin = min(chance.choice((0, FRAME_BYTES, chance.randrange(len(whole)))), len(whole) - 1)
            length = chance.choice((1, 64, 5000, FRAME_BYTES, len(whole)))
            expected = whole[begin : begin + length]
            assert segment.file.pread(min(length, segment.length - begin), segment.offset + begin) == expected
    large = checkpoint.tensors["large"].file
    assert isinstance(large, PackedTensor)
    whole_again = bytearray(large.length)
    large.fill_all(memoryview(whole_again))
    assert whole_again == raw["large"]
    assert path.stat().st_size < 0.85 * sum(map(len, raw.values()))
    checkpoint.close()


def header_of(path: Path) -> tuple[int, dict[str, Any]]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return length, json.loads(file.read(length))


@pytest.mark.parametrize(
    "lie",
    [
        lambda entry: entry["frames"].pop(),
        lambda entry: entry["frames"].append(5),
        lambda entry: entry["frames"].__setitem__(0, 0),
        lambda entry: entry["frames"].__setitem__(0, FRAME_BYTES + 1),
        lambda entry: entry["frames"].__setitem__(0, "x"),
        lambda entry: entry.__setitem__("dtype", "F8"),
        lambda entry: entry.__setitem__("shape", [1 << 40]),
        lambda entry: entry.__setitem__("shape", [-1]),
        lambda entry: entry.pop("frames"),
    ],
)
def test_a_header_that_lies_is_refused(shard: tuple[Path, dict[str, bytes]], lie: Callable[[Any], Any]) -> None:
    path, _ = shard
    length, header = header_of(path)
    packed = json.loads(header["__metadata__"][METADATA])
    lie(packed["large"])
    header["__metadata__"][METADATA] = json.dumps(packed)
    with path.open("r+b") as file:
        file.seek(8)
        file.write(json.dumps(header).encode().ljust(length)[:length])
    with pytest.raises(CheckpointError, match="damaged"):
        Checkpoint([path])


def test_damage_is_told_with_the_file(shard: tuple[Path, dict[str, bytes]]) -> None:
    path, _ = shard
    with safe_open(path, framework="pt") as file:
        at = bytes(path.read_bytes()).index(file.get_tensor("large").numpy().tobytes()[:64])
    with path.open("r+b") as raw:
        raw.seek(at + 17)
        raw.write(b"\xff")
    checkpoint = Checkpoint([path])
    with pytest.raises(stowage.StowageError, match="pack the checkpoint again"):
        checkpoint.tensors["large"].file.pread(100, 0)
    checkpoint.close()
