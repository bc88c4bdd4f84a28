"""What a model took comes back: threads, descriptors and memory; and a process that was forked has its own."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import stowage
from stowage.testing import tiny_models
from stowage.weights.scratch_file import scratch_directory
from tests.depth import mostly_rare
from tests.weights.conftest import bytes_of, logits, prompt

PLACEMENTS = [("llama", "*=stream"), ("mixtral", "*=experts"), ("llama", "*=mapped"), ("gemma3", "*=prefetch")]


def threads() -> int:
    return sum(thread.name == "stowage-weights" for thread in threading.enumerate())


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def settled(count: Callable[[], int], wanted: int) -> bool:
    """Threads end a moment after they are told."""
    for _ in range(200):
        if count() <= wanted:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("how", mostly_rare(["dropped", "closed", "failed"], ["dropped", "failed"]))
@pytest.mark.parametrize(("family", "rules"), PLACEMENTS)
def test_models_that_go_leave_nothing(how: str, family: str, rules: str, checkpoints: Callable[..., Path]) -> None:
    gc.collect()
    mapped = Path("/proc/self/maps")
    before = threads(), descriptors(), mapped.read_text().count(str(checkpoints(family)))
    for _ in range(2):
        model = stowage.offload(checkpoints(family), weights=rules, host_memory="1GiB")
        logits(model, prompt())
        if how == "closed":
            model.stowage.close()
            model.stowage.close()
        if how == "failed":
            with pytest.raises(IndexError):
                logits(model, prompt() + 100_000)
        del model
        gc.collect()
    assert settled(threads, before[0])
    assert settled(descriptors, before[1])
    assert mapped.read_text().count(str(checkpoints(family))) <= before[2]


class NothingMayBeCalled(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was called")


class NothingMayBeComputed(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was computed")


@pytest.mark.parametrize("mode", [NothingMayBeCalled, NothingMayBeComputed])
@pytest.mark.parametrize(("family", "rules"), PLACEMENTS)
def test_a_model_is_collected_under_modes_of_somebody_else(
    mode: type[Any], family: str, rules: str, checkpoints: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Garbage is collected anywhere: also while another model's step is written down."""
    raised: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", raised.append)
    gc.collect()
    before = threads(), descriptors()
    model = stowage.offload(checkpoints(family), weights=rules, host_memory="1GiB")
    logits(model, prompt())
    del model
    with mode():
        gc.collect()
    assert not raised, raised[0].exc_value
    assert settled(threads, before[0])
    assert settled(descriptors, before[1])


@pytest.mark.parametrize(("family", "rules"), PLACEMENTS)
def test_a_child_reads_for_itself(
    family: str, rules: str, checkpoints: Callable[..., Path], plain: Callable[..., Any]
) -> None:
    """Forked between forwards: parent and child go on, and neither disturbs the other."""
    model = stowage.offload(checkpoints(family), weights=rules, host_memory="1GiB")
    asked = [prompt(4 + 3 * seed, seed) for seed in range(6)]
    expected = [logits(plain(family), ids) for ids in asked]
    assert torch.equal(logits(model, asked[0]), expected[0])
    threads_before = torch.get_num_threads()
    torch.set_num_threads(1)  # those of OpenMP do not survive a fork, ours or not
    try:
        child = os.fork()
        if not child:
            code = 1
            try:
                signal.alarm(60)
                right = all(torch.equal(logits(model, i), e) for i, e in zip(asked * 3, expected * 3, strict=True))
                code = 0 if right else 2
            finally:
                os._exit(code)
        for ids, wanted in zip(asked * 3, expected * 3, strict=True):
            assert torch.equal(logits(model, ids), wanted)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        torch.set_num_threads(threads_before)
    model.stowage.check()


def test_a_budget_for_the_device_is_all_that_is_needed(
    checkpoints: Callable[..., Path], plain: Callable[..., Any]
) -> None:
    """For a checkpoint in its own type, in another one, and for a model in memory."""
    whole = plain("llama")
    budget = int(bytes_of(whole) * 0.6)
    assert torch.equal(
        logits(stowage.offload(checkpoints("llama"), device_memory=budget), prompt()), logits(whole, prompt())
    )
    half = stowage.offload(checkpoints("llama"), device_memory=int(budget * 0.7), dtype="bfloat16")
    assert torch.equal(logits(half, prompt()), logits(plain("llama", "bfloat16"), prompt()))
    built = tiny_models.build("llama").eval()
    expected = logits(built, prompt())
    assert torch.equal(logits(stowage.offload(built, device_memory=budget), prompt()), expected)
    assert built.stowage.scratch_bytes


def test_an_image_that_nobody_placed_is_not_in_memory(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text("none / ext4 rw 0 0\nnone /var/tmp tmpfs rw 0 0\nnone /tmp tmpfs rw 0 0\n")
    assert scratch_directory(mounts) is None
    mounts.write_text("none / tmpfs rw 0 0\nnone /var ext4 rw 0 0\n")
    place = scratch_directory(mounts)
    assert place is not None and place[0] == Path("/var/tmp") and place[1] > 0
