"""Nothing ever shows a wrong weight: what is asked for between forwards is right to the bit, or refused in words."""

from __future__ import annotations

import copy
import errno
import fcntl
import io
import json
import os
import signal
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM

import stowage
from stowage.testing import tiny_models
from stowage.weights import saving
from stowage.weights.offloaded_parameter import OffloadedParameter, nan_placeholder
from stowage.weights.weight_unit import Delivery
from tests.depth import mostly_rare
from tests.families import all_of
from tests.weights.conftest import bytes_of, logits, prompt, take_tiny_units

PLACEMENTS = {
    "streamed": ("llama", "*=stream"),
    "tied": ("gemma3", "*=stream"),
    "experts": ("mixtral", "*=experts"),
    "prefetched": ("qwen3", "*=prefetch"),
    "rows": ("llama", ""),
}

NEVER_STREAMED = ("rwkv",)
"""Transformers saves its weights divided once it has computed."""


def contents(directory: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            found.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118  # no mapping
    return found


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        f.dtype is e.dtype and torch.equal(f, e) for f, e in ((found[n], expected[n]) for n in expected)
    )


def place(name: str, checkpoints: Callable[..., Path], plain: Callable[..., Any]) -> tuple[str, Any]:
    family, rules = PLACEMENTS[name]
    if not rules:
        model = stowage.offload(checkpoints(family), device_memory=int(bytes_of(plain(family)) * 0.7))
        assert Delivery.ROWS in model.stowage.placement.deliveries
        return family, model
    return family, stowage.offload(checkpoints(family), weights=rules, host_memory="1GiB")


@pytest.fixture(params=PLACEMENTS)
def placed(
    request: pytest.FixtureRequest, checkpoints: Callable[..., Path], plain: Callable[..., Any]
) -> tuple[str, Any]:
    return place(request.param, checkpoints, plain)


@pytest.fixture(scope="module", params=PLACEMENTS)
def lasting(
    request: pytest.FixtureRequest, checkpoints: Callable[..., Path], plain: Callable[..., Any]
) -> tuple[str, Any]:
    """One model for all the questions that must leave it as it was."""
    with pytest.MonkeyPatch.context() as patch:
        take_tiny_units(patch)
        return place(request.param, checkpoints, plain)


@pytest.mark.parametrize(
    "family",
    mostly_rare(
        all_of(family for family in tiny_models.FAMILIES if family not in NEVER_STREAMED),
        ["llama", "qwen3_moe", "deepseek_v3", "gpt_oss", "gemma4", "qwen3_next", "nemotron_h", "kimi_linear", "gpt2"],
    ),
)
def test_what_is_saved_is_what_transformers_saves(
    family: str, checkpoints: Callable[..., Path], plain: Callable[..., Any], tmp_path: Path
) -> None:
    model = stowage.offload(checkpoints(family), weights="*=stream")
    model.save_pretrained(tmp_path / "ours")
    plain(family).save_pretrained(tmp_path / "theirs")
    assert same(contents(tmp_path / "ours"), contents(tmp_path / "theirs"))
    assert sorted(p.name for p in (tmp_path / "ours").iterdir()) == sorted(
        p.name for p in (tmp_path / "theirs").iterdir()
    )
    for name in ("config.json", "generation_config.json"):
        ours, theirs = (tmp_path / whose / name for whose in ("ours", "theirs"))
        assert ours.exists() == theirs.exists() and (
            not ours.exists() or json.loads(ours.read_text()) == json.loads(theirs.read_text())
        )
    assert torch.equal(logits(model, prompt()), logits(plain(family), prompt()))


def test_shards_hold_what_one_file_holds(placed: tuple[str, Any], plain: Callable[..., Any], tmp_path: Path) -> None:
    family, model = placed
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(logits(again, prompt()), logits(plain(family), prompt()))
    assert same(again.state_dict(), plain(family).state_dict())
    model.save_pretrained(tmp_path, state_dict=None)  # as Trainer calls it; in one file now: no shard is left
    assert [path.name for path in tmp_path.glob("*.safetensors*")] == ["model.safetensors"]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(logits(again, prompt()), logits(plain(family), prompt()))


@pytest.mark.parametrize("rules", ["*=stream", "*=mapped", "*=prefetch"])
def test_a_model_is_saved_onto_the_directory_it_runs_from(rules: str, copied: Path, plain: Callable[..., Any]) -> None:
    before = contents(copied)
    model = stowage.offload(copied, weights=rules, host_memory="1GiB")
    for size in ("50GB", "200KB", "50GB"):
        model.save_pretrained(copied, max_shard_size=size)
        assert same(contents(copied), before)
        assert torch.equal(logits(model, prompt()), logits(plain("llama"), prompt()))
        again = stowage.offload(copied, weights="*=stream")
        assert torch.equal(logits(again, prompt()), logits(plain("llama"), prompt()))


def test_a_disk_that_fills_leaves_the_checkpoint_as_it_was(
    copied: Path, plain: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path.name: path.read_bytes() for path in copied.iterdir()}
    model = stowage.offload(copied, weights="*=stream")
    written = 0
    pwrite = os.pwrite

    def fills(fd: int, content: Any, offset: int) -> int:
        nonlocal written
        written += len(content)
        if written > 300_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(fd, content, offset)

    def interrupted(*_: Any) -> int:
        os.kill(os.getpid(), signal.SIGINT)
        return 0

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", fills)
        with pytest.raises(stowage.StorageError, match="No space left"):
            model.save_pretrained(copied)
        patched.setattr(os, "pwrite", interrupted)
        before_signal = signal.signal(signal.SIGINT, signal.default_int_handler)  # who runs the tests may ignore it
        try:
            with pytest.raises(KeyboardInterrupt):
                model.save_pretrained(copied)
        finally:
            signal.signal(signal.SIGINT, before_signal)
    assert {path.name: path.read_bytes() for path in copied.iterdir()} == before
    assert torch.equal(logits(model, prompt()), logits(plain("llama"), prompt()))
    with pytest.raises(stowage.ConfigError, match="is a file"):
        model.save_pretrained(copied / "config.json")


def test_what_a_killed_save_left_is_removed_by_the_next_one(copied: Path) -> None:
    (left := copied / ".saving-ki_led90").mkdir()
    (left / "0.part").write_bytes(b"half of it")
    mine = copied / ".saving-no_dir00"
    mine.write_text("no directory")
    (busy := copied / ".saving-busy0000").mkdir()
    (new := copied / ".saving-new00000").mkdir()
    (own := copied / ".saving-of-my-own").mkdir()
    for path in (left, mine, busy, own):
        os.utime(path, (1e9, 1e9))
    lock = os.open(busy, os.O_RDONLY)  # as the process does that saves there now
    fcntl.flock(lock, fcntl.LOCK_EX)
    stowage.offload(copied, weights="*=stream").save_pretrained(copied)
    os.close(lock)
    assert sorted(copied.glob(".saving-*")) == sorted((own, mine, busy, new))


def test_weights_are_read_by_name_right_to_the_bit(placed: tuple[str, Any], plain: Callable[..., Any]) -> None:
    family, model = placed
    expected = plain(family).state_dict()
    for name in expected:
        assert torch.equal(model.stowage.read(name), expected[name])
    given = dict(model.stowage.tensors())
    assert given and all(torch.equal(tensor, expected[name]) for name, tensor in given.items())
    model.stowage.read(next(iter(expected))).zero_()  # a copy
    assert torch.equal(logits(model, prompt()), logits(plain(family), prompt()))
    with pytest.raises(stowage.ModelError, match="no weight 'lm_haed'"):
        model.stowage.read("lm_haed")


READS: dict[str, Callable[[Any], Any]] = {
    "sum": lambda p: p.sum(),
    "item": lambda p: p[(0,) * p.dim()].item(),
    "numpy": lambda p: p.detach().numpy(),
    "data": lambda p: p.data,
    "clone": lambda p: p.clone(),
    "print": lambda p: f"{p}" if not repr(p) else p.tolist(),
    "copy": lambda p: torch.empty(p.shape, dtype=p.dtype).copy_(p),
    "write": lambda p: p.zero_(),
    "fill": lambda p: torch.nn.init.zeros_(p),
    "save": lambda p: torch.save(p, io.BytesIO()),
    "deepcopy": copy.deepcopy,
    "pickle": lambda p: p.__reduce_ex__(2),
    "half": lambda p: p.half(),
    "linear": lambda p: torch.nn.functional.linear(torch.ones(1, p.shape[-1]), p),
    "pointer": lambda p: p.data_ptr(),
    "equal": lambda p: torch.equal(p, p),
    "share": lambda p: p.share_memory_(),
    "numpy array": np.asarray,
}


@pytest.mark.parametrize("how", READS)
def test_a_weight_that_is_away_is_read_by_nobody(how: str, lasting: tuple[str, Any]) -> None:
    _, model = lasting
    logits(model, prompt())
    offloaded = {name: p for name, p in model.named_parameters() if isinstance(p, OffloadedParameter)}
    assert offloaded
    for name, parameter in offloaded.items():
        with pytest.raises(stowage.ModelError, match="is offloaded") as raised:
            READS[how](parameter)
        assert name in str(raised.value) or family_ties(model)
        assert parameter.device.type == "cpu" and parameter.numel() and len(parameter) == parameter.shape[0]
    assert model.device.type == "cpu" and model.dtype is torch.float32
    assert model.num_parameters() and model.get_memory_footprint()
    assert "NaN" not in repr(model) and all("offloaded" in repr(p) for p in offloaded.values())


MADE_BELOW_PYTHON: dict[str, Callable[[Any], Tensor]] = {
    "tensor": torch.tensor,
    "as_tensor": lambda p: torch.as_tensor(p, dtype=torch.float64),
    "asarray": lambda p: torch.asarray(p, copy=True, requires_grad=False),
    "Tensor": torch.Tensor,
    "new_tensor": lambda p: torch.ones(1).new_tensor(p),
    "as_subclass": lambda p: p.as_subclass(Tensor),
    "set": lambda p: torch.ones(p.shape).set_(p),
    "dlpack": lambda p: torch.from_dlpack(torch.utils.dlpack.to_dlpack(p)),
}


@pytest.mark.parametrize("how", MADE_BELOW_PYTHON)
@pytest.mark.filterwarnings("ignore:To copy construct")
def test_what_torch_makes_of_it_without_asking_holds_no_number(how: str, lasting: tuple[str, Any]) -> None:
    """These copy what they are given before Python is asked."""
    _, model = lasting
    logits(model, prompt())
    offloaded = [p for p in model.parameters() if isinstance(p, OffloadedParameter)]
    assert offloaded
    for parameter in offloaded:
        made = MADE_BELOW_PYTHON[how](parameter)
        assert made.shape == parameter.shape and bool(made.isnan().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.int32])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_what_stands_for_a_weight_that_is_away(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """A single number, too, in no more memory than one."""
    made = nan_placeholder(shape, dtype)
    assert made.shape == shape and made.dtype is dtype and made.untyped_storage().nbytes() == made.element_size()
    ones = 255 if dtype is torch.uint8 else -1
    assert bool(made.float().isnan().all()) if dtype.is_floating_point else bool((made == ones).all())


def family_ties(model: Any) -> bool:
    return bool(model.config.get_text_config().tie_word_embeddings)


WISHES: dict[str, tuple[Callable[[Any, Path], Any], str]] = {
    "state_dict": (lambda m, _: m.state_dict(), "save_pretrained"),
    "torch.save of it": (lambda m, to: torch.save(m.state_dict(), to / "x"), "save_pretrained"),
    "torch.save": (lambda m, to: torch.save(m, to / "x"), "save_pretrained"),
    "save_model": (lambda m, to: safetensors.torch.save_model(m, str(to / "x")), "save_pretrained"),
    "of a part": (lambda m, _: m.model.state_dict(), "save_pretrained"),
    "load_state_dict": (lambda m, _: m.load_state_dict({}), "without a budget"),
    "resize": (lambda m, _: m.resize_token_embeddings(600), "without a budget"),
    "deepcopy": (lambda m, _: copy.deepcopy(m), "Load it again"),
    "pickle": (lambda m, _: m.__reduce_ex__(2), "save_pretrained"),
    "source": (lambda m, _: copy.deepcopy(m.stowage), "load the model again"),
    "half": (lambda m, _: m.half(), "without a budget"),
    "bfloat16": (lambda m, _: m.to(torch.bfloat16), "without a budget"),
    "train": (lambda m, _: m.train(), "cannot be trained"),
    "push": (lambda m, to: m.save_pretrained(to, push_to_hub=True), "no hub"),
    "a dict of one's own": (lambda m, to: m.save_pretrained(to, state_dict={}), "takes no state_dict"),
}


@pytest.mark.parametrize("wish", WISHES)
def test_what_cannot_be_given_is_refused_with_the_way_out(
    wish: str, lasting: tuple[str, Any], plain: Callable[..., Any], tmp_path: Path
) -> None:
    family, model = lasting
    ask, way_out = WISHES[wish]
    if (
        wish == "of a part"
        and family == "llama"
        and not isinstance(model.model.layers[0].mlp.up_proj.weight, OffloadedParameter)
    ):
        way_out = "is offloaded"
    with pytest.raises(stowage.ModelError, match=way_out):
        ask(model, tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
    assert torch.equal(logits(model, prompt()), logits(plain(family), prompt()))
    model.stowage.check()


def test_what_changes_nothing_is_allowed(placed: tuple[str, Any], plain: Callable[..., Any]) -> None:
    family, model = placed
    assert model.to("cpu") is model and model.float() is model and model.eval() is model
    model.requires_grad_(False)
    model.tie_weights()
    assert torch.equal(logits(model, prompt()), logits(plain(family), prompt()))


def test_compiled_and_exported_models_are_right_or_refused(placed: tuple[str, Any], plain: Callable[..., Any]) -> None:
    family, model = placed
    expected = logits(plain(family), prompt())
    assert torch.equal(logits(torch.compile(model, backend="eager"), prompt()), expected)
    torch._dynamo.reset()  # else it runs what the line above compiled
    with torch.no_grad(), pytest.raises(Exception, match=r"offloaded weights|is offloaded"):
        torch.compile(model, fullgraph=True, backend="eager")(input_ids=prompt(), use_cache=False)
    with torch.no_grad(), pytest.raises(Exception, match=r"offloaded weights|is offloaded"):
        torch.export.export(model, (), {"input_ids": prompt(), "use_cache": False}, strict=False)
    with torch.no_grad(), pytest.raises(stowage.ModelError, match="traced graph"):
        torch.jit.trace(model, (prompt(),), strict=False)
    assert torch.equal(logits(model, prompt()), expected)
    model.stowage.check()


def test_saving_takes_the_memory_of_a_tensor(checkpoints: Callable[..., Path], tmp_path: Path) -> None:
    model = stowage.offload(checkpoints("llama"), weights="*=stream")
    largest, seen = max(p.numel() * p.element_size() for p in model.parameters()), list[int]()
    alive, read = list[weakref.ref[Tensor]](), model.stowage.read

    def watched(name: str) -> Tensor:
        values = read(name)
        alive.append(weakref.ref(values))
        seen.append(sum(t.nbytes for ref in alive if (t := ref()) is not None))
        return values

    saving.save(model, watched, type(model).save_pretrained.__get__(model), tmp_path)
    assert max(seen) <= 2 * largest < bytes_of(model) // 2


@pytest.mark.parametrize("name", ["tied", "rows"])
def test_another_table_is_what_an_embedding_computes_from(
    name: str, checkpoints: Callable[..., Path], plain: Callable[..., Any]
) -> None:
    """Where its own is read row by row, ids are numbered anew: not those of a table that somebody gives it."""
    family = PLACEMENTS[name][0]
    whole = plain(family)
    placed = {"weights": "*=stream"} if name == "tied" else {"device_memory": int(0.7 * bytes_of(whole))}
    model = stowage.offload(checkpoints(family), **placed)
    assert model.stowage.stats()["rows_bytes"] or name == "tied"
    own = dict(whole.named_parameters())
    table = next(key for key in own if "embed_tokens" in key)
    given = {"input_ids": prompt(), "use_cache": False}
    for values in ({table: own[table].clone()}, {table: own[table].flip(0).clone()}, own):
        with torch.no_grad():
            found, expected = (torch.func.functional_call(m, values, (), given).logits for m in (model, whole))
        assert torch.equal(found, expected)
    assert torch.equal(logits(model, prompt()), logits(whole, prompt()))


def test_autocast_keeps_no_copies_of_weights(checkpoints: Callable[..., Path], plain: Callable[..., Any]) -> None:
    """Its cache would hold the whole model, in half of its bytes, until the context ends."""
    model, seen = stowage.offload(checkpoints("llama"), weights="*=stream"), list[bool]()
    model.model.layers[0].register_forward_hook(lambda *_: seen.append(torch.is_autocast_cache_enabled()))
    with torch.autocast("cpu", torch.bfloat16):
        found = [logits(each, prompt()) for each in (plain("llama"), model, model)]
        assert torch.is_autocast_cache_enabled()
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert seen == [False, False]
