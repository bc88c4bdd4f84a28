"""64 clients for some seconds; `make load SECONDS=300` does the same for longer."""

from __future__ import annotations

import asyncio

import pytest

from tests.server.load import FLAGS, Load, known_answers


@pytest.mark.slow
def test_nothing_is_lost_held_or_leaked(start, tiny_llama, tmp_path) -> None:
    server = start(*FLAGS, "--disk", f"{tmp_path / 'cache'}:64MiB")
    load = Load(server.url, server.pid, server.model, known_answers(tiny_llama))
    report = asyncio.run(load.run(clients=64, seconds=8, rounds=3))
    assert report.faults() == []
    assert report.sent.total() >= 20, "too little was asked to say anything"
    server.stop()
    assert server.err.read_text() == "Stopping: writing what is held to the tiers below ...\n"
