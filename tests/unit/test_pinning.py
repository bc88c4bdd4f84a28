"""Who pins, when, and what happens where it cannot be done (case B)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stowage.transfer import pinning
from stowage.transfer.pinning import Pinned, is_unified, pin, should_pin_memory

CUDA = torch.device("cuda", 1)


class Driver:
    """One that remembers what is pinned. ``room``: bytes that it pins; ``attributes``: of device 1."""

    def __init__(self, room: int = 1 << 40, **attributes: int) -> None:
        self.room, self.pinned = room, {}
        self.attributes = {18: attributes.get("integrated", 0), 100: attributes.get("host_page_tables", 0)}

    def attribute(self, number: int, device: int) -> int:
        assert device == 1
        return self.attributes.get(number, 0)

    def register(self, address: int, nbytes: int) -> int:
        if sum(self.pinned.values()) + nbytes > self.room:
            return 2
        assert address not in self.pinned
        self.pinned[address] = nbytes
        return 0

    def unregister(self, address: int) -> int:
        del self.pinned[address]
        return 0


@pytest.mark.parametrize(("attribute", "unified"), [("", False), ("integrated", True), ("host_page_tables", True)])
def test_unified_memory_is_never_pinned(attribute: str, unified: bool) -> None:
    driver = Driver(**{attribute: 1}) if attribute else Driver()
    assert is_unified(CUDA, driver) is unified and should_pin_memory(CUDA, driver) is not unified
    memory = np.zeros(100, dtype=np.uint8)
    assert (pin(memory, CUDA, driver) is None) is unified and bool(driver.pinned) is not unified


@pytest.mark.parametrize("switch", pinning.SWITCHES)
def test_the_switch(switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked anew each time: pinning again after an update does not forget it."""
    driver, memory = Driver(), np.zeros(100, dtype=np.uint8)
    first = pin(memory, CUDA, driver)
    assert first is not None and first.whole
    first.close()
    for value, pins in (("1", False), ("0", True), ("", True), ("true", False)):
        monkeypatch.setenv(switch, value)
        assert should_pin_memory(CUDA, driver) is pins
    assert pin(memory, CUDA, driver) is None and not driver.pinned


def test_nothing_is_pinned_for_a_cpu() -> None:
    assert not should_pin_memory(torch.device("cpu"), Driver())


def test_in_pieces_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinning, "PIECE_BYTES", 4096)
    driver, memory = Driver(), np.zeros(10_000, dtype=np.uint8)
    pinned = Pinned(driver, memory)
    assert pinned.whole and pinned.nbytes == 10_000
    assert driver.pinned == {memory.ctypes.data + at: size for at, size in ((0, 4096), (4096, 4096), (8192, 1808))}
    pinned.close()
    pinned.close()
    assert not driver.pinned and not pinned.whole


def test_a_driver_that_takes_only_part(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Copies from and to such memory wait for each other, so that none of it need stay pinned; and the log says why."""
    monkeypatch.setattr(pinning, "PIECE_BYTES", 4096)
    driver = Driver(room=8192)
    pinned = Pinned(driver, np.zeros(10_000, dtype=np.uint8))
    assert not pinned.whole and not driver.pinned
    assert "8192 of 10000 bytes" in caplog.text and "ulimit -l" in caplog.text


def test_a_machine_without_a_driver() -> None:
    """The real one is asked, and has nothing to say."""
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA driver here")
    assert not is_unified(torch.device("cuda", 0))
