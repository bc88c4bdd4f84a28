"""What cannot be packed, what is no whole packed directory, and what a killed process leaves."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import stowage
from stowage import CheckpointError, ConfigError, UnsupportedModelError
from stowage.errors import DirectoryError, StorageError
from stowage.evaluation import pack as packing
from stowage.evaluation.calibration import Fitted
from stowage.models import loading
from stowage.testing import tiny_models
from stowage.weights import safetensors_file
from stowage.weights.checkpoint import stored_in
from stowage.weights.quantized import modules
from tests.nursery import QUICKLY
from tests.weights import published_files as files
from tests.weights.conftest import logits, prompt
from tests.weights.test_published import words


def test_what_cannot_be_packed_is_refused_with_the_way_out(
    checkpoints: Callable[..., Path], packs: Callable[..., Path], tmp_path: Path
) -> None:
    llama, out = checkpoints("llama"), tmp_path / "out"

    def changed(name: str, **fields: Any) -> str:
        shutil.copytree(llama, tmp_path / name)
        config = json.loads((llama / "config.json").read_text())
        (tmp_path / name / "config.json").write_text(json.dumps(config | fields))
        return str(tmp_path / name)

    tied = tiny_models.build("gpt2")
    tied.config.tie_word_embeddings = True
    tied.lm_head.weight = tied.transformer.wte.weight
    tied.save_pretrained(tmp_path / "gpt2")
    pickled = changed("pickled")
    (tmp_path / "pickled" / "model.safetensors").rename(tmp_path / "pickled" / "pytorch_model.bin")
    quantised = changed("quantised", quantization_config={"quant_method": "fp8"})
    published = str(files.write("llama", tmp_path / "gptq", *words("gptq", 32))[0])
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF")
    cases: list[tuple[str, str, int, type[Exception], str]] = [
        (str(gguf), "int8", 64, UnsupportedModelError, "pack the Hugging Face checkpoint"),
        (str(packs("llama")), "int8", 64, UnsupportedModelError, "packed already"),
        (quantised, "int8", 64, UnsupportedModelError, r"quantised already \(fp8\)"),
        (published, "int8", 64, UnsupportedModelError, r"quantised already \(gptq\).*run it as it is"),
        (str(tmp_path / "gpt2"), "int8", 64, UnsupportedModelError, "no linear layers"),
        (pickled, "int8", 64, CheckpointError, "pickle"),
        (str(llama), "int3", 64, ConfigError, "int8, int4"),
        (str(llama), "int4", 100, ConfigError, "32, 64, 128"),
    ]
    for model, form, group, error, match in cases:
        with pytest.raises(error, match=match):
            packing.pack(model, out, form, group)
        assert not out.exists()
        assert not out.with_name("out.part").exists()
    with pytest.raises(UnsupportedModelError, match=r"quantised already \(gptq\).*run it as it is"):
        packing.pack_lossless(published, out)
    assert not out.with_name("out.part").exists()
    out.mkdir()
    with pytest.raises(ConfigError, match="nothing is overwritten"):
        packing.pack(str(llama), out, "int8")


def test_an_output_layer_may_be_all_that_is_packed(tmp_path: Path) -> None:
    """GPT-2's own layers are of a kind that is not, and its head is where it is not tied."""
    model = tiny_models.build("gpt2", tie_word_embeddings=False)
    model.save_pretrained(tmp_path / "gpt2")
    written = packing.pack(str(tmp_path / "gpt2"), tmp_path / "packed", "int8")
    assert written.tensors == {"int8": 1} and not written.bits
    packed = stowage.offload(tmp_path / "packed", weights="*=stream")
    whole = stowage.offload(tmp_path / "packed", weights="*=resident")
    assert torch.equal(logits(packed, prompt()), logits(whole, prompt()))


@pytest.mark.parametrize(
    ("family", "routers", "experts"),
    [
        ("longcat_flash", "mlp.router.", {"n_routed_experts": 16}),
        ("dbrx", "ffn.router.", {"ffn_config": {"moe_num_experts": 16, "ffn_hidden_size": 64, "hidden_size": 64}}),
        ("zaya", "mlp.gate.", {}),
        ("jetmoe", ".router.", {"num_local_experts": 16}),
    ],
)
def test_layers_that_routers_are_made_of_stay_as_they_were(
    family: str, routers: str, experts: dict[str, Any], tmp_path: Path
) -> None:
    source = tiny_models.write(family, tmp_path / "plain", **experts)
    packing.pack(str(source), tmp_path / "packed", "int8")
    plain, packed = (
        {one.name: one for file in directory.glob("*.safetensors") for one in stored_in(file)}
        for directory in (source, tmp_path / "packed")
    )
    own = {name for name, stored in plain.items() if routers in name and stored.shape[0] >= 16}
    assert own
    assert own <= packed.keys()
    assert packed.keys() - plain.keys()


def test_a_packed_directory_that_is_not_whole_is_refused(packs: Callable[..., Path], tmp_path: Path) -> None:
    def copied(name: str) -> Path:
        return Path(shutil.copytree(packs("llama"), tmp_path / name))

    newer = copied("newer")
    config = json.loads((newer / "config.json").read_text())
    config["quantization_config"]["version"] = 1
    (newer / "config.json").write_text(json.dumps(config))
    unmarked = copied("unmarked")
    del config["quantization_config"]
    (unmarked / "config.json").write_text(json.dumps(config))
    without, other, wider = copied("without"), copied("other"), copied("wider")
    resized = json.loads((wider / "config.json").read_text())
    resized["intermediate_size"] *= 2
    (wider / "config.json").write_text(json.dumps(resized))
    (without / modules.FILE).rename(without / "model.safetensors")
    shutil.copyfile(packs("qwen3_moe", "int4") / modules.FILE, other / modules.FILE)
    cut = copied("cut")
    os.truncate(cut / modules.FILE, (cut / modules.FILE).stat().st_size - 64)
    for path, match in (
        (newer, "reads version 2"),
        (unmarked, "config.json does not say so"),
        (without, "is missing"),
        (other, "no such matrix"),
        (wider, "different checkpoints"),
        (cut, "damaged"),
    ):
        with pytest.raises(CheckpointError, match=match):
            loading.load(path)


def test_bytes_of_another_kind_are_not_offloaded(tmp_path: Path) -> None:
    """Nothing would tell that they are offloaded."""
    model = tiny_models.build("llama")
    linear = model.model.layers[1].mlp.up_proj
    linear.weight = torch.nn.Parameter(torch.zeros(linear.weight.shape, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(UnsupportedModelError, match="does not know"):
        stowage.offload(model, weights="*=stream", disk=f"{tmp_path}:16MiB")


KILLED = """
import os, signal, sys
from pathlib import Path
from stowage.evaluation import pack as packing
source, directory = sys.argv[1:]
def progress(what, done, _all):
    if done == 12:
        os.kill(os.getpid(), signal.SIGKILL)
packing.pack(source, Path(directory), "int8", progress=progress)
"""


@pytest.mark.slow
def test_a_killed_process_leaves_nothing_that_looks_whole(checkpoints: Callable[..., Path], tmp_path: Path) -> None:
    out, part = tmp_path / "out", tmp_path / "out.part"
    arguments = [sys.executable, "-c", QUICKLY + KILLED, str(checkpoints("llama")), str(out)]
    done = subprocess.run(arguments, env=os.environ | {"PYTHONPATH": "src"}, timeout=300, check=False)
    assert done.returncode == -9
    assert not out.exists()
    assert part.exists()
    with pytest.raises(CheckpointError):
        loading.load(part)
    lock = os.open(part / ".packing", os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with pytest.raises(DirectoryError, match="another process"):
        packing.pack(str(checkpoints("llama")), out, "int8")
    os.close(lock)
    packing.pack(str(checkpoints("llama")), out, "int8")
    assert not part.exists()
    assert torch.isfinite(logits(loading.load(out).model, prompt())).all()


def test_what_no_packing_left_is_never_removed(checkpoints: Callable[..., Path], tmp_path: Path) -> None:
    """A directory that is called as the unfinished one would be, and is the user's own."""
    own = tmp_path / "out.part"
    own.mkdir()
    (own / "notes.txt").write_text("mine")
    for write in (
        lambda: packing.pack(str(checkpoints("llama")), tmp_path / "out", "int8"),
        lambda: packing.pack_lossless(str(checkpoints("llama")), tmp_path / "out"),
    ):
        with pytest.raises(DirectoryError, match=r"out.part exists, and pack would write there"):
            write()
    assert [path.name for path in own.iterdir()] == ["notes.txt"]
    (own / "notes.txt").unlink()
    (own / ".packing").touch()
    (own / "odd").mkdir()
    with pytest.raises(DirectoryError, match=r"cannot be emptied: .*odd"):
        packing.pack(str(checkpoints("llama")), tmp_path / "out", "int8")
    (own / "odd").rmdir()
    packing.pack(str(checkpoints("llama")), tmp_path / "out", "int8")
    assert (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize(("form", "fits"), [("int8", False), ("int4", True)])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_room_is_looked_for_before_what_takes_long(
    family: str,
    form: str,
    fits: bool,
    checkpoints: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All of the room that it takes, and no more: what fits is packed."""
    source, out = str(checkpoints(family)), tmp_path / "out"
    whole = packing.pack(source, tmp_path / "whole", form).bytes_after
    shutil.rmtree(tmp_path / "whole")
    begun: list[int] = []

    def pack(free: int) -> None:
        monkeypatch.setattr(safetensors_file, "free_bytes", lambda _directory: free)
        packing.pack(
            source, out, form, fit=(lambda part: Fitted(part)) if fits else None, begin=lambda: begun.append(free)
        )

    with pytest.raises(StorageError, match=r"takes .*KiB, and .*KiB are free where .*out lies.*another disk") as raised:
        pack(whole // 2)
    assert begun == [] and len(str(raised.value)) <= 400
    assert list(tmp_path.iterdir()) == []
    if fits:  # fitted matrices are there twice for a while
        with pytest.raises(StorageError):
            pack(whole)
    pack(2 * whole if fits else whole)
    assert len(begun) == 1 and (out / modules.FILE).exists()


def full_disk(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("form", ["int8", "lossless"])
def test_a_full_disk_is_told_as_one(
    form: str, checkpoints: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not as a checkpoint that cannot be read: Transformers is loading when packed weights are written."""

    monkeypatch.setattr(os, "pwrite", full_disk)
    source, out = str(checkpoints("mixtral")), tmp_path / "out"
    with pytest.raises(
        StorageError, match=r"out.part does not take the packed weights: No space left on device \(.* free\). Free some"
    ):
        packing.pack_lossless(source, out) if form == "lossless" else packing.pack(source, out, form)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_disk_that_is_full_while_matrices_are_fitted_is_told_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their bytes wait in a file of their own, and closing that one fails no second time."""
    full = Path("/dev/full")
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda dir, **options: full.open("r+b", **options))
    fitted = Fitted(tmp_path)
    with pytest.raises(StorageError, match=r"No space left on device \(.* free\). Free some space there, or give"):
        fitted.put("a.matrix", torch.zeros(64, dtype=torch.uint8))
    fitted.close()


@pytest.mark.parametrize("form", ["int8", "lossless"])
def test_what_becomes_of_other_files_that_cannot_be_written_is_told(
    form: str, checkpoints: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = str(checkpoints("mixtral")), tmp_path / "out"

    def pack(progress: Callable[[str, int, int], None] = lambda *_: None) -> None:
        if form == "lossless":
            packing.pack_lossless(source, out, progress)
        else:
            packing.pack(source, out, form, progress=progress)

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "copyfile", full_disk)
        with pytest.raises(StorageError, match=r"out.part does not take the packed checkpoint: No space left"):
            pack()
    assert list(tmp_path.iterdir()) == []

    def meanwhile(what: str, *_: int) -> None:
        if what == "checking":
            out.mkdir(exist_ok=True)
            (out / "notes.txt").write_text("mine")

    with pytest.raises(DirectoryError, match=r"out cannot be written: Directory not empty, and nothing is overwritten"):
        pack(meanwhile)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in out.iterdir()] == ["notes.txt"]
