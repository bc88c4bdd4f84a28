"""64 clients for some seconds; `make load SECONDS=300` does the same for longer."""

from __future__ import annotations

import asyncio

import pytest

from tests.depth import few_or_all
from tests.server.load import FLAGS, Load, known_answers


@pytest.mark.slow
@pytest.mark.exhaustive
def test_nothing_is_lost_held_or_leaked(start, tiny_llama, tmp_path) -> None:
    server = start(*FLAGS, "--disk", f"{tmp_path / 'cache'}:64MiB")
    load = Load(server.url, server.pid, server.model, known_answers(tiny_llama))
    report = asyncio.run(load.run(clients=64, seconds=few_or_all(4, 8), rounds=3))
    assert report.faults() == []
    assert report.sent.total() >= few_or_all(8, 20), "too little was asked to say anything"
    server.stop()
    assert server.err.read_text() == "Stopping: writing what is held to the tiers below ...\n"


@pytest.mark.exhaustive
def test_attackers_harm_only_themselves(start, tiny_llama, tmp_path) -> None:
    """Every kind beside clients whose answers all come and are right; afterwards nothing is held."""
    cache = tmp_path / "cache"
    server = start(*FLAGS, "--disk", f"{cache}:64MiB")
    load = Load(server.url, server.pid, server.model, known_answers(tiny_llama), cache)
    report = asyncio.run(load.run(clients=4, seconds=few_or_all(4, 9), rounds=1, attacking=6))
    assert report.wrong == [] and len(report.waited_s[True]) > 5
    last = report.states[-1]
    assert not (last.choices_open or last.blocks_used or last.chunks_pinned or last.transfers)
    assert sum(report.told.values()) > 20 and not [kind for kind, status in report.told if status >= 500]
    assert server.total("stowage_request_memory_bytes") == 0
    server.stop()
    assert "Traceback" not in server.err.read_text()
