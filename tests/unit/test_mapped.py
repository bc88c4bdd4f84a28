"""Pinned host memory as a tensor of the device: which address it is given, and when it is not made."""

from __future__ import annotations

import gc

import pytest
import torch

from stowage.cuda.mapped import mapped

CPU = torch.device("cpu")


class Driver:
    """``shown``: where the device sees the host's addresses; what is not in it is not pinned."""

    def __init__(self, shown: dict[int, int], *, host_page_tables: bool = False) -> None:
        self._shown, self._host_page_tables = shown, host_page_tables

    def attribute(self, number: int, device: int) -> int:
        return int(self._host_page_tables and number == 100)

    def device_address(self, address: int) -> int:
        return self._shown.get(address, 0)


def test_it_shows_the_memory_at_the_devices_address() -> None:
    """The same bytes, whoever writes to them; it is nobody's to free."""
    here, elsewhere = torch.zeros(100, dtype=torch.uint8), torch.arange(100, dtype=torch.uint8)
    first, there = here.data_ptr(), elsewhere.data_ptr()
    view = mapped(here, CPU, Driver({first: there, first + 99: there + 99}))
    assert view.shape == (100,) and torch.equal(view, elsewhere) and view.data_ptr() == there
    elsewhere[3] = 77
    assert view[3] == 77
    del view
    gc.collect()
    assert elsewhere[3] == 77


def test_memory_that_is_not_there_is_refused() -> None:
    here = torch.zeros(100, dtype=torch.uint8)
    first = here.data_ptr()
    with pytest.raises(RuntimeError, match="not pinned"):
        mapped(here, CPU, Driver({}))
    for last in ({}, {first + 99: first + 100}):
        with pytest.raises(RuntimeError, match="not see it in one piece"):
            mapped(here, CPU, Driver({first: first} | last))


def test_a_device_with_the_hosts_page_tables_needs_no_pinning() -> None:
    here = torch.arange(100, dtype=torch.uint8)
    assert mapped(here, CPU, Driver({}, host_page_tables=True)).data_ptr() == here.data_ptr()
