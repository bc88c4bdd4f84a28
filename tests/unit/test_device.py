"""Which device is taken, what is refused, and in which order CUDA's streams are asked for things."""

from __future__ import annotations

import types
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from stowage.core.copy_plan import CopyPlan
from stowage.core.geometry import Geometry, Group, Kind, split_arena
from stowage.cuda import copies as cuda_module
from stowage.cuda.copies import CudaCarrier, CudaCopies
from stowage.errors import ConfigError, TransferError
from stowage.executor.determinism.pieces import Pieces, device_rows, exact_candidates
from stowage.executor.device import carrier, device_of, link, resolve
from stowage.transfer.cpu import CpuTransfer
from stowage.transfer.staged import StagedTransfer

SLABS = split_arena(Geometry((Group(0, Kind.FULL, 16, 4, 192),)), 1 << 16)


def test_the_cpu_is_the_default() -> None:
    assert resolve("cpu") == device_of("some/model", "") == torch.device("cpu")
    assert isinstance(link(torch.device("cpu"), np.zeros(1 << 16, np.uint8), SLABS).transfer, CpuTransfer)
    assert carrier(torch.device("cpu")) is None


@pytest.mark.parametrize("name", ["gpu", "cuda:99", "cpu:x", "meta:1:2"])
def test_a_device_that_is_not_there(name: str) -> None:
    with pytest.raises(ConfigError, match=f"the device '{name}' cannot be used: "):
        resolve(name)


def test_cuda_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for built, why in (("12.8", "nvidia-smi"), (None, "built without CUDA")):
        monkeypatch.setattr(torch.version, "cuda", built)
        with pytest.raises(ConfigError, match=f"{why}.*Leave --device out"):
            resolve("cuda")


def test_where_answers_are_exact() -> None:
    def ways(device: str, *names: str) -> list[Pieces]:
        names = names or ("model.layers.0.mlp.up_proj.weight",)
        parameters = [(name, None) for name in names]
        config = SimpleNamespace(model_type="llama")
        return exact_candidates(
            SimpleNamespace(device=torch.device(device), config=config, named_parameters=lambda: parameters)
        )

    assert ways("cuda:0") == [Pieces(256, alone=True)]
    with pytest.raises(ConfigError, match=r"on CPUs and CUDA devices, and the model is on mps.*--device cpu"):
        ways("mps")
    with pytest.raises(ConfigError, match=r"how many chose it.*--device cpu"):
        ways("cuda:0", "model.layers.0.mlp.experts.gate_up_proj")


@pytest.mark.parametrize(("most", "rows"), [(1, 32), (32, 32), (33, 64), (200, 256), (1000, 256)])
def test_rows_of_a_device(most: int, rows: int) -> None:
    assert device_rows(most) == rows


class Cuda:
    """What is asked of torch.cuda, in order. ``lost``: its events fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, ...]] = []
        self.lost = False
        said = self.calls.append

        class Stream:
            def __init__(self, name: object) -> None:
                self.name = "leaving" if isinstance(name, torch.device) else str(name)

            def wait_stream(self, other: Stream) -> None:
                said(("wait", self.name, other.name))

            def wait_event(self, event: Event) -> None:
                said(("wait", self.name, event.number))

        class Event:
            def record(inner, stream: Stream) -> None:
                inner.number = len(self.calls)
                said(("record", stream.name))

            def query(inner) -> bool:
                if self.lost:
                    raise RuntimeError("the device is lost")
                return True

            def synchronize(inner) -> None:
                said(("synchronize",))
                if self.lost:
                    raise RuntimeError("the device is lost")

        for name, what in {
            "Stream": Stream,
            "Event": Event,
            "current_stream": lambda device: Stream("computing"),
            "stream": lambda stream: nullcontext(said(("on", stream.name))),
        }.items():
            monkeypatch.setattr(torch.cuda, name, what)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda piece, stream: said(("keep", stream.name)))


@pytest.mark.parametrize("pinned", [True, False])
def test_the_order_of_streams(pinned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store leaves after what was computed, and its piece is kept; unpinned, every copy is waited for."""
    cuda = Cuda(monkeypatch)
    copies = CudaCopies(torch.device("cpu"), types.SimpleNamespace(whole=True) if pinned else None)
    arena = np.zeros(1 << 16, np.uint8)
    transfer = StagedTransfer(arena, SLABS, copies)
    storage = torch.randint(1, 256, (5, 192), dtype=torch.uint8)
    plan = CopyPlan(0, np.array([3, 1]), np.array([0, 0]), np.array([0, 1]))
    stored = transfer.store(plan, storage)
    leaves = [("wait", "leaving", "computing"), ("keep", "leaving"), ("on", "leaving"), ("record", "leaving")]
    assert cuda.calls == leaves + ([] if pinned else [("synchronize",)])
    assert np.array_equal(arena[:384].reshape(2, 192), storage[[3, 1]].numpy()) and (stored is None) is not pinned
    cuda.calls.clear()
    before = storage.clone()
    storage.zero_()
    loaded = transfer.load(plan, storage)
    assert cuda.calls == [("record", "computing")] + ([] if pinned else [("synchronize",)])
    assert torch.equal(storage[[3, 1]], before[[3, 1]]) and (loaded is None) is not pinned
    if loaded is None:
        return
    cuda.lost = True
    assert loaded.done, "nothing is copied any more"
    with pytest.raises(TransferError, match="the device is lost"):
        loaded.wait()


@pytest.mark.parametrize("pinned", [True, False])
def test_the_order_of_weights(pinned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer is filled when what computed from it is over, and computed from when it is full; others meanwhile."""
    cuda = Cuda(monkeypatch)
    monkeypatch.setattr(
        cuda_module, "pin", lambda memory, device: types.SimpleNamespace(whole=True) if pinned else None
    )
    weights = CudaCarrier(torch.device("cpu"))
    weights.pin(np.zeros(1, np.uint8))
    there, here = torch.zeros(4), torch.arange(4.0)
    synchronized = [] if pinned else [("synchronize",)]
    ticket = weights.copy([0], [(there, here)])
    assert (ticket is None) is not pinned and torch.equal(there, here)
    first = [("wait", "leaving", "computing"), ("on", "leaving"), ("record", "leaving")]
    assert cuda.calls == first + synchronized, "nothing waits for it yet"
    weights.use([0])
    weights.use([1])
    assert cuda.calls == first + synchronized + [("wait", "computing", 2)]
    weights.computed([0, 2])
    recorded = len(cuda.calls) - 1
    assert cuda.calls[recorded] == ("record", "computing")
    weights.copy([1], [(there, here)])
    before = len(cuda.calls)
    weights.copy([0, 2], [(there, here)])
    again = [("wait", "leaving", recorded), ("on", "leaving"), ("record", "leaving")]
    assert cuda.calls[before:] == again + synchronized, "both were computed from at once: one wait"
    before = len(cuda.calls)
    weights.computed([0])
    weights.forget()
    weights.use([0])
    weights.copy([0], [(there, here)])
    assert cuda.calls[before + 1 :] == first + synchronized, "as if it had never been used"
    weights.pin(np.zeros(1, np.uint8))
    assert weights.asynchronous is pinned
    monkeypatch.setattr(cuda_module, "pin", lambda memory, device: None)
    weights.pin(np.zeros(1, np.uint8))
    assert not weights.asynchronous, "some of the memory is not pinned: every copy is waited for"
